//! TCP stream of a client. A client that stops reading times out; one that has closed its sending side is still
//! answered, unless it has disconnected.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// Probe for a half-closed client before its response. HTTP clients ignore this line; the operating system of a client
/// that has disconnected answers it with a reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// First and longest pause between two checks of a half-closed client; at these two pauses the probe is sent.
const CHECK_PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(5)];

/// State of a connection's client.
#[derive(Default)]
pub struct ClientState {
    half_closed: AtomicBool,
    waiting: AtomicBool,
}

impl ClientState {
    /// Notes that a request waits for its response, so that `100 Continue` may be sent.
    pub fn start_waiting(&self) {
        self.waiting.store(true, Ordering::Relaxed);
    }

    pub fn stop_waiting(&self) {
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// Notes that the client has closed its sending side.
    pub fn set_half_closed(&self) {
        self.half_closed.store(true, Ordering::Relaxed);
    }

    /// Tells if the client has closed its sending side, or has disconnected.
    pub fn is_half_closed(&self) -> bool {
        self.half_closed.load(Ordering::Relaxed)
    }
}

/// Time of the next check of a half-closed client.
struct NextCheck {
    pause: Duration,
    sleep: Pin<Box<Sleep>>,
}

/// TCP stream of one client.
pub struct ClientStream {
    stream: TcpStream,
    client: Arc<ClientState>,
    next_check: Option<NextCheck>,
    /// Maximum time without the client reading.
    patience: Duration,
    /// End of that time, while a write is blocked.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    pub fn new(stream: TcpStream, patience: Duration, client: Arc<ClientState>) -> Self {
        Self { stream, client, next_check: None, patience, deadline: None }
    }

    /// Checks that the client is still connected.
    ///
    /// # Errors
    ///
    /// The client has disconnected.
    fn check_client(&mut self, context: &mut Context<'_>) -> Result<()> {
        let Some(check) = &mut self.next_check else {
            if let Poll::Ready(read) = self.stream.poll_peek(context, &mut ReadBuf::new(&mut [0]))
                && read? == 0
            {
                self.client.set_half_closed();
                let sleep = Box::pin(sleep(Duration::ZERO));
                self.next_check = Some(NextCheck { pause: CHECK_PAUSES[0], sleep });
                // Polls the response again, which may write a probe, and then this.
                context.waker().wake_by_ref();
            }
            return Ok(());
        };
        while check.sleep.as_mut().poll(context).is_ready() {
            if let Some(e) = self.stream.take_error()? {
                return Err(e);
            }
            if CHECK_PAUSES.contains(&check.pause) && self.client.waiting.load(Ordering::Relaxed) {
                match self.stream.try_write(PROBE) {
                    Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                    Ok(sent) if sent < PROBE.len() => return Err(ErrorKind::WriteZero.into()),
                    _ => {}
                }
            }
            check.sleep.as_mut().reset(Instant::now() + check.pause);
            check.pause = (4 * check.pause).min(CHECK_PAUSES[1]);
        }
        Ok(())
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, to)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        if let Poll::Ready(written) = Pin::new(&mut self.stream).poll_write(context, bytes) {
            self.deadline = None;
            return Poll::Ready(written);
        }
        let patience = self.patience;
        ready!(self.deadline.get_or_insert_with(|| Box::pin(sleep(patience))).as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read")))
    }

    /// Flushes, then checks the client: hyper calls this at every poll of the connection, also with nothing to write.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        Poll::Ready(self.check_client(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
