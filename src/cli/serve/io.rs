//! A connection and a clock, as hyper wants them from tokio. A client that does not read is not waited for.

use hyper::rt::{Read, ReadBufCursor, Sleep, Timer, Write};
use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Bytes that are read at once.
const AT_ONCE: usize = 4096;

/// One connection.
pub(super) struct Io {
    stream: TcpStream,
    /// How long its client may leave what it is sent unread.
    patience: Duration,
    /// When its client is given up, while it does not read.
    late: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Io {
    pub fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, patience, late: None }
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

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The time.
#[derive(Clone, Copy)]
pub(super) struct Clock;

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
