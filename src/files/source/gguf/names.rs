//! GGUF's names for the tensors of a checkpoint, and the row order that llama.cpp's converter gives them.

use crate::config::Arch;

/// Pairs of names: Hugging Face's and GGUF's.
type Pairs = &'static [(&'static str, &'static str)];

/// Tensors outside the layers.
const MODEL: Pairs = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Tensors of layer `N`, without the prefixes `model.layers.N.` and `blk.N.` and without `.weight` or `.bias`.
const LAYER: Pairs = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Norms of a layer, by which families differ.
const ONE_NORM: Pairs = &[("post_attention_layernorm", "ffn_norm")];
const POST_NORMS: Pairs = &[
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];
/// Tensors of a layer of Phi, which fuses matrices.
const FUSED: Pairs = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// GPT-2's own names.
const GPT2_MODEL: Pairs = &[
    ("wte.weight", "token_embd.weight"),
    ("wpe.weight", "position_embd.weight"),
    ("ln_f.weight", "output_norm.weight"),
    ("ln_f.bias", "output_norm.bias"),
    ("lm_head.weight", "output.weight"),
];
const GPT2_LAYER: Pairs = &[
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

/// The names of a family: tensors outside the layers, Hugging Face's prefix of a layer's number, tensors of a layer.
fn name_tables(arch: Arch) -> (Pairs, &'static str, [Pairs; 2]) {
    const LAYERS: &str = "model.layers.";
    match arch {
        Arch::Gpt2 => (GPT2_MODEL, "h.", [GPT2_LAYER, &[]]),
        Arch::Phi3 => (MODEL, LAYERS, [FUSED, ONE_NORM]),
        Arch::Gemma3 => (MODEL, LAYERS, [LAYER, POST_NORMS]),
        _ => (MODEL, LAYERS, [LAYER, ONE_NORM]),
    }
}

/// Divisors of the RoPE frequencies, `[pairs]`. Hugging Face uses a formula instead.
pub const ROPE_FREQS: &str = "rope_freqs.weight";
/// Divisors of LongRoPE for short sequences, `[pairs]`.
pub const ROPE_SHORT: &str = "rope_factors_short.weight";
/// Divisors of LongRoPE for long sequences, `[pairs]`.
pub const ROPE_LONG: &str = "rope_factors_long.weight";

/// Translates a checkpoint's tensor name to GGUF's; `None` if there is none.
pub fn to_gguf_name(arch: Arch, name: &str) -> Option<String> {
    let (whole, layers, parts) = name_tables(arch);
    if let Some((_, stored)) = whole.iter().find(|(plain, _)| *plain == name) {
        return Some(stored.to_string());
    }
    let (layer, part, kind) = split_layer_name(name, layers)?;
    let (_, stored) = parts.into_iter().flatten().find(|(plain, _)| *plain == part)?;
    Some(format!("blk.{layer}.{stored}.{kind}"))
}

/// Translates a GGUF tensor name to the checkpoint's; `None` if there is none.
pub fn to_hf_name(arch: Arch, stored: &str) -> Option<String> {
    let (whole, layers, parts) = name_tables(arch);
    if let Some((plain, _)) = whole.iter().find(|(_, name)| *name == stored) {
        return Some(plain.to_string());
    }
    let (layer, part, kind) = split_layer_name(stored, "blk.")?;
    let (plain, _) = parts.into_iter().flatten().find(|(_, name)| *name == part)?;
    Some(format!("{layers}{layer}.{plain}.{kind}"))
}

/// Splits a GGUF tensor name into layer, part, and `weight` or `bias`; `None` outside the layers.
pub(super) fn split_gguf_name(stored: &str) -> Option<(usize, &str, &str)> {
    split_layer_name(stored, "blk.")
}

/// Splits a name that starts with `prefix` into layer, part, and `weight` or `bias`.
fn split_layer_name<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str, &'a str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let layer: usize = number.parse().ok().filter(|layer: &usize| layer.to_string() == number)?;
    let (part, kind) = rest.rsplit_once('.')?;
    matches!(kind, "weight" | "bias").then_some((layer, part, kind))
}

/// The order of a tensor's rows (or a bias's values) in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// As in a checkpoint.
    Unchanged,
    /// Rows of each head are interleaved for a RoPE that rotates neighbours: rows `i` and `i + head_dim / 2` of a
    /// checkpoint, which are rotated together, are rows `2i` and `2i + 1` here. `head_dim` is even.
    Interleaved { head_dim: usize },
}

impl RowOrder {
    /// Row order of the checkpoint's tensor `name`. llama.cpp's `convert_hf_to_gguf.py` reorders q and k of Llama and
    /// of the classes derived from it (`LlamaModel.permute`), not of the others.
    pub fn for_tensor(arch: Arch, name: &str, head_dim: usize) -> RowOrder {
        match split_layer_name(name, "model.layers.") {
            Some((_, "self_attn.q_proj" | "self_attn.k_proj", _))
                if matches!(arch, Arch::Llama | Arch::SmolLm3 | Arch::Granite) =>
            {
                RowOrder::Interleaved { head_dim }
            }
            _ => RowOrder::Unchanged,
        }
    }

    /// Index in the file of row `row` of the checkpoint.
    pub fn to_gguf_name(self, row: usize) -> usize {
        let RowOrder::Interleaved { head_dim } = self else { return row };
        let (head, row) = (row / head_dim, row % head_dim);
        let half = head_dim / 2;
        head * head_dim + row % half * 2 + row / half
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_names_map_to_gguf_and_back() {
        for (arch, plain_name, stored_name) in [
            (Arch::Qwen3, "model.embed_tokens.weight", "token_embd.weight"),
            (Arch::Qwen3, "lm_head.weight", "output.weight"),
            (Arch::Qwen3, "model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
            (Arch::Qwen3, "model.layers.27.mlp.down_proj.weight", "blk.27.ffn_down.weight"),
            (Arch::Qwen3, "model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
            (Arch::Qwen3, "model.layers.11.post_attention_layernorm.weight", "blk.11.ffn_norm.weight"),
            (
                Arch::Gemma3,
                "model.layers.1.post_attention_layernorm.weight",
                "blk.1.post_attention_norm.weight",
            ),
            (Arch::Gemma3, "model.layers.1.pre_feedforward_layernorm.weight", "blk.1.ffn_norm.weight"),
            (Arch::Phi3, "model.layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight"),
            (Arch::Gpt2, "h.3.attn.c_attn.bias", "blk.3.attn_qkv.bias"),
            (Arch::Gpt2, "wpe.weight", "position_embd.weight"),
        ] {
            assert_eq!(to_gguf_name(arch, plain_name).as_deref(), Some(stored_name));
            assert_eq!(to_hf_name(arch, stored_name).as_deref(), Some(plain_name));
        }
        for none in
            ["", "blk.0", "blk..attn_q.weight", "blk.00.attn_q.weight", "blk.+1.attn_q.weight", ROPE_FREQS]
        {
            assert_eq!(to_hf_name(Arch::Llama, none), None, "{none}");
        }
        for none in
            ["model.layers.0.mlp.router.weight", "model.layers.0.self_attn.q_proj.scale", "blk.0.attn_q.bias"]
        {
            assert_eq!(to_gguf_name(Arch::Llama, none), None, "{none}");
        }
    }

    /// `w.reshape(heads, 2, head_dim / 2).swapaxes(1, 2)`, as the converter has it.
    #[test]
    fn reordering_rows_undoes_the_converter() {
        let (heads, head_dim) = (3, 8);
        let mut converted = Vec::new();
        for head in 0..heads {
            for i in 0..head_dim / 2 {
                for half in 0..2 {
                    converted.push(head * head_dim + half * head_dim / 2 + i);
                }
            }
        }
        let rows = RowOrder::for_tensor(Arch::Llama, "model.layers.5.self_attn.k_proj.weight", head_dim);
        let undone: Vec<usize> = (0..heads * head_dim).map(|row| converted[rows.to_gguf_name(row)]).collect();
        assert_eq!(undone, (0..heads * head_dim).collect::<Vec<_>>());
        assert_ne!(undone, converted);
    }

    #[test]
    fn only_q_and_k_of_llama_are_reordered() {
        let of =
            |arch, part: &str| RowOrder::for_tensor(arch, &format!("model.layers.1.self_attn.{part}"), 16);
        assert_eq!(of(Arch::Llama, "q_proj.weight"), RowOrder::Interleaved { head_dim: 16 });
        assert_eq!(of(Arch::Llama, "k_proj.bias"), RowOrder::Interleaved { head_dim: 16 });
        assert_eq!(of(Arch::Llama, "v_proj.weight"), RowOrder::Unchanged);
        assert_eq!(of(Arch::Llama, "q_norm.weight"), RowOrder::Unchanged);
        assert_eq!(of(Arch::Qwen2, "q_proj.weight"), RowOrder::Unchanged);
        assert_eq!(RowOrder::Unchanged.to_gguf_name(7), 7);
    }
}
