//! Texts and ids, without generating: `/tokenize`, `/detokenize`, as llama.cpp's server has them.

use crate::serve::body::{RequestBody, TokenIds, read_object};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::memory::check_longest_part;
use crate::serve::state::LoadedModel;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Specials};

#[derive(Deserialize)]
struct TokenizeRequest {
    content: String,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

#[derive(Deserialize)]
struct DetokenizeRequest {
    tokens: TokenIds,
}

/// A token and its text, or its bytes where they are no text.
#[derive(Serialize)]
struct TokenPiece<'a> {
    id: u32,
    piece: TextOrBytes<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TextOrBytes<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
}

/// `POST /tokenize`.
pub fn tokenize(model: &Arc<LoadedModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let fields: TokenizeRequest = read_object(&request.parse()?, "")?;
    let special = if fields.add_special == Some(true) { AddSpecial::Yes } else { AddSpecial::No };
    let specials = if fields.parse_special == Some(false) { Specials::Text } else { Specials::Tokens };
    let tokenizer = model.engine.tokenizer();
    check_longest_part(tokenizer, &fields.content, "content")?;
    let stop = || request.cancel.is_cancelled();
    let ids = tokenizer.encode_until(&fields.content, specials, special, &stop);
    let ids = ids.map_err(|e| ApiError::from_request(&e))?;
    request.share.resize(size_of_val(ids.as_slice()) as u64)?;
    let pieces = (fields.with_pieces == Some(true)).then(|| Arc::clone(tokenizer.pieces()));
    let mut writer = JsonWriter::default();
    writer.object(|out| {
        out.key("tokens");
        out.list(ids.len(), move |i, to| match &pieces {
            None => write_json(&ids[i], to),
            Some(pieces) => {
                let bytes = pieces.bytes(ids[i]);
                let piece = std::str::from_utf8(bytes).map_or(TextOrBytes::Bytes(bytes), TextOrBytes::Text);
                write_json(&TokenPiece { id: ids[i], piece }, to);
            }
        });
    });
    Ok(writer)
}

/// `POST /detokenize`.
pub fn detokenize(model: &Arc<LoadedModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let fields: DetokenizeRequest = read_object(&request.parse()?, "")?;
    let (TokenIds(ids), tokenizer) = (fields.tokens, model.engine.tokenizer());
    let bytes: usize = ids.iter().map(|&id| tokenizer.pieces().bytes(id).len()).sum();
    // As a text, and as JSON.
    request.share.grow(3 * bytes as u64)?;
    Ok(JsonWriter::of(&json!({"content": tokenizer.decode_with_special(&ids)})))
}
