//! Control tokens that are known by name: end-of-text tokens, tokens that files give a wrong type, and tokens after
//! which spaces are left out. Names are llama.cpp's (`src/llama-vocab.cpp`).

use super::merges::MERGES;
use super::vocabulary::{GgufVocabulary, TokenType};
use super::{Check, MODEL};
use files::print_stderr;
use files::source::gguf::metadata::Metadata;
use std::sync::Once;

/// Tokens that end a document or a turn whatever the file says: many files name only one of the two.
#[rustfmt::skip]
const END_TOKENS: [&str; 22] = [
    "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "<|im_end|>", "<|eot_id|>",
    "<|eom_id|>", "</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>",
    "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<turn|>",
    "<|tool_response>", "[e~[",
];

/// Other control tokens: beginnings of turns, and the parts of a fill-in-the-middle prompt.
#[rustfmt::skip]
const OTHER_CONTROL_TOKENS: [&str; 25] = [
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<start_of_turn>",
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>",
    "<|file_sep|>", "<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", "<fim_prefix>",
    "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>",
    "<reponame>", "<PAD>",
];

/// Phi-3's control tokens after which spaces stay.
pub(super) const KEEP_SPACES: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

/// Turns known control tokens that the file types as ordinary text into control tokens, and warns once. A token that
/// merges lead to stays text: Qwen's vocabularies have the word `</s>`.
pub(super) fn fix_token_types(metadata: &Metadata, vocabulary: &mut GgufVocabulary<'_>) -> Check<()> {
    let merges = metadata.get_strings(MERGES)?;
    let merged = |name: &str| {
        let is = |line: &str| line.split_once(' ').is_some_and(|(a, b)| name.strip_prefix(a) == Some(b));
        metadata.get(MODEL).and_then(|v| v.as_str()) != Some("llama")
            && merges.is_some_and(|merges| merges.iter().any(is))
    };
    let mut wrong = Vec::new();
    for name in END_TOKENS.into_iter().chain(OTHER_CONTROL_TOKENS) {
        // Gemma's vocabularies, whose texts end with `<eos>`, have HTML's tags.
        let tag = name == "</s>" && vocabulary.id("<eos>").is_some();
        let Some(id) = vocabulary.id(name).filter(|_| !tag) else { continue };
        let shown = vocabulary.token_type(id) == TokenType::UserDefined && END_TOKENS.contains(&name);
        if shown || vocabulary.token_type(id) == TokenType::Text && !merged(name) {
            vocabulary.make_control(id);
            wrong.push(name);
        }
    }
    if !wrong.is_empty() {
        static SAID: Once = Once::new();
        let names = wrong.join(", ");
        SAID.call_once(|| {
            print_stderr!("warning: tokenizer.ggml.token_type marks {names} as text; treated as control tokens, as in all models");
        });
    }
    Ok(())
}

/// The ids of known end-of-text tokens. If other tokens end a message, `<|end|>` only ends a part of it.
pub(super) fn known_end_tokens(vocabulary: &GgufVocabulary<'_>) -> impl Iterator<Item = u32> {
    let control =
        |name: &str| vocabulary.id(name).filter(|&id| vocabulary.token_type(id) == TokenType::Control);
    let both = |one: &str, other: &str| control(one).is_some() && control(other).is_some();
    let part = both("<|return|>", "<|call|>") || both("<|flush|>", "<|calls|>");
    END_TOKENS.into_iter().filter(move |name| !(part && *name == "<|end|>")).filter_map(control)
}

/// True if spaces after control tokens are left out: in Phi-3 with its SentencePiece vocabulary. No key says so.
pub(super) fn strips_spaces(metadata: &Metadata) -> bool {
    let is = |key: &str, value: &str| metadata.get(key).and_then(|v| v.as_str()) == Some(value);
    is("general.architecture", "phi3") && is(MODEL, "llama")
}
