//! HTTP responses: a body of bytes, or a stream of events.

use super::client_stream::ClientState;
use super::error::ApiError;
use super::json_writer::{FRAME, JsonWriter};
use super::memory::MemoryShare;
use super::output::RequestOutput;
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

/// Maximum silence of a stream: proxies close one that is silent for long.
const MAX_SILENCE: Duration = Duration::from_secs(10);

pub type Response = hyper::Response<ResponseBody>;

/// Body of a response.
pub struct ResponseBody {
    content: BodyContent,
    /// Lets other connections run before the next frame; set after each long one.
    yields: bool,
}

enum BodyContent {
    /// Bytes with their memory share.
    Bytes {
        writer: JsonWriter,
        _share: Option<MemoryShare>,
    },
    Stream(Box<RequestOutput>, KeepAlive),
}

/// Timer that sends a text when a stream has been silent.
struct KeepAlive {
    text: &'static str,
    silence: Duration,
    sleep: Pin<Box<Sleep>>,
    client: Arc<ClientState>,
    /// Set once the text was sent to a half-closed client, to detect a disconnect.
    probed: bool,
}

impl KeepAlive {
    fn new(text: &'static str, silence: Duration, client: Arc<ClientState>) -> Self {
        Self { text, silence, sleep: Box::pin(sleep(silence)), client, probed: false }
    }

    /// Returns the next part of the stream, or the text if there is none in time.
    fn poll_next(&mut self, next: Poll<Option<String>>, context: &mut Context<'_>) -> Poll<Option<String>> {
        let probes = self.client.is_half_closed() && !std::mem::replace(&mut self.probed, true);
        if next.is_pending() && !probes && self.sleep.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        let silence = if self.probed { self.silence / 2 } else { self.silence };
        self.sleep.as_mut().reset(Instant::now() + silence);
        if next.is_pending() { Poll::Ready(Some(self.text.into())) } else { next }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let body = self.get_mut();
        if std::mem::take(&mut body.yields) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let next = match &mut body.content {
            BodyContent::Bytes { writer, .. } => Poll::Ready(writer.next_frame()),
            BodyContent::Stream(output, keep_alive) => {
                let next = output.poll_events(context);
                keep_alive.poll_next(next, context).map(|next| next.map(Bytes::from))
            }
        };
        body.yields = matches!(&next, Poll::Ready(Some(bytes)) if bytes.len() >= FRAME);
        next.map(|next| next.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(&self.content, BodyContent::Bytes { writer, .. } if writer.len() == Some(0))
    }

    fn size_hint(&self) -> SizeHint {
        let bytes = match &self.content {
            BodyContent::Bytes { writer, .. } => writer.len(),
            BodyContent::Stream(..) => None,
        };
        bytes.map_or_else(SizeHint::default, |bytes| SizeHint::with_exact(bytes as u64))
    }
}

/// Response with headers; their names are lower case.
fn with_headers(status: u16, headers: &[(&'static str, &str)], content: BodyContent) -> Response {
    let mut response = Response::new(ResponseBody { content, yields: false });
    *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
    for &(name, value) in headers {
        set_header(&mut response, name, value);
    }
    response
}

/// Sets a header; an invalid value is ignored.
pub fn set_header(response: &mut Response, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().insert(HeaderName::from_static(name), value);
    }
}

/// Response with a body of bytes.
pub fn bytes_response(headers: &[(&'static str, &str)], bytes: impl Into<Bytes>) -> Response {
    with_headers(200, headers, BodyContent::Bytes { writer: JsonWriter::from_bytes(bytes), _share: None })
}

/// JSON response, with the memory share of a long one.
pub fn json_response(status: u16, writer: JsonWriter, share: Option<MemoryShare>) -> Response {
    let headers = [("content-type", "application/json; charset=utf-8")];
    with_headers(status, &headers, BodyContent::Bytes { writer, _share: share })
}

/// A stream of events.
pub fn event_stream(output: RequestOutput, client: Arc<ClientState>) -> Response {
    let headers = [
        ("content-type", "text/event-stream; charset=utf-8"),
        ("cache-control", "no-cache"),
        // Prevents buffering in nginx.
        ("x-accel-buffering", "no"),
    ];
    let keep_alive = KeepAlive::new(output.keep_alive(), MAX_SILENCE, client);
    with_headers(200, &headers, BodyContent::Stream(Box::new(output), keep_alive))
}

/// Error response with a JSON body.
pub fn error_response(error: &ApiError, body: &Value) -> Response {
    let mut response = json_response(error.status, JsonWriter::from_value(body), None);
    if matches!(error.status, 429 | 503) {
        set_header(&mut response, "retry-after", "1");
    }
    if let Some(method) = error.allowed_method {
        set_header(&mut response, "allow", method);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_stream_says_that_it_is_there_and_nothing_between_what_comes_in_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let (text, client) = (": waiting\n\n", Arc::new(ClientState::default()));
        runtime.block_on(async {
            let silence = Duration::from_millis(60);
            let mut keep_alive = KeepAlive::new(text, silence, Arc::clone(&client));
            for _ in 0..8 {
                sleep(silence / 6).await;
                let part = || Poll::Ready(Some("a".to_owned()));
                let next = std::future::poll_fn(|c| Poll::Ready(keep_alive.poll_next(part(), c)));
                assert_eq!(next.await, part());
            }
            for _ in 0..2 {
                let began = Instant::now();
                let next = std::future::poll_fn(|c| keep_alive.poll_next(Poll::Pending, c)).await;
                assert_eq!(next.as_deref(), Some(text));
                assert!(began.elapsed() >= silence / 2, "{:?}", began.elapsed());
            }
            // A half-closed client is probed at once, and only once.
            client.set_half_closed();
            let mut now =
                async || std::future::poll_fn(|c| Poll::Ready(keep_alive.poll_next(Poll::Pending, c))).await;
            assert_eq!(now().await, Poll::Ready(Some(text.to_owned())));
            assert_eq!(now().await, Poll::Pending);
        });
    }
}
