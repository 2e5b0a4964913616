//! Client connections, served on one thread.

use super::client_stream::{ClientState, ClientStream};
use super::routes;
use super::state::{MAX_GRAMMAR_TASKS, ServerState};
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

/// Interval at which the accept loop checks for the end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time for clients to read the last responses.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts the thread that serves connections until [`ServerState::end_connections`] and the last responses are read.
pub fn start_thread(listener: TcpListener, state: Arc<ServerState>) -> Result<JoinHandle<()>> {
    let cannot = |what: &str, e: std::io::Error| Error::Other(format!("cannot {what}: {e}"));
    listener.set_nonblocking(true).map_err(|e| cannot("listen", e))?;
    // Worker threads stay once started. One starts now, in case the system refuses new threads later.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(request_threads() + MAX_GRAMMAR_TASKS)
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
        // No client waits for the remaining tasks.
        runtime.shutdown_background();
    };
    thread::Builder::new().name("http".into()).spawn(run).map_err(|e| cannot("start a thread", e))
}

async fn accept_connections(listener: tokio::net::TcpListener, state: Arc<ServerState>) {
    let open = Arc::new(());
    while !state.is_stopped() {
        match tokio::time::timeout(POLL_INTERVAL, listener.accept()).await {
            Ok(Ok((stream, _))) if Arc::strong_count(&open) <= CONNECTIONS => {
                let (state, open) = (Arc::clone(&state), Arc::clone(&open));
                tokio::spawn(async move {
                    serve_connection(stream, state).await;
                    drop(open);
                });
            }
            // Too many connections or no free file descriptor: waits for some to end.
            Ok(_) => tokio::time::sleep(POLL_INTERVAL).await,
            Err(_) => {}
        }
    }
    drop(listener);
    let end = Instant::now() + CLOSE_TIMEOUT;
    while Arc::strong_count(&open) > 1 && Instant::now() < end {
        state.shutdown.notify_waiters();
        tokio::time::sleep(POLL_INTERVAL / 5).await;
    }
}

/// Serves one connection; its errors only end this connection.
async fn serve_connection(stream: TcpStream, state: Arc<ServerState>) {
    let _ = stream.set_nodelay(true);
    let client = Arc::new(ClientState::default());
    let service = service_fn(|request: Request<Incoming>| {
        let (state, client) = (Arc::clone(&state), Arc::clone(&client));
        async move {
            if request.version() >= Version::HTTP_11 {
                client.start_waiting();
            }
            let response = routes::answer_request(state, request, Arc::clone(&client)).await;
            client.stop_waiting();
            Ok::<_, Infallible>(response)
        }
    });
    let mut builder = Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(state.patience)
        .max_buf_size(CONNECTION_BUFFER)
        // Some clients match header names only in this form.
        .title_case_headers(true)
        // A client may close its sending side after the request.
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
