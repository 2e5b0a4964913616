//! Texts and ids, without generating: `/tokenize`, `/detokenize`, `/apply-template`, as llama.cpp's server has them.

use super::conversation::Conversation;
use super::fields::{self, Fields};
use super::hub::Served;
use super::refusal::Refusal;
use super::requests::ids;
use serde_json::{Value, json};
use text::tokenizer::{AddSpecial, Specials};

type Result<T> = std::result::Result<T, Refusal>;

/// `POST /tokenize`.
pub(super) fn tokenize(served: &Served, body: &[u8]) -> Result<Value> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let text = fields.needed_text("content")?;
    let special = if fields.flag("add_special")?.unwrap_or(false) { AddSpecial::Yes } else { AddSpecial::No };
    let specials =
        if fields.flag("parse_special")?.unwrap_or(true) { Specials::Tokens } else { Specials::Text };
    let tokenizer = served.engine.tokenizer();
    let encoded = tokenizer.encode_until(text, specials, special, &|| false);
    let ids = encoded.map_err(|e| Refusal::of_input(&e))?;
    if !fields.flag("with_pieces")?.unwrap_or(false) {
        return Ok(json!({"tokens": ids}));
    }
    let piece = |&id: &u32| {
        let bytes = tokenizer.pieces().bytes(id);
        match std::str::from_utf8(bytes) {
            Ok(text) => json!({"id": id, "piece": text}),
            Err(_) => json!({"id": id, "piece": bytes}),
        }
    };
    Ok(json!({"tokens": ids.iter().map(piece).collect::<Vec<_>>()}))
}

/// `POST /detokenize`.
pub(super) fn detokenize(served: &Served, body: &[u8]) -> Result<Value> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let all =
        fields.list("tokens")?.ok_or_else(|| fields.refuse("tokens", "is missing; give an array of ids"))?;
    let wrong = || fields.refuse("tokens", format!("use ids from 0 to {}", crate::dims::VOCAB - 1));
    let ids = ids(all).ok_or_else(wrong)?;
    Ok(json!({"content": served.engine.tokenizer().decode_with_special(&ids)}))
}

/// `POST /apply-template`.
pub(super) fn apply_template(served: &Served, body: &[u8]) -> Result<Value> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let of = Conversation::of_chat(&fields)?;
    Ok(json!({"prompt": of.text(served)?}))
}
