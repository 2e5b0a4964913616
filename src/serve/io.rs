//! A connection and a clock, as hyper wants them from tokio. A client that does not read is not waited for; one that sends
//! no more is still answered, unless it has gone.

use hyper::rt::{Read, ReadBufCursor, Sleep, Timer, Write};
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Bytes that are read at once.
const AT_ONCE: usize = 4096;

/// Sent to a client that sends no more, before its answer. Whoever still reads passes over it; the system of one that has
/// gone says so.
const STILL_THERE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// How long after it is looked what the client's system says, at first and at most; then it is sent again.
const LOOKS: [Duration; 2] = [Duration::from_millis(5), Duration::from_secs(5)];

/// What is known of the client of a connection.
#[derive(Default)]
pub struct Peer {
    /// Whether it sends no more.
    ended: AtomicBool,
    /// Whether its request waits for an answer that `100 Continue` may come before.
    waits: AtomicBool,
}

impl Peer {
    /// A request has come, or has its answer.
    pub fn waits(&self, waits: bool) {
        self.waits.store(waits, Ordering::Relaxed);
    }

    /// It sends no more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Whether it sends no more: it has closed one side of the connection, or has gone.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }
}

/// When it is looked whether a client that sends no more has gone.
struct Doubt {
    pause: Duration,
    end: Pin<Box<tokio::time::Sleep>>,
}

/// One connection.
pub struct Io {
    stream: TcpStream,
    peer: Arc<Peer>,
    doubt: Option<Doubt>,
    /// How long its client may leave what it is sent unread.
    patience: Duration,
    /// When its client is given up, while it does not read.
    late: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Io {
    pub fn new(stream: TcpStream, patience: Duration, peer: Arc<Peer>) -> Self {
        Self { stream, peer, doubt: None, patience, late: None }
    }

    /// Looks whether the client has gone.
    ///
    /// # Errors
    ///
    /// It has.
    fn look(&mut self, context: &mut Context<'_>) -> Result<()> {
        let Some(doubt) = &mut self.doubt else {
            let ended = match self.stream.poll_peek(context, &mut ReadBuf::new(&mut [0])) {
                Poll::Ready(read) => read? == 0,
                Poll::Pending => false,
            };
            if ended {
                self.peer.end();
                self.doubt =
                    Some(Doubt { pause: LOOKS[0], end: Box::pin(tokio::time::sleep(Duration::ZERO)) });
                // An answer under way has something to say to it, and this is called again.
                context.waker().wake_by_ref();
            }
            return Ok(());
        };
        while doubt.end.as_mut().poll(context).is_ready() {
            if let Some(e) = self.stream.take_error()? {
                return Err(e);
            }
            let sends = doubt.pause == LOOKS[0] || doubt.pause == LOOKS[1];
            if sends && self.peer.waits.load(Ordering::Relaxed) {
                match self.stream.try_write(STILL_THERE) {
                    Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                    Ok(sent) if sent < STILL_THERE.len() => return Err(ErrorKind::WriteZero.into()),
                    _ => {}
                }
            }
            doubt.end.as_mut().reset(tokio::time::Instant::now() + doubt.pause);
            doubt.pause = (4 * doubt.pause).min(LOOKS[1]);
        }
        Ok(())
    }
}

impl Read for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut to: ReadBufCursor<'_>,
    ) -> Poll<Result<()>> {
        // Read here and copied: hyper's buffer cannot be lent without unsafe code.
        let mut room = [0; AT_ONCE];
        let mut read = ReadBuf::new(&mut room[..to.remaining().min(AT_ONCE)]);
        ready!(Pin::new(&mut self.stream).poll_read(context, &mut read))?;
        to.put_slice(read.filled());
        Poll::Ready(Ok(()))
    }
}

impl Write for Io {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        if let Poll::Ready(written) = Pin::new(&mut self.stream).poll_write(context, bytes) {
            self.late = None;
            return Poll::Ready(written);
        }
        let patience = self.patience;
        let late = self.late.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        ready!(late.as_mut().poll(context));
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the client does not read")))
    }

    /// Called whenever something may be done, when nothing is left to be written: so the client is looked after here.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        Poll::Ready(self.look(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The time.
#[derive(Clone, Copy)]
pub struct Clock;

struct Until(Pin<Box<tokio::time::Sleep>>);

impl Future for Until {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(context)
    }
}

impl Sleep for Until {}

impl Timer for Clock {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(Until(Box::pin(tokio::time::sleep(duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(Until(Box::pin(tokio::time::sleep_until(deadline.into()))))
    }
}
