//! The `config.json` of a Gemma 4 assistant: a small model that drafts for a larger one and has no keys and values of
//! its own.

use super::{ConfigError, Fields, MAX_DIM, MAX_VOCAB, ModelConfig, parse_object};
use serde_json::Value;

/// Sizes of an assistant.
#[derive(Debug, Clone, PartialEq)]
pub struct AssistantConfig {
    /// The assistant's own layers.
    pub text: ModelConfig,
    /// Width of the model that it drafts for.
    pub model_dim: usize,
    /// Number of clusters of tokens, and of those whose logits are computed; `None` if all logits are.
    pub clusters: Option<(usize, usize)>,
}

impl AssistantConfig {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// A field is missing, wrong or not supported.
    pub fn parse(json: &str) -> Result<Self, ConfigError> {
        let map = parse_object(json)?;
        let f = Fields(&map);
        if f.get("model_type").is_none_or(|name| name != "gemma4_assistant") {
            return f.unsupported("model_type", "\"gemma4_assistant\"");
        }
        let Some(Value::Object(text)) = f.get("text_config") else {
            return f.unsupported("text_config", "an object");
        };
        let mut text = text.clone();
        text.entry("model_type").or_insert("gemma4_text".into());
        // Transformers says that all layers share keys and values, which are another model's here.
        text.insert("num_kv_shared_layers".into(), 0.into());
        let parsed = ModelConfig::from_map(&text)?;
        if parsed.per_layer_dim > 0 {
            return Fields(&text).unsupported("hidden_size_per_layer_input", "0");
        }
        let clusters = || {
            let count = f.read_size("num_centroids", Some(2048), MAX_VOCAB)?;
            if !parsed.vocab.is_multiple_of(count) {
                return f
                    .unsupported("num_centroids", &format!("a divisor of vocab_size ({})", parsed.vocab));
            }
            Ok((count, f.read_size("centroid_intermediate_top_k", Some(32), count)?))
        };
        Ok(Self {
            model_dim: f.read_size("backbone_hidden_size", Some(1536), MAX_DIM)?,
            clusters: f.read_bool("use_ordered_embeddings", false)?.then(clusters).transpose()?,
            text: parsed,
        })
    }
}
