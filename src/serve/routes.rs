//! Routes: paths, access, handlers, and headers of all responses.

use super::access::ApiClient;
use super::api::{chat, completions, embeddings, llama_cpp, messages, rerank, responses};
use super::body::RequestBody;
use super::client_stream::ClientState;
use super::error::{ApiError, ApiResult};
use super::json_writer::JsonWriter;
use super::output::CancelOnDrop;
use super::params::ResponseMode;
use super::prepare::PreparedRequest;
use super::response::{Response, bytes_response, error_response, event_stream, json_response, set_header};
use super::state::{ServerModel, ServerState, TaskLength, random_id};
use super::{metrics, models};
use files::error::quote;
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

/// The chat page: one file that connects only to this server.
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
/// Maximum length of a body in bytes.
const MAX_BODY: usize = 8 << 20;
/// Maximum bytes of a refused body that are read and discarded.
const MAX_DISCARD: usize = 64 << 20;
/// Maximum time for that.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum wait for its next part.
const DISCARD_PAUSE: Duration = Duration::from_secs(1);

/// Access to a route.
#[derive(PartialEq, Eq)]
enum RouteAccess {
    /// Clients with a key.
    Clients,
    /// Everyone whom [`Access::check_origin`](super::access::AccessRules::check_origin) allows, without a key.
    Visitors,
    /// Everyone, under any host name, as routers and probes need. For routes without secrets.
    Everyone,
}

/// Reads a request and starts its generation.
type StartRequest = fn(&Arc<ServerModel>, RequestBody) -> ApiResult<PreparedRequest>;

/// Handler of a route.
enum Handler {
    /// Describes the server.
    Describe(fn(&ServerState) -> ApiResult<Response>),
    /// Describes the server as JSON; gets the path.
    DescribeAsJson(fn(&ServerState, &str) -> ApiResult<Value>),
    /// Generates text.
    Generate(StartRequest),
    /// Computes JSON without generating.
    Compute(fn(&Arc<ServerModel>, &mut RequestBody) -> ApiResult<JsonWriter>),
}

use Handler::{Compute, Describe, DescribeAsJson, Generate};
use RouteAccess::{Clients, Everyone, Visitors};

type Route = (&'static str, RouteAccess, Handler);

/// Routes. Each path also works with `/v1` in front; a final `*` matches anything.
static ROUTES: [Route; 18] = [
    ("/", Visitors, Describe(|_| Ok(bytes_response(&PAGE_HEADERS, PAGE)))),
    ("/health", Everyone, DescribeAsJson(|state, _| state.open_model().map(|_| json!({"status": "ok"})))),
    ("/metrics", Everyone, Describe(describe_metrics)),
    ("/models", Clients, DescribeAsJson(|state, _| Ok(models::list_models(state)))),
    ("/models/*", Clients, DescribeAsJson(models::find_model)),
    (
        "/props",
        Clients,
        DescribeAsJson(|state, _| state.loaded_model().map(|model| models::describe_props(model))),
    ),
    ("/slots", Clients, DescribeAsJson(|state, _| models::describe_slots(state))),
    ("/completion", Clients, Generate(llama_cpp::start_request)),
    ("/chat/completions", Clients, Generate(chat::start_request)),
    ("/completions", Clients, Generate(completions::start_request)),
    ("/responses", Clients, Generate(responses::start_request)),
    ("/messages", Clients, Generate(messages::start_request)),
    ("/messages/count_tokens", Clients, Compute(messages::count_tokens)),
    ("/rerank", Clients, Generate(rerank::start_request)),
    ("/embeddings", Clients, Compute(embeddings::embed_texts)),
    ("/tokenize", Clients, Compute(llama_cpp::tokenize_text)),
    ("/detokenize", Clients, Compute(llama_cpp::detokenize_ids)),
    ("/apply-template", Clients, Compute(chat::apply_template)),
];

/// Removes empty parts of a path, such as the first of `//v1/models`.
fn normalize_path(path: &str) -> String {
    let parts = path.split('/').filter(|part| !part.is_empty());
    let path: String = parts.flat_map(|part| ["/", part]).collect();
    if path.is_empty() { "/".into() } else { path }
}

/// Removes `/v1` from a [normalized path](normalize_path).
fn strip_version(path: &str) -> &str {
    path.strip_prefix("/v1").filter(|rest| rest.starts_with('/')).unwrap_or(path)
}

/// Finds the route of a [normalized path](normalize_path).
fn find_route(path: &str) -> ApiResult<&'static Route> {
    let stripped = strip_version(path);
    let matches = |(pattern, ..): &&Route| match pattern.strip_suffix('*') {
        Some(start) => stripped.starts_with(start),
        None => stripped == *pattern,
    };
    let not_found = || ApiError::new(404, format!("path {} not found", quote(path)));
    ROUTES.iter().find(matches).ok_or_else(not_found)
}

/// Responds to a request.
pub async fn answer_request(
    state: Arc<ServerState>,
    request: Request<Incoming>,
    client: Arc<ClientState>,
) -> Response {
    let id = request.headers().get("x-request-id").cloned().filter(|id| id.len() <= 256);
    let path = normalize_path(request.uri().path());
    let (head, body) = request.into_parts();
    let allowed_reader = state.access.allowed_reader(&head);
    let mut body = Some(body);
    let result = handle_request(&state, (&head, &path), (&mut body, client)).await;
    if let Some(unread) = body {
        discard_body(&head.headers, unread);
    }
    let mut response = result.unwrap_or_else(|error| {
        let is_anthropic = strip_version(&path).starts_with("/messages");
        let json = if is_anthropic { error.to_anthropic() } else { error.to_openai() };
        error_response(&error, &json)
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

/// Handles a request for a [normalized path](normalize_path). Takes the body only if it reads all of it.
async fn handle_request(
    state: &Arc<ServerState>,
    (head, path): (&Parts, &str),
    (body, client_state): (&mut Option<Incoming>, Arc<ClientState>),
) -> ApiResult<Response> {
    if head.method == Method::OPTIONS {
        state.access.check_origin(head)?;
        return Ok(answer_preflight(&head.headers));
    }
    if head.headers.contains_key("transfer-encoding") && head.headers.contains_key("content-length") {
        *body = None;
        return Err(ApiError::new(
            400,
            "request has both Transfer-Encoding and Content-Length; send only one",
        ));
    }
    let (_, audience, handler) = find_route(path)?;
    if *audience != Everyone {
        state.access.check_origin(head)?;
    }
    let visitor = (*audience != Clients).then(ApiClient::default);
    let no_key =
        || ApiError::new(401, "API key is missing or invalid; send it as `Authorization: Bearer KEY`");
    let client = state.access.authenticate_client(find_key(&head.headers)).or(visitor).ok_or_else(no_key)?;
    let method = if head.method == Method::HEAD { "GET" } else { head.method.as_str() };
    let allow = if matches!(handler, Describe(_) | DescribeAsJson(_)) { "GET" } else { "POST" };
    if method != allow {
        let why = format!("method {} is not allowed for {}; use {allow}", quote(method), quote(path));
        return Err(ApiError { allowed_method: Some(allow), ..ApiError::new(405, why) });
    }
    match handler {
        Describe(describe) => describe(state),
        DescribeAsJson(describe) => {
            Ok(json_response(200, JsonWriter::from_value(&describe(state, path)?), None))
        }
        Generate(start) => {
            let (model, request) = read_request(state, (&head.headers, body), client).await?;
            generate_texts(state, *start, (model, request), client_state).await
        }
        Compute(compute) => {
            let (model, mut request) = read_request(state, (&head.headers, body), client).await?;
            let length = TaskLength::of_bytes(request.bytes.len());
            let (compute, _cancel) = (*compute, CancelOnDrop(request.cancel.clone()));
            let task = move || Ok((compute(&model, &mut request)?, request.share));
            let (writer, share) = state.run_on_worker(length, task).await?;
            Ok(json_response(200, writer, Some(share)))
        }
    }
}

/// Generates the texts of a request.
async fn generate_texts(
    state: &Arc<ServerState>,
    start: StartRequest,
    (model, request): (Arc<ServerModel>, RequestBody),
    client: Arc<ClientState>,
) -> ApiResult<Response> {
    let length = TaskLength::of_bytes(request.bytes.len());
    let mut output = match state.run_on_worker(length, move || start(&model, request)).await? {
        PreparedRequest::Running(output) => output,
        PreparedRequest::NeedsGrammar(start) => state.run_on_worker(TaskLength::Grammar, start).await?,
    };
    if output.mode != ResponseMode::Whole {
        return Ok(event_stream(output, client));
    }
    output.wait_for_end().await?;
    let length = TaskLength::of_bytes(output.memory_bytes());
    let (writer, share) = state.run_on_worker(length, move || Ok(output.into_json())).await?;
    Ok(json_response(200, writer, Some(share)))
}

fn describe_metrics(state: &ServerState) -> ApiResult<Response> {
    let headers = [("content-type", "text/plain; version=0.0.4; charset=utf-8")];
    let mut response = bytes_response(&headers, metrics::render_metrics(state.loaded_model()?));
    set_header(&mut response, "process-start-time-unix", &state.start_time.to_string());
    Ok(response)
}

/// Finds the API key of a request.
fn find_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get("authorization").and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// Answers a CORS preflight.
fn answer_preflight(headers: &HeaderMap) -> Response {
    let asked = headers.get("access-control-request-headers").and_then(|value| value.to_str().ok());
    let allowed = asked.unwrap_or("authorization, content-type, x-api-key, x-request-id");
    let answer = [
        ("access-control-allow-methods", "GET, POST, OPTIONS"),
        ("access-control-allow-headers", allowed),
        ("access-control-max-age", "86400"),
    ];
    let mut response = bytes_response(&answer, "");
    // A public web page accesses a private network.
    if headers.get("access-control-request-private-network").is_some_and(|value| value == "true") {
        set_header(&mut response, "access-control-allow-private-network", "true");
    }
    response
}

/// Refuses compressed bodies.
fn check_encoding(headers: &HeaderMap) -> ApiResult<()> {
    let mut all = headers.get_all("content-encoding").iter().map(HeaderValue::as_bytes);
    all.find(|name| !name.eq_ignore_ascii_case(b"identity")).map_or(Ok(()), |name| {
        let name = quote(&String::from_utf8_lossy(name));
        let why = format!("Content-Encoding: {name} is not supported; send the body uncompressed");
        Err(ApiError::new(415, why))
    })
}

async fn next_frame(body: &mut Incoming) -> Option<hyper::Result<Frame<Bytes>>> {
    poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

/// Reads and discards a refused body in the background: a client that sends all of it before it reads the response
/// would otherwise only see a broken connection.
fn discard_body(headers: &HeaderMap, mut body: Incoming) {
    // With `Expect: 100-continue` the client sends no body.
    if body.is_end_stream() || headers.contains_key("expect") {
        return;
    }
    let read = async move {
        let mut left = MAX_DISCARD;
        while let Ok(Some(Ok(frame))) = timeout(DISCARD_PAUSE, next_frame(&mut body)).await {
            let Some(less) = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) else { break };
            left = less;
        }
    };
    tokio::spawn(timeout(DISCARD_TIMEOUT, read));
}

/// Reads the whole body of a request, and takes memory as it arrives. A refused body is put back, to be
/// [discarded](discard_body).
async fn read_request(
    state: &ServerState,
    (headers, left): (&HeaderMap, &mut Option<Incoming>),
    client: ApiClient,
) -> ApiResult<(Arc<ServerModel>, RequestBody)> {
    let model = state.open_model()?;
    check_encoding(headers)?;
    let too_long =
        || ApiError::new(413, format!("request body exceeds the maximum of {} MiB", MAX_BODY >> 20));
    let declared = headers.get("content-length").and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|n| n > MAX_BODY as u64) {
        return Err(too_long());
    }
    let mut request = RequestBody::new(&model.memory, client);
    let Some(mut body) = left.take() else { return Ok((model, request)) };
    let expected = declared.map_or(MAX_BODY, |n| n as usize);
    let all = async {
        while let Some(frame) = next_frame(&mut body).await {
            let frame = frame.map_err(|e| ApiError::new(400, format!("request body is incomplete: {e}")))?;
            let data = frame.into_data().unwrap_or_default();
            let need = request.bytes.len() + data.len();
            let taken = if need > MAX_BODY { Err(too_long()) } else { request.append(&data, expected) };
            if let Err(error) = taken {
                *left = Some(body);
                return Err(error);
            }
        }
        Ok(())
    };
    let late = |_| Err(ApiError::new(408, "request body did not arrive in time"));
    timeout(state.patience, all).await.unwrap_or_else(late)?;
    // The server may have begun to shut down in the meantime.
    Ok((state.open_model()?, request))
}
