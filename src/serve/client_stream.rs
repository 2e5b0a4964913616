//! The stream of a connection. A client that does not read is not waited for; one that sends no more is still answered,
//! unless it has gone.

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

/// Sent to a client that sends no more, before its answer. Whoever still reads passes over it; the system of one that has
/// gone says so.
const STILL_THERE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// Pause between two looks at what the client's system says, at first and at most; after these two it is sent again.
const LOOKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(5)];

/// State of a connection's client.
#[derive(Default)]
pub struct ClientState {
    half_closed: AtomicBool,
    waiting: AtomicBool,
}

impl ClientState {
    /// Says whether its request waits for an answer that `100 Continue` may come before.
    pub fn set_waiting(&self, waiting: bool) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }

    /// Notes that it sends no more.
    pub fn set_half_closed(&self) {
        self.half_closed.store(true, Ordering::Relaxed);
    }

    /// Whether it sends no more: it has closed one side of the connection, or has gone.
    pub fn is_half_closed(&self) -> bool {
        self.half_closed.load(Ordering::Relaxed)
    }
}

/// Time of the next look whether a client that sends no more has gone.
struct NextLook {
    pause: Duration,
    sleep: Pin<Box<Sleep>>,
}

/// The stream of one connection.
pub struct ClientStream {
    stream: TcpStream,
    client: Arc<ClientState>,
    next_look: Option<NextLook>,
    /// Longest time that its client may leave what it is sent unread.
    patience: Duration,
    /// End of that time, while it does not read.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl ClientStream {
    pub fn new(stream: TcpStream, patience: Duration, client: Arc<ClientState>) -> Self {
        Self { stream, client, next_look: None, patience, deadline: None }
    }

    /// Looks whether the client has gone.
    ///
    /// # Errors
    ///
    /// It has.
    fn check_client(&mut self, context: &mut Context<'_>) -> Result<()> {
        let Some(look) = &mut self.next_look else {
            if let Poll::Ready(read) = self.stream.poll_peek(context, &mut ReadBuf::new(&mut [0]))
                && read? == 0
            {
                self.client.set_half_closed();
                self.next_look = Some(NextLook { pause: LOOKS[0], sleep: Box::pin(sleep(Duration::ZERO)) });
                // An answer under way has something to say to it, and this is called again.
                context.waker().wake_by_ref();
            }
            return Ok(());
        };
        while look.sleep.as_mut().poll(context).is_ready() {
            if let Some(e) = self.stream.take_error()? {
                return Err(e);
            }
            if LOOKS.contains(&look.pause) && self.client.waiting.load(Ordering::Relaxed) {
                match self.stream.try_write(STILL_THERE) {
                    Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                    Ok(sent) if sent < STILL_THERE.len() => return Err(ErrorKind::WriteZero.into()),
                    _ => {}
                }
            }
            look.sleep.as_mut().reset(Instant::now() + look.pause);
            look.pause = (4 * look.pause).min(LOOKS[1]);
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

    /// Called whenever something may be done, when nothing is left to be written: so the client is looked after here.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        Poll::Ready(self.check_client(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
