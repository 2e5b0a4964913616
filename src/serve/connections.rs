//! Connections of clients, on a thread of their own.

use super::client_stream::{ClientState, ClientStream};
use super::routes;
use super::state::{GRAMMARS, ServerState};
use crate::run::plan::{CONNECTION_BUFFER, CONNECTIONS, request_threads};
use files::{Error, Result};
use hyper::body::Incoming;
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper::{Request, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::poll_fn;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Pause between two looks whether all is over.
const LOOK: Duration = Duration::from_millis(50);
/// Longest time that the last answers may take to be read.
const LAST_ANSWERS: Duration = Duration::from_secs(5);

/// Answers connections until [`ServerState::stop`] is called, and the last answers are read.
pub fn start(listener: TcpListener, state: Arc<ServerState>) -> Result<JoinHandle<()>> {
    let cannot = |what: &str, e: std::io::Error| Error::Other(format!("cannot {what}: {e}"));
    listener.set_nonblocking(true).map_err(|e| cannot("listen", e))?;
    // Threads that have started stay: where the system lets none start later, there is one for what takes a while.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(request_threads() + GRAMMARS)
        .thread_keep_alive(Duration::MAX)
        .thread_name("prompts")
        .build();
    let runtime = runtime.map_err(|e| cannot("answer connections", e))?;
    runtime.spawn_blocking(|| ());
    let listener = {
        let _entered = runtime.enter();
        tokio::net::TcpListener::from_std(listener).map_err(|e| cannot("listen", e))?
    };
    let run = move || {
        runtime.block_on(accept_connections(listener, state));
        // Nobody waits for the rest of the work.
        runtime.shutdown_background();
    };
    thread::Builder::new().name("http".into()).spawn(run).map_err(|e| cannot("start a thread", e))
}

async fn accept_connections(listener: tokio::net::TcpListener, state: Arc<ServerState>) {
    let open = Arc::new(());
    while !state.is_stopped() {
        match tokio::time::timeout(LOOK, listener.accept()).await {
            Ok(Ok((stream, _))) if Arc::strong_count(&open) <= CONNECTIONS => {
                let (state, open) = (Arc::clone(&state), Arc::clone(&open));
                tokio::spawn(async move {
                    serve_connection(stream, state).await;
                    drop(open);
                });
            }
            // Too many connections, or no files left for them: some end soon.
            Ok(_) => tokio::time::sleep(LOOK).await,
            Err(_) => {}
        }
    }
    drop(listener);
    let end = Instant::now() + LAST_ANSWERS;
    while Arc::strong_count(&open) > 1 && Instant::now() < end {
        state.shutdown.notify_waiters();
        tokio::time::sleep(LOOK / 5).await;
    }
}

/// Answers one connection. Its failures concern nobody else.
async fn serve_connection(stream: TcpStream, state: Arc<ServerState>) {
    let _ = stream.set_nodelay(true);
    let client = Arc::new(ClientState::default());
    let service = service_fn(|request: Request<Incoming>| {
        let (state, client) = (Arc::clone(&state), Arc::clone(&client));
        async move {
            client.set_waiting(request.version() >= Version::HTTP_11);
            let response = routes::answer(state, request, Arc::clone(&client)).await;
            client.set_waiting(false);
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(state.patience)
        .max_buf_size(CONNECTION_BUFFER)
        // Some clients know the names of headers in this form alone.
        .title_case_headers(true)
        // A client may have closed its side once it has asked.
        .half_close(true);
    let stream = ClientStream::new(stream, state.patience, Arc::clone(&client));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let mut shutdown = pin!(state.shutdown.notified());
    let mut is_ending = false;
    poll_fn(|context| {
        if !is_ending && shutdown.as_mut().poll(context).is_ready() {
            is_ending = true;
            connection.as_mut().graceful_shutdown();
        }
        connection.as_mut().poll(context).map(drop)
    })
    .await
}
