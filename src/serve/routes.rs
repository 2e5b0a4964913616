//! Routes: paths, who may ask for them, and headers that every answer carries.

use super::access::ApiClient;
use super::api::{chat, completions, llama_cpp, messages, responses};
use super::body::RequestBody;
use super::client_stream::ClientState;
use super::error::{ApiError, ApiResult};
use super::json_writer::JsonWriter;
use super::output::CancelOnDrop;
use super::params::ResponseMode;
use super::prepare::Prepared;
use super::response::{self, Response, set_header};
use super::state::{ServerModel, ServerState, TaskLength, random_id};
use super::{metrics, models};
use files::error::quoted;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request};
use serde_json::{Value, json};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// The chat page, which loads nothing else and asks this server alone.
const PAGE: &str = include_str!("page.html");
const PAGE_HEADERS: [(&str, &str); 5] = [
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
/// Longest body, in bytes.
const MAX_BODY: usize = 8 << 20;
/// Bytes of a body that is not wanted that are read, for a client that reads its answer only when it has sent all,
const UNWANTED: usize = 64 << 20;
/// longest time for that, and for its next part.
const UNWANTED_TIME: Duration = Duration::from_secs(20);
const UNWANTED_PAUSE: Duration = Duration::from_secs(1);

/// Clients that may ask for a route.
#[derive(PartialEq, Eq)]
enum Audience {
    /// Clients with a key.
    Clients,
    /// Anybody whom [`Access`](super::access::Access) lets ask.
    Visitors,
    /// Routers and probes too, which know this machine by any name: nothing here is secret.
    Everybody,
}

/// Turns a request into prompts, and these into texts that are generated.
type PrepareRequest = fn(&Arc<ServerModel>, RequestBody) -> ApiResult<Prepared>;

/// Answers a route.
enum Handler {
    /// Tells what the server is and does.
    Describe(fn(&ServerState) -> ApiResult<Response>),
    /// Tells it as JSON; the path is given.
    DescribeAsJson(fn(&ServerState, &str) -> ApiResult<Value>),
    /// Generates texts.
    Generate(PrepareRequest),
    /// Computes something else.
    Compute(fn(&Arc<ServerModel>, &mut RequestBody) -> ApiResult<JsonWriter>),
}

use Audience::{Clients, Everybody, Visitors};
use Handler::{Compute, Describe, DescribeAsJson, Generate};

type Route = (&'static str, Audience, Handler);

/// Paths without `/v1`, which may stand before each. A `*` stands for any end.
static ROUTES: [Route; 16] = [
    ("/", Visitors, Describe(|_| Ok(response::bytes(&PAGE_HEADERS, PAGE)))),
    ("/health", Everybody, DescribeAsJson(|state, _| state.open_model().map(|_| json!({"status": "ok"})))),
    ("/metrics", Everybody, Describe(describe_metrics)),
    ("/models", Clients, DescribeAsJson(|state, _| Ok(models::list_models(state)))),
    ("/models/*", Clients, DescribeAsJson(models::find_model)),
    (
        "/props",
        Clients,
        DescribeAsJson(|state, _| state.loaded_model().map(|model| models::describe_props(model))),
    ),
    ("/slots", Clients, DescribeAsJson(|state, _| models::describe_slots(state))),
    ("/completion", Clients, Generate(llama_cpp::prepare)),
    ("/chat/completions", Clients, Generate(chat::prepare)),
    ("/completions", Clients, Generate(completions::prepare)),
    ("/responses", Clients, Generate(responses::prepare)),
    ("/messages", Clients, Generate(messages::prepare)),
    ("/messages/count_tokens", Clients, Compute(messages::count_tokens)),
    ("/tokenize", Clients, Compute(llama_cpp::tokenize_text)),
    ("/detokenize", Clients, Compute(llama_cpp::detokenize_ids)),
    ("/apply-template", Clients, Compute(chat::apply_template)),
];

/// A path without empty parts, as clients join addresses that end with `/`.
fn normalize_path(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let plain: String = parts.flat_map(|part| ["/", part]).collect();
    if plain.is_empty() { "/".into() } else { plain }
}

/// A [normal path](normalize_path) without `/v1`.
fn without_version(path: &str) -> &str {
    path.strip_prefix("/v1").filter(|rest| rest.starts_with('/')).unwrap_or(path)
}

/// Finds the route of a [normal path](normalize_path).
fn find_route(path: &str) -> ApiResult<&'static Route> {
    let plain = without_version(path);
    let is_asked_for = |(pattern, ..): &&Route| match pattern.strip_suffix('*') {
        Some(start) => plain.starts_with(start),
        None => plain == *pattern,
    };
    let nothing = || ApiError::new(404, format!("there is nothing at {}", quoted(path)));
    ROUTES.iter().find(is_asked_for).ok_or_else(nothing)
}

/// Answers a request.
pub async fn answer(
    state: Arc<ServerState>,
    request: Request<Incoming>,
    client: Arc<ClientState>,
) -> Response {
    let id = request.headers().get("x-request-id").cloned().filter(|id| id.len() <= 256);
    let path = normalize_path(request.uri().path());
    let (head, body) = request.into_parts();
    let allowed_reader = state.access.allowed_reader(&head);
    let mut body = Some(body);
    let answered = handle_request(&state, (&head, &path), (&mut body, client)).await;
    if let Some(unread) = body {
        discard_body(&head.headers, unread);
    }
    let mut response = answered.unwrap_or_else(|error| {
        let is_anthropic = without_version(&path).starts_with("/messages");
        let json = if is_anthropic { error.to_anthropic() } else { error.to_openai() };
        response::error_response(&error, &json)
    });
    match id {
        Some(id) => drop(response.headers_mut().insert("x-request-id", id)),
        None => set_header(&mut response, "x-request-id", &random_id("req-")),
    }
    set_header(&mut response, "vary", "origin");
    if let Some(reader) = allowed_reader {
        response.headers_mut().insert("access-control-allow-origin", reader);
        set_header(&mut response, "access-control-expose-headers", "x-request-id, retry-after");
    }
    response
}

/// Answers a request for a [normal path](normalize_path); a body that is not read stays.
async fn handle_request(
    state: &Arc<ServerState>,
    (head, path): (&Parts, &str),
    (body, client_state): (&mut Option<Incoming>, Arc<ClientState>),
) -> ApiResult<Response> {
    if head.method == Method::OPTIONS {
        state.access.check(head)?;
        return Ok(answer_preflight(&head.headers));
    }
    if head.headers.contains_key("transfer-encoding") && head.headers.contains_key("content-length") {
        *body = None;
        return Err(ApiError::new(400, "two lengths: Transfer-Encoding and Content-Length; send one"));
    }
    let (_, audience, handler) = find_route(path)?;
    if *audience != Everybody {
        state.access.check(head)?;
    }
    let visitor = (*audience != Clients).then(ApiClient::default);
    let no_key =
        || ApiError::new(401, "the API key is missing or wrong; send it as `Authorization: Bearer KEY`");
    let client = state.access.identify_client(find_key(&head.headers)).or(visitor).ok_or_else(no_key)?;
    let method = if head.method == Method::HEAD { "GET" } else { head.method.as_str() };
    let allow = if matches!(handler, Describe(_) | DescribeAsJson(_)) { "GET" } else { "POST" };
    if method != allow {
        let why = format!("{} takes {allow}, not {}", quoted(path), quoted(method));
        return Err(ApiError { allow: Some(allow), ..ApiError::new(405, why) });
    }
    match handler {
        Describe(describe) => describe(state),
        DescribeAsJson(describe) => Ok(response::json(200, JsonWriter::of(&describe(state, path)?), None)),
        Generate(prepare) => {
            let (model, request) = read_request(state, (&head.headers, body), client).await?;
            generate(state, *prepare, (model, request), client_state).await
        }
        Compute(compute) => {
            let (model, mut request) = read_request(state, (&head.headers, body), client).await?;
            let length = TaskLength::of_bytes(request.bytes.len());
            let (compute, _cancel) = (*compute, CancelOnDrop(request.cancel.clone()));
            let task = move || Ok((compute(&model, &mut request)?, request.share));
            let (writer, share) = state.run_on_worker(length, task).await?;
            Ok(response::json(200, writer, Some(share)))
        }
    }
}

/// Generates the texts of a request.
async fn generate(
    state: &Arc<ServerState>,
    prepare: PrepareRequest,
    (model, request): (Arc<ServerModel>, RequestBody),
    client: Arc<ClientState>,
) -> ApiResult<Response> {
    let length = TaskLength::of_bytes(request.bytes.len());
    let mut output = match state.run_on_worker(length, move || prepare(&model, request)).await? {
        Prepared::Running(output) => output,
        Prepared::NeedsGrammar(start) => state.run_on_worker(TaskLength::Grammar, start).await?,
    };
    if output.mode != ResponseMode::Whole {
        return Ok(response::event_stream(output, client));
    }
    output.finish().await?;
    let length = TaskLength::of_bytes(output.bytes());
    let (writer, share) = state.run_on_worker(length, move || Ok(output.into_json())).await?;
    Ok(response::json(200, writer, Some(share)))
}

fn describe_metrics(state: &ServerState) -> ApiResult<Response> {
    let headers = [("content-type", "text/plain; version=0.0.4; charset=utf-8")];
    let mut response = response::bytes(&headers, metrics::render_metrics(state.loaded_model()?));
    set_header(&mut response, "process-start-time-unix", &state.created.to_string());
    Ok(response)
}

/// The key of a request.
fn find_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get("authorization").and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// Tells a page of another origin what it may send.
fn answer_preflight(headers: &HeaderMap) -> Response {
    let asked = headers.get("access-control-request-headers").and_then(|value| value.to_str().ok());
    let allowed = asked.unwrap_or("authorization, content-type, x-api-key, x-request-id");
    let answer = [
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        ("access-control-allow-headers", allowed),
        ("access-control-max-age", "86400"),
    ];
    let mut response = response::bytes(&answer, "");
    // A page of the web asks a machine of somebody's own network.
    if headers.get("access-control-request-private-network").is_some_and(|value| value == "true") {
        set_header(&mut response, "access-control-allow-private-network", "true");
    }
    response
}

/// Refuses a body that is compressed.
fn check_encoding(headers: &HeaderMap) -> ApiResult<()> {
    let mut all = headers.get_all("content-encoding").iter().map(HeaderValue::as_bytes);
    match all.find(|name| !name.eq_ignore_ascii_case(b"identity")) {
        Some(name) => {
            let name = quoted(&String::from_utf8_lossy(name));
            let why = format!("Content-Encoding: is {name}; send the body as it is, without one");
            Err(ApiError::new(415, why))
        }
        None => Ok(()),
    }
}

async fn next_frame(body: &mut Incoming) -> Option<hyper::Result<Frame<Bytes>>> {
    poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

/// Reads a body that nobody wants, beside the answer: a client that sends all of it first would hear of a broken
/// connection only.
fn discard_body(headers: &HeaderMap, mut body: Incoming) {
    // Who waits to be told to go on sends none.
    if body.is_end_stream() || headers.contains_key("expect") {
        return;
    }
    let read = async move {
        let mut left = UNWANTED;
        while let Ok(Some(Ok(frame))) = timeout(UNWANTED_PAUSE, next_frame(&mut body)).await {
            let Some(less) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { break };
            left = less;
        }
    };
    tokio::spawn(timeout(UNWANTED_TIME, read));
}

/// The whole body of a request, which takes memory as it comes. One that is refused stays, to be
/// [discarded](discard_body).
async fn read_request(
    state: &ServerState,
    (headers, left): (&HeaderMap, &mut Option<Incoming>),
    client: ApiClient,
) -> ApiResult<(Arc<ServerModel>, RequestBody)> {
    let model = state.open_model()?;
    check_encoding(headers)?;
    let too_long = || ApiError::new(413, format!("the body is longer than {} MiB", MAX_BODY >> 20));
    let declared = headers.get("content-length").and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|n| n > MAX_BODY as u64) {
        return Err(too_long());
    }
    let mut request = RequestBody::new(&model.memory, client);
    let Some(mut body) = left.take() else { return Ok((model, request)) };
    let most = declared.map_or(MAX_BODY, |n| n as usize);
    let all = async {
        while let Some(frame) = next_frame(&mut body).await {
            let frame = frame.map_err(|e| ApiError::new(400, format!("the body ends early: {e}")))?;
            let data = frame.into_data().unwrap_or_default();
            let need = request.bytes.len() + data.len();
            let taken = if need > MAX_BODY { Err(too_long()) } else { request.append(&data, most) };
            if let Err(error) = taken {
                *left = Some(body);
                return Err(error);
            }
        }
        Ok(())
    };
    let late = |_| Err(ApiError::new(408, "the body did not come in time"));
    timeout(state.patience, all).await.unwrap_or_else(late)?;
    // The server may have begun to shut down meanwhile.
    Ok((state.open_model()?, request))
}
