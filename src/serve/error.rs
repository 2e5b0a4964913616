//! Request errors and their JSON in each API's format.

use crate::cli::flags::name_flags;
use crate::run::generate::scheduler::SubmitError;
use files::{Error, print_stderr};
use serde_json::{Value, json};
use std::fmt::Display;
use text::chat::Template;

pub type ApiResult<T> = Result<T, ApiError>;

/// Error response to a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    pub message: String,
    /// Path of the invalid field.
    pub param: Option<String>,
    /// Token counts of a prompt that is too long, and of the context.
    pub context_sizes: Option<(usize, usize)>,
    /// Value of the `Allow` header.
    pub allowed_method: Option<&'static str>,
}

impl ApiError {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), ..Self::default() }
    }

    /// An invalid field.
    pub fn for_field(name: impl Into<String>, why: impl Display) -> Self {
        let name = name.into();
        Self::new(400, format!("{name}: {why}")).in_field(name)
    }

    /// Sets the field.
    pub fn in_field(self, name: impl Into<String>) -> Self {
        Self { param: Some(name.into()), ..self }
    }

    /// A prompt of at least `need` tokens for a context of `have`. Clients recognise llama.cpp's wording.
    pub fn prompt_too_long(field: &str, need: usize, have: usize) -> Self {
        let why = format!(
            "{need} tokens or more: this exceeds the available context size of {have} tokens; shorten it"
        );
        Self { context_sizes: Some((need, have)), ..Self::for_field(field, why) }
    }

    /// An error caused by the client's prompt or options.
    pub fn from_request(e: &Error) -> Self {
        match e {
            Error::Usage(text) | Error::Other(text) => {
                let (message, param) = translate_option_names(text);
                Self { param, ..Self::new(400, remove_flag_clauses(&message)) }
            }
            other => Self::from_engine(other),
        }
    }

    /// An error of the chat template, which refuses the value of a field.
    pub fn from_template(field: &str, template: &Template, e: &Error) -> Self {
        let (Error::Usage(why) | Error::Model(why), Template::Jinja(jinja)) = (e, template) else {
            return Self::from_request(e).in_field(field);
        };
        Self::new(400, remove_flag_clauses(&why.replacen(jinja.origin(), "the chat template", 1)))
            .in_field(field)
    }

    /// An engine error; the details go to the log only.
    pub fn from_engine(e: &Error) -> Self {
        let error = match e {
            Error::Interrupted => {
                return Self::new(503, "the server is shutting down; try another server");
            }
            Error::Memory(_) => Self::new(503, "the server is out of memory; try again later"),
            Error::Usage(_) => return Self::from_request(e),
            _ => Self::new(500, "internal server error; see the server's log"),
        };
        print_stderr!("error: {}", name_flags(&e.to_string()));
        error
    }

    fn error_type(&self) -> &'static str {
        match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            501 => "not_supported_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn error_code(&self) -> Option<&'static str> {
        match self.status {
            401 => Some("invalid_api_key"),
            404 => Some("not_found"),
            429 => Some("rate_limit_exceeded"),
            _ => self.context_sizes.map(|_| "context_length_exceeded"),
        }
    }

    /// OpenAI's error object, with llama.cpp's fields for a prompt that is too long.
    pub fn to_openai(&self) -> Value {
        let Self { message, param, context_sizes: sizes, .. } = self;
        let mut error =
            json!({"message": message, "type": self.error_type(), "param": param, "code": self.error_code()});
        if let Some((prompt, slots)) = sizes {
            error["type"] = "exceed_context_size_error".into();
            (error["n_prompt_tokens"], error["n_ctx"]) = ((*prompt).into(), (*slots).into());
        }
        json!({"error": error})
    }

    /// Anthropic's error object.
    pub fn to_anthropic(&self) -> Value {
        let kind = match self.status {
            503 => "overloaded_error",
            500.. => "api_error",
            _ => self.error_type(),
        };
        // Claude Code compacts its conversation when it reads this.
        let too_long = |(need, have)| format!("prompt is too long: {need} tokens > {have} maximum");
        let message = self.context_sizes.map_or_else(|| self.message.clone(), too_long);
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }
}

impl From<SubmitError> for ApiError {
    fn from(e: SubmitError) -> Self {
        match e {
            SubmitError::Full => Self::new(429, "request queue is full; try again later"),
            SubmitError::Closed => Self::from_engine(&Error::Interrupted),
        }
    }
}

/// Removes the clauses of a message that name flags: they are for the operator, not for clients.
fn remove_flag_clauses(message: &str) -> String {
    let is_for_server = |clause: &&str| name_flags(clause) != **clause || clause.contains("with the model");
    let clauses: Vec<_> = message.split("; ").filter(|clause| !is_for_server(clause)).collect();
    match clauses[..] {
        [] => "this server does not support the request".into(),
        _ => clauses.join("; "),
    }
}

/// Replaces the engine's option names in a message by the request's field names; also returns the first of them.
fn translate_option_names(text: &str) -> (String, Option<String>) {
    const NAMES: [(&str, &str); 4] = [
        ("repetition_penalty", "repeat_penalty"),
        ("repetition_window", "repeat_last_n"),
        ("logprobs", "top_logprobs"),
        ("dry_breakers", "dry_sequence_breakers"),
    ];
    const KINDS: [(&str, &str); 4] = [("Sampler", ""), ("Generate", ""), ("Dry", "dry_"), ("Xtc", "xtc_")];
    let (mut message, mut param) = (text.to_owned(), None);
    for (kind, prefix) in KINDS {
        let start = format!("`{kind}Options::");
        while let Some(at) = message.find(&start) {
            let Some((field, _)) = message[at + start.len()..].split_once('`') else { break };
            let (end, field) = (at + start.len() + field.len() + 1, format!("{prefix}{field}"));
            let name = NAMES.iter().find(|(own, _)| *own == field).map_or(field.as_str(), |(_, name)| name);
            param.get_or_insert(name.to_owned());
            message.replace_range(at..end, name);
        }
    }
    (message, param)
}

#[cfg(test)]
mod tests {
    use super::*;
    use text::chat::Jinja;

    #[test]
    fn fields_of_the_library_become_those_of_the_request() {
        let e = Error::Usage("`SamplerOptions::repetition_penalty` 0: use a number above 0".into());
        let error = ApiError::from_request(&e);
        assert_eq!(error.message, "repeat_penalty 0: use a number above 0");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("repeat_penalty")));
        let e = Error::Usage("too long; raise `EngineOptions::max_seq_len`".into());
        assert_eq!(ApiError::from_request(&e).message, "too long");
        let e = Error::Model("/a/b.gguf, `KvTypes::k`: wrong".into());
        assert!(!ApiError::from_request(&e).message.contains("b.gguf"));
        let jinja = Jinja::new("/a/chat_template.jinja", "{{ x }}", vec![]).expect("compiles");
        let e = Error::Model(
            "/a/chat_template.jinja, line 3: no x; use the template published with the model".into(),
        );
        let error = ApiError::from_template("messages", &Template::Jinja(jinja), &e);
        assert_eq!((error.status, error.message.as_str()), (400, "the chat template, line 3: no x"));
        let long = ApiError::prompt_too_long("prompt", 70, 64);
        let said = long.to_anthropic();
        assert_eq!(said["error"]["message"], "prompt is too long: 70 tokens > 64 maximum");
        assert_eq!(said["error"]["type"], "invalid_request_error");
        assert!(!long.message.contains("--"), "{}", long.message);
        let e = Error::Usage("the grammar cannot continue: too complex".into());
        assert_eq!(
            (ApiError::from_engine(&e).status, ApiError::from_engine(&Error::Other("x".into())).status),
            (400, 500)
        );
        assert_eq!(ApiError::from(SubmitError::Full).to_openai()["error"]["type"], "rate_limit_error");
        assert_eq!(ApiError::new(500, "x").to_anthropic()["error"]["type"], "api_error");
    }
}
