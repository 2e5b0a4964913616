//! Why a request is not answered, in the words of the API.

use crate::cli::flags::named;
use crate::run::generate::scheduler::SubmitError;
use files::{Error, say};
use serde_json::{Value, json};
use text::chat::Template;

/// An error of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Refusal {
    /// HTTP's number.
    pub status: u16,
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
    /// Tokens of a prompt that is too long, and how many a slot has.
    pub sizes: Option<(usize, usize)>,
}

impl Refusal {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, sizes: None }
    }

    /// A field that cannot be followed.
    pub fn field(name: impl Into<String>, why: impl std::fmt::Display) -> Self {
        let name = name.into();
        Self { status: 400, message: format!("{name}: {why}"), param: Some(name), sizes: None }
    }

    /// A prompt of so many tokens, or more, for a slot of so many. Clients know it by these words of llama.cpp's.
    pub fn too_long(field: &str, need: usize, have: usize) -> Self {
        let why = format!(
            "{need} tokens or more: this exceeds the available context size of {have} tokens; shorten it"
        );
        Self { sizes: Some((need, have)), ..Self::field(field, why) }
    }

    /// What went wrong with a prompt or with options, which the client has given.
    pub fn of_input(e: &Error) -> Self {
        match e {
            Error::Usage(text) | Error::Other(text) => {
                let (message, param) = plain(text);
                Self { status: 400, message: for_clients(&message), param, sizes: None }
            }
            other => Self::of_run(other),
        }
    }

    /// Why a template does not take what a field holds.
    pub fn of_template(field: &str, template: &Template, e: &Error) -> Self {
        let (Error::Usage(why) | Error::Model(why), Template::Jinja(jinja)) = (e, template) else {
            return Self { param: Some(field.into()), ..Self::of_input(e) };
        };
        let why = for_clients(&why.replacen(jinja.place(), "the chat template", 1));
        Self { message: why, ..Self::field(field, "") }
    }

    /// What went wrong while a text was generated. Who runs the server reads more of it than who asks.
    pub fn of_run(e: &Error) -> Self {
        let refusal = match e {
            Error::Interrupted => {
                return Self::new(503, "the server is shutting down; try again elsewhere");
            }
            Error::Memory(_) => Self::new(503, "the server has too little memory now; try again later"),
            Error::Usage(_) => return Self::of_input(e),
            _ => Self::new(500, "the server failed at this; its own messages say why"),
        };
        say!("error: {}", named(&e.to_string()));
        refusal
    }

    fn kind(&self) -> &'static str {
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

    fn code(&self) -> Option<&'static str> {
        match self.status {
            401 => Some("invalid_api_key"),
            404 => Some("not_found"),
            429 => Some("rate_limit_exceeded"),
            _ => self.sizes.map(|_| "context_length_exceeded"),
        }
    }

    /// As OpenAI's API has it; a prompt that is too long as llama.cpp's server says it.
    pub fn json(&self) -> Value {
        let Self { message, param, sizes, .. } = self;
        let mut error = json!({"message": message, "type": self.kind(), "param": param, "code": self.code()});
        if let Some((prompt, slots)) = sizes {
            error["type"] = "exceed_context_size_error".into();
            (error["n_prompt_tokens"], error["n_ctx"]) = ((*prompt).into(), (*slots).into());
        }
        json!({"error": error})
    }

    /// As Anthropic's API has it.
    pub fn anthropic(&self) -> Value {
        let kind = match self.status {
            500.. if self.status != 503 => "api_error",
            503 => "overloaded_error",
            _ => self.kind(),
        };
        // Claude Code makes its conversation shorter when it reads this.
        let too_long = |(need, have)| format!("prompt is too long: {need} tokens > {have} maximum");
        let message = self.sizes.map_or_else(|| self.message.clone(), too_long);
        json!({"type": "error", "error": {"type": kind, "message": message}})
    }
}

impl From<SubmitError> for Refusal {
    fn from(refused: SubmitError) -> Self {
        match refused {
            SubmitError::Full => Self::new(429, "as many requests wait as may; try again later"),
            SubmitError::Closed => Self::of_run(&Error::Interrupted),
        }
    }
}

/// A message without the clauses that are for who runs the server: what would be flags there.
fn for_clients(message: &str) -> String {
    let is_for_server = |clause: &&str| named(clause) != **clause || clause.contains("with the model");
    let clauses: Vec<_> = message.split("; ").filter(|clause| !is_for_server(clause)).collect();
    match clauses[..] {
        [] => "this cannot be done here".into(),
        _ => clauses.join("; "),
    }
}

/// A message of the library with fields of the request in place of its own, and the first of them.
fn plain(text: &str) -> (String, Option<String>) {
    const OWN: [(&str, &str); 4] = [
        ("repetition_penalty", "repeat_penalty"),
        ("repetition_window", "repeat_last_n"),
        ("logprobs", "top_logprobs"),
        ("dry_breakers", "dry_sequence_breakers"),
    ];
    const KINDS: [(&str, &str); 4] = [("Sampler", ""), ("Generate", ""), ("Dry", "dry_"), ("Xtc", "xtc_")];
    let (mut message, mut param) = (text.to_owned(), None);
    for (kind, prefix) in KINDS {
        let of = format!("`{kind}Options::");
        while let Some(at) = message.find(&of) {
            let Some(len) = message[at + of.len()..].find('`') else { break };
            let field = format!("{prefix}{}", &message[at + of.len()..][..len]);
            let name = OWN.iter().find(|(own, _)| *own == field).map_or(field.as_str(), |(_, name)| name);
            param.get_or_insert(name.to_owned());
            message.replace_range(at..at + of.len() + len + 1, name);
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
        let refusal = Refusal::of_input(&e);
        assert_eq!(refusal.message, "repeat_penalty 0: use a number above 0");
        assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some("repeat_penalty")));
        let e = Error::Usage("too long; raise `EngineOptions::max_seq_len`".into());
        assert_eq!(Refusal::of_input(&e).message, "too long");
        let e = Error::Model("/a/b.gguf, `KvTypes::k`: wrong".into());
        assert!(!Refusal::of_input(&e).message.contains("b.gguf"));
        let jinja = Jinja::new("/a/chat_template.jinja", "{{ x }}", vec![]).expect("compiles");
        let e = Error::Model(
            "/a/chat_template.jinja, line 3: no x; use the template published with the model".into(),
        );
        let refusal = Refusal::of_template("messages", &Template::Jinja(jinja), &e);
        assert_eq!((refusal.status, refusal.message.as_str()), (400, "the chat template, line 3: no x"));
        let long = Refusal::too_long("prompt", 70, 64);
        let said = long.anthropic();
        assert_eq!(said["error"]["message"], "prompt is too long: 70 tokens > 64 maximum");
        assert_eq!(said["error"]["type"], "invalid_request_error");
        assert!(!long.message.contains("--"), "{}", long.message);
        let e = Error::Usage("the grammar cannot go on: too complex".into());
        assert_eq!(
            (Refusal::of_run(&e).status, Refusal::of_run(&Error::Other("x".into())).status),
            (400, 500)
        );
        assert_eq!(Refusal::from(SubmitError::Full).json()["error"]["type"], "rate_limit_error");
        assert_eq!(Refusal::new(500, "x").anthropic()["error"]["type"], "api_error");
    }
}
