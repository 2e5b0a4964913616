//! Which path is answered by what, who may ask, and what every answer carries.

use super::access::Client;
use super::answer::Gone;
use super::asked::How;
use super::facts;
use super::fields::Body as Sent;
use super::hub::{Hub, Served, Slots, name};
use super::io::Peer;
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::requests::{self, Begun, Prepared};
use super::tokens;
use super::whole::Whole;
use super::workers::Length;
use files::error::quoted;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::json;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// The chat page, which loads nothing else.
const PAGE: &str = include_str!("page.html");
/// The longest body, in bytes.
const BODY: usize = 8 << 20;
/// How much of a body that is not wanted is read, for a client that reads its answer only when it has sent all,
const UNWANTED: usize = 64 << 20;
/// for how long at most, and how long its next part may take.
const UNWANTED_TIME: Duration = Duration::from_secs(20);
const UNWANTED_PAUSE: Duration = Duration::from_secs(1);
/// What a stream of OpenAI's or llama.cpp's shape has where it has nothing to say,
const COMMENT: &str = ": waiting\n\n";
/// and one of Anthropic's.
const PING: &str = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
/// Room for a body at first, in bytes.
const LEAST: usize = 4 << 10;

type Result<T> = std::result::Result<T, Refusal>;
type Generates = fn(&Arc<Served>, Sent) -> Result<Prepared>;
type Tells = fn(&Arc<Served>, &mut Sent) -> Result<Whole>;

/// What answers a path.
enum Route {
    Page,
    Health,
    Metrics,
    Models,
    Model,
    Props,
    Slots,
    Generates(Generates),
    Tells(Tells),
}

/// A path without empty parts, as clients join addresses that end with `/`.
fn plain_path(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let plain: String = parts.flat_map(|part| ["/", part]).collect();
    if plain.is_empty() { "/".into() } else { plain }
}

impl Route {
    /// Of a [plain path](plain_path).
    fn of(path: &str) -> Option<Self> {
        let plain = path.strip_prefix("/v1").filter(|rest| rest.starts_with('/')).unwrap_or(path);
        Some(match plain {
            "/" if path == "/" => Route::Page,
            "/health" => Route::Health,
            "/metrics" => Route::Metrics,
            "/models" => Route::Models,
            _ if plain.starts_with("/models/") => Route::Model,
            "/props" => Route::Props,
            "/slots" => Route::Slots,
            "/chat/completions" => Route::Generates(requests::chat),
            "/completion" if path == plain => Route::Generates(requests::native),
            "/completions" => Route::Generates(requests::completions),
            "/responses" => Route::Generates(requests::responses),
            "/messages" => Route::Generates(requests::messages),
            "/messages/count_tokens" => Route::Tells(requests::count_tokens),
            "/tokenize" => Route::Tells(tokens::tokenize),
            "/detokenize" => Route::Tells(tokens::detokenize),
            "/apply-template" => Route::Tells(tokens::apply_template),
            _ => return None,
        })
    }

    /// Whether it needs no key.
    fn is_open(&self) -> bool {
        matches!(self, Route::Page) || self.is_told_to_all()
    }

    /// Whether it tells routers and probes, which know this machine by any name, and nothing that is secret.
    fn is_told_to_all(&self) -> bool {
        matches!(self, Route::Health | Route::Metrics)
    }

    fn takes(&self) -> &'static str {
        match self {
            Route::Generates(_) | Route::Tells(_) => "POST",
            _ => "GET",
        }
    }
}

/// Answers a request.
pub async fn answer(hub: Arc<Hub>, request: Request<Incoming>, peer: Arc<Peer>) -> Response<Reply> {
    let id = request.headers().get("x-request-id").cloned();
    let id = id.filter(|id| id.len() <= 256);
    let path = plain_path(request.uri().path());
    let anthropic = path.starts_with("/v1/messages") || path.starts_with("/messages");
    let (head, body) = request.into_parts();
    let reader = hub.access.reader(&head);
    let mut body = Some(body);
    let answered = of(&hub, (&head, &path), &mut body).await;
    if let Some(unread) = body {
        forget(&head.headers, unread);
    }
    let mut response = match answered {
        Ok(response) => response,
        Err(refusal) if anthropic => reply::refusal(&refusal, &refusal.anthropic()),
        Err(refusal) => reply::refusal(&refusal, &refusal.json()),
    };
    response.body_mut().keep_alive(if anthropic { PING } else { COMMENT }, peer);
    let headers = response.headers_mut();
    let made = || HeaderValue::from_str(&name("req-")).unwrap_or(HeaderValue::from_static("req"));
    headers.insert("x-request-id", id.unwrap_or_else(made));
    headers.insert("vary", HeaderValue::from_static("origin"));
    if let Some(reader) = reader {
        headers.insert("access-control-allow-origin", reader);
        headers
            .insert("access-control-expose-headers", HeaderValue::from_static("x-request-id, retry-after"));
    }
    response
}

/// The answer to a request for a [plain path](plain_path); a body that is not read stays.
async fn of(
    hub: &Arc<Hub>,
    (head, path): (&Parts, &str),
    body: &mut Option<Incoming>,
) -> Result<Response<Reply>> {
    if head.method == Method::OPTIONS {
        hub.access.check(head)?;
        return Ok(preflight(&head.headers));
    }
    if head.headers.contains_key("transfer-encoding") && head.headers.contains_key("content-length") {
        *body = None;
        return Err(Refusal::new(400, "two lengths: Transfer-Encoding and Content-Length; send one"));
    }
    let Some(route) = Route::of(path) else {
        return Err(Refusal::new(404, format!("there is nothing at {}", quoted(path))));
    };
    if !route.is_told_to_all() {
        hub.access.check(head)?;
    }
    let client = hub.access.identify(key(&head.headers)).or(route.is_open().then(Client::default));
    let Some(client) = client else {
        return Err(Refusal::new(
            401,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
        ));
    };
    let method = if head.method == Method::HEAD { "GET" } else { head.method.as_str() };
    if method != route.takes() {
        let message = format!("{} takes {}, not {}", quoted(path), route.takes(), quoted(method));
        let refusal = Refusal::new(405, message);
        let mut response = reply::json(405, &refusal.json());
        response.headers_mut().insert("allow", HeaderValue::from_static(route.takes()));
        return Ok(response);
    }
    match route {
        Route::Generates(prepare) => {
            let served = hub.served()?;
            let sent = read(hub, (&head.headers, body), Sent::new(&served.budget, client)).await?;
            generate(hub, prepare, (served, sent)).await
        }
        Route::Tells(tell) => {
            let served = hub.served()?;
            let mut sent = read(hub, (&head.headers, body), Sent::new(&served.budget, client)).await?;
            let length = Length::of(sent.bytes.len());
            let _gone = Gone(sent.cancel.clone());
            let tell = move || Ok((tell(&served, &mut sent)?, sent.share));
            let (told, share) = hub.work(length, tell).await?;
            Ok(reply::long(told, share))
        }
        route => fact(hub, &route, path),
    }
}

/// What the server is and does.
fn fact(hub: &Hub, route: &Route, path: &str) -> Result<Response<Reply>> {
    let loaded = || hub.loaded().ok_or_else(|| Refusal::new(503, "the model is being loaded"));
    Ok(match route {
        Route::Page => reply::page(PAGE),
        Route::Health => {
            hub.served()?;
            reply::json(200, &json!({"status": "ok"}))
        }
        Route::Metrics => {
            let metrics = facts::metrics(loaded()?);
            let mut response = reply::text("text/plain; version=0.0.4; charset=utf-8", metrics);
            response.headers_mut().insert("process-start-time-unix", hub.created.into());
            response
        }
        Route::Models => reply::json(200, &facts::models(hub)),
        Route::Model if path.ends_with(&format!("/models/{}", hub.model)) => {
            reply::json(200, &facts::model(hub))
        }
        Route::Props => reply::json(200, &facts::props(loaded()?)),
        Route::Slots if hub.slots == Slots::Hidden => {
            return Err(Refusal::new(501, "this server does not tell what its slots do"));
        }
        Route::Slots => reply::json(200, &facts::slots(loaded()?)),
        _ => return Err(Refusal::new(404, format!("the one model is {:?}", hub.model))),
    })
}

async fn generate(
    hub: &Arc<Hub>,
    prepare: Generates,
    (served, body): (Arc<Served>, Sent),
) -> Result<Response<Reply>> {
    let length = Length::of(body.bytes.len());
    // The model may have begun to shut down while the body came.
    hub.served()?;
    let Begun { answer, how } = match hub.work(length, move || prepare(&served, body)).await? {
        Prepared::Begun(begun) => begun,
        Prepared::Compiles(begin) => hub.work_apart(begin).await?,
    };
    if how != How::Whole {
        return Ok(reply::stream(answer));
    }
    let complete = answer.complete().await?;
    let (whole, share) = match complete.length() {
        Length::Short => complete.write(),
        Length::Long => hub.work(Length::Long, move || Ok(complete.write())).await?,
    };
    Ok(reply::long(whole, share))
}

/// The key of a request.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get("authorization").and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// What a page of another origin may send.
fn preflight(headers: &HeaderMap) -> Response<Reply> {
    let asked = headers.get("access-control-request-headers").and_then(|value| value.to_str().ok());
    let asks_for = |name| headers.get(name).is_some_and(|value: &HeaderValue| value == "true");
    let headers = [
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        (
            "access-control-allow-headers",
            asked.unwrap_or("authorization, content-type, x-api-key, x-request-id"),
        ),
        ("access-control-max-age", "86400"),
    ];
    let mut response = reply::response(200, &headers, Reply::Whole(None));
    // A page of the web asks a machine of somebody's own network.
    if asks_for("access-control-request-private-network") {
        response
            .headers_mut()
            .insert("access-control-allow-private-network", HeaderValue::from_static("true"));
    }
    response
}

/// Refuses a body that is compressed.
fn check_encoding(headers: &HeaderMap) -> Result<()> {
    let all = headers.get_all("content-encoding").iter();
    match all.map(HeaderValue::as_bytes).find(|name| !name.eq_ignore_ascii_case(b"identity")) {
        Some(name) => {
            let name = quoted(&String::from_utf8_lossy(name));
            Err(Refusal::new(
                415,
                format!("Content-Encoding: is {name}; send the body as it is, without one"),
            ))
        }
        None => Ok(()),
    }
}

/// The next part of a body.
async fn next(body: &mut Incoming) -> Option<hyper::Result<Frame<Bytes>>> {
    poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

/// Reads a body that nobody wants, beside the answer: a client that sends all of it first would hear of a broken
/// connection only.
fn forget(headers: &HeaderMap, mut body: Incoming) {
    // Who waits to be told to go on sends none.
    if body.is_end_stream() || headers.contains_key("expect") {
        return;
    }
    let read = async move {
        let mut left = UNWANTED;
        while let Ok(Some(Ok(frame))) = timeout(UNWANTED_PAUSE, next(&mut body)).await {
            let Some(less) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { break };
            left = less;
        }
    };
    tokio::spawn(timeout(UNWANTED_TIME, read));
}

/// The whole body, which takes memory as it comes. One that is refused stays, to be [forgotten](forget).
async fn read(
    hub: &Hub,
    (headers, left): (&HeaderMap, &mut Option<Incoming>),
    mut sent: Sent,
) -> Result<Sent> {
    check_encoding(headers)?;
    let too_long = || Refusal::new(413, format!("the body is longer than {} MiB", BODY >> 20));
    let said = headers.get("content-length").and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    if said.is_some_and(|n| n > BODY as u64) {
        return Err(too_long());
    }
    let Some(mut body) = left.take() else { return Ok(sent) };
    let most = said.map_or(BODY, |n| n as usize);
    let all = async {
        while let Some(frame) = next(&mut body).await {
            let frame = frame.map_err(|e| Refusal::new(400, format!("the body ends early: {e}")))?;
            let data = frame.into_data().unwrap_or_default();
            let (need, room) = (sent.bytes.len() + data.len(), sent.bytes.capacity());
            let more = (2 * room).max(LEAST).min(most).max(need);
            let taken = match need {
                _ if need > BODY => Err(too_long()),
                _ if need > room => sent.share.grow((more - room) as u64),
                _ => Ok(()),
            };
            if let Err(refusal) = taken {
                *left = Some(body);
                return Err(refusal);
            }
            if need > room {
                sent.bytes.reserve_exact(more - sent.bytes.len());
            }
            sent.bytes.extend_from_slice(&data);
        }
        Ok(sent)
    };
    let late = |_| Err(Refusal::new(408, "the body did not come in time"));
    timeout(hub.patience, all).await.unwrap_or_else(late)
}
