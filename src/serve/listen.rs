//! Connections, on a thread of their own.

use super::hub::Hub;
use super::io::{Clock, Io, Peer};
use super::route;
use crate::run::plan::{CONNECTION_BUFFER, CONNECTIONS};
use files::{Error, Result};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::{Request, Version};
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// How often the thread looks whether all is over.
const LOOK: Duration = Duration::from_millis(50);
/// How long the last answers may take to be read.
const LAST: Duration = Duration::from_secs(5);
/// Connections at once, at most.
const MOST: usize = CONNECTIONS;

/// Answers connections until [`Hub::end`] is called, and the last answers are read.
pub fn start(listener: TcpListener, hub: Arc<Hub>) -> Result<JoinHandle<()>> {
    let cannot = |what: &str, e: std::io::Error| Error::Other(format!("cannot {what}: {e}"));
    listener.set_nonblocking(true).map_err(|e| cannot("listen", e))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|e| cannot("answer connections", e))?;
    let listener = {
        let _entered = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(|e| cannot("listen", e))?
    };
    let run = move || runtime.block_on(accept(listener, hub));
    thread::Builder::new().name("http".into()).spawn(run).map_err(|e| cannot("start a thread", e))
}

async fn accept(listener: tokio::net::TcpListener, hub: Arc<Hub>) {
    let open = Arc::new(());
    while !hub.is_over() {
        match tokio::time::timeout(LOOK, listener.accept()).await {
            Ok(Ok((stream, _))) if Arc::strong_count(&open) <= MOST => {
                let (hub, open) = (Arc::clone(&hub), Arc::clone(&open));
                tokio::spawn(async move {
                    connection(stream, hub).await;
                    drop(open);
                });
            }
            // Too many connections, or no files left for them: some end soon.
            Ok(_) => tokio::time::sleep(LOOK).await,
            Err(_) => {}
        }
    }
    drop(listener);
    let end = Instant::now() + LAST;
    while Arc::strong_count(&open) > 1 && Instant::now() < end {
        hub.ending.notify_waiters();
        tokio::time::sleep(LOOK / 5).await;
    }
}

/// One connection. What goes wrong with it concerns nobody else.
async fn connection(stream: TcpStream, hub: Arc<Hub>) {
    let _ = stream.set_nodelay(true);
    let peer = Arc::new(Peer::default());
    let service = service_fn(|request: Request<Incoming>| {
        let (hub, peer) = (Arc::clone(&hub), Arc::clone(&peer));
        async move {
            peer.waits(request.version() >= Version::HTTP_11);
            let response = route::answer(hub, request, Arc::clone(&peer)).await;
            peer.waits(false);
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = Builder::new();
    // Some clients know the names of headers in this form alone.
    builder
        .timer(Clock)
        .header_read_timeout(hub.patience)
        .max_buf_size(CONNECTION_BUFFER)
        .title_case_headers(true);
    // A client may have closed its side once it has asked.
    builder.half_close(true);
    let io = Io::new(stream, hub.patience, Arc::clone(&peer));
    let mut connection = pin!(builder.serve_connection(io, service));
    let mut ending = pin!(hub.ending.notified());
    let mut asked = false;
    poll_fn(|context| {
        if !asked && ending.as_mut().poll(context).is_ready() {
            asked = true;
            connection.as_mut().graceful_shutdown();
        }
        match connection.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(()),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
