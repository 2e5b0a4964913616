//! Which path is answered by what, who may ask, and what every answer carries.

use super::answer::Gone;
use super::asked::How;
use super::budget::Budget;
use super::facts;
use super::fields::Body as Sent;
use super::hub::{Hub, Served, Slots, name};
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::requests::{self, Begun};
use super::tokens;
use super::whole::Whole;
use super::workers::Length;
use crate::run::session::CancelToken;
use files::error::quoted;
use hyper::body::{Body, Incoming};
use hyper::header::HeaderValue;
use hyper::{HeaderMap, Method, Request, Response};
use serde_json::json;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

/// The chat page, which loads nothing else.
const PAGE: &str = include_str!("page.html");
/// The longest body, in bytes.
const BODY: usize = 8 << 20;
/// Room for a body at first, in bytes.
const LEAST: usize = 4 << 10;

type Result<T> = std::result::Result<T, Refusal>;
type Generates = fn(&Arc<Served>, Sent) -> Result<Begun>;
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

impl Route {
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

    fn is_open(&self) -> bool {
        matches!(self, Route::Page | Route::Health | Route::Metrics)
    }

    fn takes(&self) -> &'static str {
        match self {
            Route::Generates(_) | Route::Tells(_) => "POST",
            _ => "GET",
        }
    }
}

/// Answers a request.
pub(super) async fn answer(hub: Arc<Hub>, request: Request<Incoming>) -> Response<Reply> {
    let id = request.headers().get("x-request-id").cloned();
    let id = id.filter(|id| id.len() <= 256);
    let path = request.uri().path();
    let anthropic = path.starts_with("/v1/messages") || path.starts_with("/messages");
    let origin = request.headers().get("origin").cloned();
    let mut response = match of(&hub, request).await {
        Ok(response) => response,
        Err(refusal) if anthropic => reply::refusal(&refusal, &refusal.anthropic()),
        Err(refusal) => reply::refusal(&refusal, &refusal.json()),
    };
    let headers = response.headers_mut();
    let made = || HeaderValue::from_str(&name("req-")).unwrap_or(HeaderValue::from_static("req"));
    headers.insert("x-request-id", id.unwrap_or_else(made));
    // Pages of any origin may ask: each is named, so that the answer to one is not kept for another.
    headers.insert("access-control-allow-origin", origin.unwrap_or(HeaderValue::from_static("*")));
    headers.insert("vary", HeaderValue::from_static("origin"));
    headers.insert("access-control-expose-headers", HeaderValue::from_static("x-request-id, retry-after"));
    response
}

async fn of(hub: &Arc<Hub>, request: Request<Incoming>) -> Result<Response<Reply>> {
    let (head, body) = request.into_parts();
    if head.method == Method::OPTIONS {
        return Ok(preflight(&head.headers));
    }
    if head.headers.contains_key("transfer-encoding") && head.headers.contains_key("content-length") {
        return Err(Refusal::new(400, "two lengths: Transfer-Encoding and Content-Length; send one"));
    }
    let path = head.uri.path();
    let Some(route) = Route::of(path) else {
        return Err(Refusal::new(404, format!("there is nothing at {}", quoted(path))));
    };
    if !route.is_open() && !hub.knows(key(&head.headers)) {
        return Err(Refusal::new(
            401,
            "the API key is missing or wrong; send it as `Authorization: Bearer KEY`",
        ));
    }
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
            let body = read(hub, (&head.headers, body), &served.budget).await?;
            generate(hub, prepare, (served, body)).await
        }
        Route::Tells(tell) => {
            let served = hub.served()?;
            let mut body = read(hub, (&head.headers, body), &served.budget).await?;
            let length = Length::of(body.bytes.len());
            let _gone = Gone(body.cancel.clone());
            let tell = move || Ok((tell(&served, &mut body)?, body.share));
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
            return Err(Refusal::new(501, "start the server with --slots-endpoint for this"));
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
    let Begun { answer, how } = hub.work(length, move || prepare(&served, body)).await?;
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
    let headers = [
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        (
            "access-control-allow-headers",
            asked.unwrap_or("authorization, content-type, x-api-key, x-request-id"),
        ),
        ("access-control-max-age", "86400"),
    ];
    reply::response(200, &headers, Reply::Whole(None))
}

/// The whole body, which takes memory as it comes.
async fn read(hub: &Hub, (headers, mut body): (&HeaderMap, Incoming), budget: &Arc<Budget>) -> Result<Sent> {
    let too_long = || Refusal::new(413, format!("the body is longer than {} MiB", BODY >> 20));
    let said = headers.get("content-length").and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    if said.is_some_and(|n| n > BODY as u64) {
        return Err(too_long());
    }
    let most = said.map_or(BODY, |n| n as usize);
    let all = async {
        let mut sent = Sent { bytes: Vec::new(), share: budget.share(), cancel: CancelToken::default() };
        while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
            let frame = frame.map_err(|e| Refusal::new(400, format!("the body ends early: {e}")))?;
            let data = frame.into_data().unwrap_or_default();
            let (need, room) = (sent.bytes.len() + data.len(), sent.bytes.capacity());
            if need > BODY {
                return Err(too_long());
            }
            if need > room {
                let more = (2 * room).max(LEAST).min(most).max(need);
                sent.share.grow((more - room) as u64)?;
                sent.bytes.reserve_exact(more - sent.bytes.len());
            }
            sent.bytes.extend_from_slice(&data);
        }
        Ok(sent)
    };
    let late = |_| Err(Refusal::new(408, "the body did not come in time"));
    tokio::time::timeout(hub.patience, all).await.unwrap_or_else(late)
}
