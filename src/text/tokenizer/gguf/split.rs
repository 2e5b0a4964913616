//! How text is cut into words before merging, by the names in GGUF files (`tokenizer.ggml.pre`).
//!
//! The steps are those of the `tokenizer.json` published with these models, so that both give the same ids. That
//! includes Qwen's normalisation to NFC, of which no GGUF file says anything and which llama.cpp leaves out: the
//! model was trained with it.

use serde_json::{Value, json};

/// The names that [`named`] knows, for messages.
pub(super) const NAMES: &str = "\"llama-bpe\", \"llama3\", \"llama-v3\", \"smaug-bpe\", \"qwen2\", \"deepseek-r1-qwen\", \"smollm\", \"refact\", \
     \"gpt-4o\", \"gpt-2\"";

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// OpenAI's o200k.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What a name stands for.
pub(super) struct Split {
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Value,
    /// A word that is a token becomes that token, whatever the merges make of it.
    pub ignore_merges: bool,
    /// Whether a text begins with the begin-of-text token if the file does not say.
    pub add_bos: bool,
}

/// What `name` stands for, if that is known.
pub(super) fn named(name: &str) -> Option<Split> {
    let plain =
        |pre_tokenizer| Split { normalizer: None, pre_tokenizer, ignore_merges: false, add_bos: false };
    Some(match name {
        "llama-bpe" | "llama3" | "llama-v3" => {
            Split { ignore_merges: true, add_bos: true, ..plain(pattern(LLAMA3)) }
        }
        "qwen2" | "deepseek-r1-qwen" => {
            Split { normalizer: Some(json!({"type": "NFC"})), ..plain(pattern(QWEN2)) }
        }
        // SmolLM3: Llama 3's words.
        "smaug-bpe" => Split { ignore_merges: true, ..plain(pattern(LLAMA3)) },
        "gpt-4o" => plain(pattern(GPT_4O)),
        // SmolLM and Granite: digits one by one.
        "smollm" | "refact" => {
            plain(sequence(json!([{"type": "Digits", "individual_digits": true}, gpt2()])))
        }
        "gpt-2" => plain(gpt2()),
        _ => return None,
    })
}

/// Words by a pattern, in GPT-2's alphabet for bytes.
fn pattern(regex: &str) -> Value {
    let split =
        json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let mut bytes = gpt2();
    bytes["use_regex"] = false.into();
    sequence(json!([split, bytes]))
}

/// The step that knows GPT-2's pattern itself.
fn gpt2() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true})
}

fn sequence(steps: Value) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}
