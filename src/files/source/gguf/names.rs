//! GGUF's names for the tensors of a checkpoint, and the order in which llama.cpp's converter puts their rows.

use crate::config::Arch;

/// Tensors outside the layers: Hugging Face's name, GGUF's name.
const WHOLE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Parts of layer `N`: what follows `model.layers.N.`, and what follows `blk.N.`; both without `.weight` or `.bias`.
const PARTS: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Divisors of the RoPE frequencies, `[head_dim / 2]`. Hugging Face has a formula instead.
pub const ROPE_FREQS: &str = "rope_freqs.weight";

/// GGUF's name for a checkpoint's tensor; `None` if there is none.
pub fn stored(name: &str) -> Option<String> {
    if let Some((_, stored)) = WHOLE.iter().find(|(plain, _)| *plain == name) {
        return Some(stored.to_string());
    }
    let (layer, part, kind) = split(name, "model.layers.")?;
    let (_, stored) = PARTS.iter().find(|(plain, _)| *plain == part)?;
    Some(format!("blk.{layer}.{stored}.{kind}"))
}

/// A checkpoint's name for a GGUF file's tensor; `None` if there is none.
pub fn plain(stored: &str) -> Option<String> {
    if let Some((plain, _)) = WHOLE.iter().find(|(_, name)| *name == stored) {
        return Some(plain.to_string());
    }
    let (layer, part, kind) = split(stored, "blk.")?;
    let (plain, _) = PARTS.iter().find(|(_, name)| *name == part)?;
    Some(format!("model.layers.{layer}.{plain}.{kind}"))
}

/// Layer, part, and `weight` or `bias` of a GGUF file's tensor; `None` outside the layers.
pub(super) fn part(stored: &str) -> Option<(usize, &str, &str)> {
    split(stored, "blk.")
}

/// Layer, part, and `weight` or `bias` of a name that starts with `prefix`.
fn split<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str, &'a str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let layer: usize = number.parse().ok().filter(|layer: &usize| layer.to_string() == number)?;
    let (part, kind) = rest.rsplit_once('.')?;
    matches!(kind, "weight" | "bias").then_some((layer, part, kind))
}

/// The order of a tensor's rows (or a bias's values) in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rows {
    /// As in a checkpoint.
    Plain,
    /// Each head's rows are ordered for a RoPE that rotates neighbours: rows `i` and `i + head_dim / 2` of a
    /// checkpoint, which are rotated together, are rows `2i` and `2i + 1` here. `head_dim` is even.
    Interleaved { head_dim: usize },
}

impl Rows {
    /// The order of the tensor that a checkpoint calls `name`. llama.cpp's `convert_hf_to_gguf.py` reorders q and k of
    /// Llama (`LlamaModel.permute`), not of Qwen.
    pub fn of(arch: Arch, name: &str, head_dim: usize) -> Rows {
        match split(name, "model.layers.") {
            Some((_, "self_attn.q_proj" | "self_attn.k_proj", _)) if arch == Arch::Llama => {
                Rows::Interleaved { head_dim }
            }
            _ => Rows::Plain,
        }
    }

    /// The place in the file of row `row` of the checkpoint.
    pub fn stored(self, row: usize) -> usize {
        let Rows::Interleaved { head_dim } = self else { return row };
        let (head, row) = (row / head_dim, row % head_dim);
        let half = head_dim / 2;
        head * head_dim + row % half * 2 + row / half
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_there_and_back() {
        for (plain_name, stored_name) in [
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("lm_head.weight", "output.weight"),
            ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            ("model.layers.27.mlp.down_proj.weight", "blk.27.ffn_down.weight"),
            ("model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
            ("model.layers.11.post_attention_layernorm.weight", "blk.11.ffn_norm.weight"),
        ] {
            assert_eq!(stored(plain_name).as_deref(), Some(stored_name));
            assert_eq!(plain(stored_name).as_deref(), Some(plain_name));
        }
        for none in
            ["", "blk.0", "blk..attn_q.weight", "blk.00.attn_q.weight", "blk.+1.attn_q.weight", ROPE_FREQS]
        {
            assert_eq!(plain(none), None, "{none}");
        }
        for none in
            ["model.layers.0.mlp.router.weight", "model.layers.0.self_attn.q_proj.scale", "blk.0.attn_q.bias"]
        {
            assert_eq!(stored(none), None, "{none}");
        }
    }

    /// `w.reshape(heads, 2, head_dim / 2).swapaxes(1, 2)`, as the converter has it.
    #[test]
    fn the_row_order_undoes_the_converters() {
        let (heads, head_dim) = (3, 8);
        let mut converted = Vec::new();
        for head in 0..heads {
            for i in 0..head_dim / 2 {
                for half in 0..2 {
                    converted.push(head * head_dim + half * head_dim / 2 + i);
                }
            }
        }
        let rows = Rows::of(Arch::Llama, "model.layers.5.self_attn.k_proj.weight", head_dim);
        let undone: Vec<usize> = (0..heads * head_dim).map(|row| converted[rows.stored(row)]).collect();
        assert_eq!(undone, (0..heads * head_dim).collect::<Vec<_>>());
        assert_ne!(undone, converted);
    }

    #[test]
    fn only_q_and_k_of_llama_are_reordered() {
        let of = |arch, part: &str| Rows::of(arch, &format!("model.layers.1.self_attn.{part}"), 16);
        assert_eq!(of(Arch::Llama, "q_proj.weight"), Rows::Interleaved { head_dim: 16 });
        assert_eq!(of(Arch::Llama, "k_proj.bias"), Rows::Interleaved { head_dim: 16 });
        assert_eq!(of(Arch::Llama, "v_proj.weight"), Rows::Plain);
        assert_eq!(of(Arch::Llama, "q_norm.weight"), Rows::Plain);
        assert_eq!(of(Arch::Qwen2, "q_proj.weight"), Rows::Plain);
        assert_eq!(Rows::Plain.stored(7), 7);
    }
}
