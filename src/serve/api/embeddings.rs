//! `/v1/embeddings` of OpenAI.

use crate::dims::{DIM, VOCAB};
use crate::run::embed::EmbedOptions;
use crate::serve::body::{RequestBody, read_object};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::memory::check_longest_part;
use crate::serve::state::ServerModel;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Maximum number of texts of a request, as OpenAI's.
const MAX_TEXTS: usize = 2048;

#[derive(Deserialize)]
struct EmbeddingsRequest {
    input: Input,
    #[serde(default)]
    encoding_format: EncodingFormat,
    dimensions: Option<usize>,
}

/// Texts, or their token ids.
#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    IdLists(Vec<Vec<u32>>),
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    #[default]
    Float,
    /// Little-endian f32.
    Base64,
}

/// One vector of a response.
#[derive(Serialize)]
struct Embedding<'a> {
    object: &'static str,
    index: usize,
    embedding: EmbeddingData<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum EmbeddingData<'a> {
    Floats(&'a [f32]),
    Base64(String),
}

/// `POST /v1/embeddings`.
pub fn embed_texts(model: &Arc<ServerModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let fields: EmbeddingsRequest = read_object(&request.parse_json()?, "")?;
    let encode =
        |texts: Vec<String>| texts.iter().map(|text| encode_text(model, text)).collect::<ApiResult<Vec<_>>>();
    let ids: Vec<Vec<u32>> = match fields.input {
        Input::Text(text) => encode(vec![text])?,
        Input::Texts(texts) => encode(texts)?,
        Input::Ids(ids) => vec![ids],
        Input::IdLists(lists) => lists,
    };
    check_input(model, &ids)?;
    let width = fields.dimensions.unwrap_or(DIM);
    if !(1..=DIM).contains(&width) {
        return Err(ApiError::for_field("dimensions", format!("is {width}; use a number from 1 to {DIM}")));
    }
    let known = model.engine.model_pooling().map_err(|e| ApiError::from_engine(&e))?;
    let pooling = model.pooling.or(known).ok_or_else(|| {
        ApiError::new(400, "the model's files name no pooling of embeddings; start the server with --pooling")
    })?;
    let options = EmbedOptions { pooling: Some(pooling), dimensions: fields.dimensions };
    // The vectors, and their text.
    request.share.resize((ids.len() * width * 2 * size_of::<f32>()) as u64)?;
    let vectors = model.engine.embed(&ids, &options, Some(&request.cancel));
    let vectors = vectors.map_err(|e| ApiError::from_request(&e))?;
    let (tokens, name) = (ids.iter().map(Vec::len).sum::<usize>(), model.name.clone());
    let mut writer = JsonWriter::default();
    writer.write_object(|out| {
        out.write_field("object", "list");
        out.write_key("data");
        out.write_list(vectors.len(), move |index, to| {
            let embedding = match fields.encoding_format {
                EncodingFormat::Float => EmbeddingData::Floats(&vectors[index]),
                EncodingFormat::Base64 => EmbeddingData::Base64(encode_base64(&vectors[index])),
            };
            write_json(&Embedding { object: "embedding", index, embedding }, to);
        });
        out.write_field("model", &name);
        out.write_field("usage", &serde_json::json!({"prompt_tokens": tokens, "total_tokens": tokens}));
    });
    Ok(writer)
}

fn encode_text(model: &ServerModel, text: &str) -> ApiResult<Vec<u32>> {
    check_longest_part(model.engine.tokenizer(), text, "input")?;
    model.engine.encode(text).map_err(|e| ApiError::from_request(&e).in_field("input"))
}

/// Refuses input that is not a list of known tokens.
fn check_input(model: &ServerModel, ids: &[Vec<u32>]) -> ApiResult<()> {
    if ids.is_empty() || ids.len() > MAX_TEXTS {
        let why = format!("has {} texts; use 1 to {MAX_TEXTS}", ids.len());
        return Err(ApiError::for_field("input", why));
    }
    let size = model.engine.tokenizer().vocab_size().min(VOCAB);
    match ids.iter().flatten().find(|&&id| id as usize >= size) {
        Some(id) => Err(ApiError::for_field("input", format!("{id} is not a token; the model has {size}"))),
        None => Ok(()),
    }
}

/// Little-endian floats in base64 (RFC 4648, section 4).
fn encode_base64(values: &[f32]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |all, &b| all << 8 | u32::from(b)) << (8 * (3 - group.len()));
        for i in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * i) & 63) as usize] as char;
            text.push(if i <= group.len() { digit } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_become_base64_with_padding() {
        // Python: base64.b64encode(struct.pack("<f", 1.0)) and so on.
        for (values, text) in [
            (&[][..], ""),
            (&[1.0], "AACAPw=="),
            (&[1.0, -2.5], "AACAPwAAIMA="),
            (&[1.0, -2.5, 0.1], "AACAPwAAIMDNzMw9"),
        ] {
            assert_eq!(encode_base64(values), text);
        }
    }
}
