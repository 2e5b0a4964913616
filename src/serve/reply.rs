//! Answers as HTTP has them: whole, or as a stream of events.

use super::answer::Answer;
use super::budget::Share;
use super::io::Peer;
use super::refusal::Refusal;
use super::whole::{Turn, Whole};
use hyper::Response;
use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{HeaderName, HeaderValue};
use serde_json::Value;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// How long a stream may be silent: programs between take one that is for dead.
const SILENCE: Duration = Duration::from_secs(10);

/// A body.
pub enum Reply {
    Whole(Option<Bytes>),
    /// What may be long, with the memory that it takes.
    Long(Box<Long>),
    Stream(Box<Answer>, Option<Silence>),
}

impl Reply {
    /// Has a stream say `text` where it has nothing else to say for a while.
    pub fn keep_alive(&mut self, text: &'static str, peer: Arc<Peer>) {
        if let Reply::Stream(_, silence) = self {
            *silence = Some(Silence::new(text, SILENCE, peer));
        }
    }
}

/// The silence of a stream, which is broken now and then.
pub struct Silence {
    text: &'static str,
    most: Duration,
    end: Pin<Box<Sleep>>,
    peer: Arc<Peer>,
    /// Whether a client that sends no more was sent something, by which its system tells whether it still reads.
    tried: bool,
}

impl Silence {
    fn new(text: &'static str, most: Duration, peer: Arc<Peer>) -> Self {
        Self { text, most, end: Box::pin(sleep(most)), peer, tried: false }
    }

    /// What comes next, where the stream itself has this.
    fn poll(&mut self, next: Poll<Option<String>>, context: &mut Context<'_>) -> Poll<Option<String>> {
        let doubt = self.peer.has_ended() && !std::mem::replace(&mut self.tried, self.peer.has_ended());
        if next.is_pending() && !doubt && self.end.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let most = if self.tried { self.most / 2 } else { self.most };
        self.end.as_mut().reset(Instant::now() + most);
        if next.is_pending() { Poll::Ready(Some(self.text.into())) } else { next }
    }
}

/// A long answer.
pub struct Long {
    whole: Whole,
    _share: Share,
    turn: Turn,
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Reply::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Reply::Long(long) => {
                if long.turn.is_others(context) {
                    return Poll::Pending;
                }
                long.turn = Turn::Others;
                Poll::Ready(long.whole.next().map(|bytes| Ok(Frame::data(bytes))))
            }
            Reply::Stream(answer, silence) => {
                let next = answer.poll_next(context);
                let next = match silence {
                    Some(silence) => silence.poll(next, context),
                    None => next,
                };
                next.map(|next| next.map(|text| Ok(Frame::data(text.into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Reply::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Reply::Long(long) => {
                long.whole.len().map_or_else(SizeHint::default, |bytes| SizeHint::with_exact(bytes as u64))
            }
            Reply::Stream(..) => SizeHint::default(),
        }
    }
}

/// A response with headers, whose names are lower case.
pub fn response(status: u16, headers: &[(&'static str, &str)], reply: Reply) -> Response<Reply> {
    let mut response = Response::new(reply);
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
    for &(name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(HeaderName::from_static(name), value);
        }
    }
    response
}

/// A text of some type.
pub fn text(kind: &str, text: impl Into<Bytes>) -> Response<Reply> {
    response(200, &[("content-type", kind)], Reply::Whole(Some(text.into())))
}

/// The page, which may ask this server and nobody else.
pub fn page(html: &'static str) -> Response<Reply> {
    let headers = [
        ("content-type", "text/html; charset=utf-8"),
        (
            "content-security-policy",
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    ];
    response(200, &headers, Reply::Whole(Some(Bytes::from_static(html.as_bytes()))))
}

/// JSON.
pub fn json(status: u16, value: &Value) -> Response<Reply> {
    let bytes = Bytes::from(value.to_string());
    response(status, &[("content-type", "application/json; charset=utf-8")], Reply::Whole(Some(bytes)))
}

/// JSON that may be long, with the memory that it takes.
pub fn long(whole: Whole, share: Share) -> Response<Reply> {
    let long = Long { whole, _share: share, turn: Turn::Own };
    let headers = [("content-type", "application/json; charset=utf-8")];
    response(200, &headers, Reply::Long(Box::new(long)))
}

/// A stream of events.
pub fn stream(answer: Answer) -> Response<Reply> {
    let headers = [
        ("content-type", "text/event-stream; charset=utf-8"),
        ("cache-control", "no-cache"),
        // For proxies that would wait for more.
        ("x-accel-buffering", "no"),
    ];
    response(200, &headers, Reply::Stream(Box::new(answer), None))
}

/// Why there is no answer.
pub fn refusal(refusal: &Refusal, body: &Value) -> Response<Reply> {
    let mut response = json(refusal.status, body);
    if matches!(refusal.status, 429 | 503) {
        response.headers_mut().insert("retry-after", HeaderValue::from_static("1"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_stream_says_that_it_is_there_and_nothing_between_what_comes_in_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (text, peer) = (": waiting\n\n", Arc::new(Peer::default()));
        runtime.block_on(async {
            let most = Duration::from_millis(60);
            let mut silence = Silence::new(text, most, Arc::clone(&peer));
            for _ in 0..8 {
                sleep(most / 6).await;
                let next =
                    std::future::poll_fn(|c| Poll::Ready(silence.poll(Poll::Ready(Some("a".into())), c)));
                assert_eq!(next.await, Poll::Ready(Some("a".to_owned())));
            }
            for _ in 0..2 {
                let began = Instant::now();
                let next = std::future::poll_fn(|context| silence.poll(Poll::Pending, context)).await;
                assert_eq!(next.as_deref(), Some(text));
                assert!(began.elapsed() >= most / 2, "{:?}", began.elapsed());
            }
            // A client that may have gone is tried at once, and once.
            peer.end();
            let mut now =
                async || std::future::poll_fn(|c| Poll::Ready(silence.poll(Poll::Pending, c))).await;
            assert_eq!(now().await, Poll::Ready(Some(text.to_owned())));
            assert_eq!(now().await, Poll::Pending);
        });
    }
}
