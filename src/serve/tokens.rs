//! Texts and ids, without generating: `/tokenize`, `/detokenize`, `/apply-template`, as llama.cpp's server has them.

use super::asked::ids;
use super::budget::check_part;
use super::conversation::Conversation;
use super::fields::{self, Body, Fields};
use super::hub::Served;
use super::refusal::Refusal;
use super::whole::{Whole, write};
use serde::Serialize;
use serde_json::json;
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Specials};

type Result<T> = std::result::Result<T, Refusal>;

/// `POST /tokenize`.
pub fn tokenize(served: &Arc<Served>, body: &mut Body) -> Result<Whole> {
    let object = fields::object(body)?;
    let fields = Fields::new(&object);
    let text = fields.needed_text("content")?;
    let special = if fields.flag("add_special")?.unwrap_or(false) { AddSpecial::Yes } else { AddSpecial::No };
    let specials =
        if fields.flag("parse_special")?.unwrap_or(true) { Specials::Tokens } else { Specials::Text };
    let tokenizer = served.engine.tokenizer();
    check_part(tokenizer, text, "content")?;
    let encoded = tokenizer.encode_until(text, specials, special, &|| body.cancel.is_cancelled());
    let ids = encoded.map_err(|e| Refusal::of_input(&e))?;
    body.share.become_of(size_of_val(ids.as_slice()) as u64)?;
    let pieces = fields.flag("with_pieces")?.unwrap_or(false).then(|| Arc::clone(tokenizer.pieces()));
    let mut whole = Whole::default();
    whole.begin(b'{');
    whole.key("tokens");
    whole.list(ids.len(), move |i, to| match &pieces {
        None => write(&ids[i], to),
        Some(pieces) => write(&TokenPiece { id: ids[i], piece: TextOrBytes::of(pieces.bytes(ids[i])) }, to),
    });
    whole.end(b'}');
    Ok(whole)
}

/// A token and what it stands for.
#[derive(Serialize)]
struct TokenPiece<'a> {
    id: u32,
    piece: TextOrBytes<'a>,
}

/// Bytes where they are no text.
#[derive(Serialize)]
#[serde(untagged)]
enum TextOrBytes<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
}

impl<'a> TextOrBytes<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        std::str::from_utf8(bytes).map_or(Self::Bytes(bytes), Self::Text)
    }
}

/// `POST /detokenize`.
pub fn detokenize(served: &Arc<Served>, body: &mut Body) -> Result<Whole> {
    let object = fields::object(body)?;
    let fields = Fields::new(&object);
    let all =
        fields.list("tokens")?.ok_or_else(|| fields.refuse("tokens", "is missing; give an array of ids"))?;
    let wrong = || fields.refuse("tokens", format!("use ids from 0 to {}", crate::dims::VOCAB - 1));
    let ids = ids(all).ok_or_else(wrong)?;
    let tokenizer = served.engine.tokenizer();
    let bytes: usize = ids.iter().map(|&id| tokenizer.pieces().bytes(id).len()).sum();
    // As a text, and as JSON.
    body.share.grow(3 * bytes as u64)?;
    Ok(Whole::of(&json!({"content": tokenizer.decode_with_special(&ids)})))
}

/// `POST /apply-template`.
pub fn apply_template(served: &Arc<Served>, body: &mut Body) -> Result<Whole> {
    let object = fields::object(body)?;
    let fields = Fields::new(&object);
    let of = Conversation::of_chat(&fields)?;
    Ok(Whole::of(&json!({"prompt": of.text(served)?})))
}
