//! GGUF's names for the tensors of a checkpoint, and the row order that llama.cpp's converter gives them.

use crate::config::Arch;

/// Pairs of names: Hugging Face's and GGUF's.
type Pairs = &'static [(&'static str, &'static str)];

/// Tensors outside the layers.
const MODEL: Pairs = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.embed_positions.weight", "position_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("model.norm.bias", "output_norm.bias"),
    ("lm_head.weight", "output.weight"),
];
const LFM2_MODEL: Pairs = &[
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "token_embd_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Tensors of embeddings that each layer has of a token.
const PER_LAYER_MODEL: Pairs = &[
    ("model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
    ("model.per_layer_model_projection.weight", "per_layer_model_proj.weight"),
    ("model.per_layer_projection_norm.weight", "per_layer_proj_norm.weight"),
];
const PER_LAYER: Pairs = &[
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];
/// Gemma 4's tensors with neither `.weight` nor `.bias` in a checkpoint.
const GEMMA4_VALUES: Pairs = &[
    ("layer_scalar", "layer_output_scale.weight"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
];

/// Tensors of layer `N`, without the prefixes `model.layers.N.` and `blk.N.` and without `.weight` or `.bias`.
const LAYER: Pairs = &[
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
/// Tensors of a layer of Phi and GPT-2, which fuse matrices.
const FUSED: Pairs =
    &[("self_attn.qkv_proj", "attn_qkv"), ("self_attn.o_proj", "attn_output"), ("mlp.down_proj", "ffn_down")];
const FUSED_GATE: Pairs = &[("mlp.gate_up_proj", "ffn_up")];
const NO_GATE: Pairs = &[("mlp.up_proj", "ffn_up")];
const SHORT_CONV: Pairs = &[
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
];
const DELTA_NET: Pairs = &[
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
];
/// Tensors of a delta net with neither `.weight` nor `.bias` in a checkpoint.
const DELTA_VALUES: Pairs = &[("linear_attn.A_log", "ssm_a"), ("linear_attn.dt_bias", "ssm_dt.bias")];

const MAMBA: Pairs = &[
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
];
/// Tensors of Mamba2 with neither `.weight` nor `.bias` in a checkpoint.
const MAMBA_VALUES: Pairs =
    &[("mamba.A_log", "ssm_a"), ("mamba.D", "ssm_d"), ("mamba.dt_bias", "ssm_dt.bias")];
/// Falcon-H1's, with a norm that has no ending in GGUF files.
const FALCON_H1_VALUES: Pairs = &[
    ("post_attention_layernorm.weight", "ffn_norm"),
    ("mamba.A_log", "ssm_a"),
    ("mamba.D", "ssm_d"),
    ("mamba.dt_bias", "ssm_dt.bias"),
];

/// Tensors of a layer with experts.
const EXPERTS: Pairs = &[
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];
/// Tensors of a layer whose experts have norms of their own.
const GEMMA4_EXPERTS: Pairs = &[
    ("router.proj", "ffn_gate_inp"),
    ("mlp.experts.gate_proj", "ffn_gate_exps"),
    ("mlp.experts.up_proj", "ffn_up_exps"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps"),
    ("mlp.experts.down_proj", "ffn_down_exps"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
];
/// Logits of attention that belong to no token.
const SINKS: Pairs = &[("self_attn.sinks", "attn_sinks.weight")];
/// The bias by which experts are chosen.
const CHOICE_BIAS: Pairs = &[("mlp.expert_bias", "exp_probs_b.bias")];

/// Norms of a layer: on the inputs of its halves, on their outputs, and on both.
const PRE_NORMS: Pairs = &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm")];
const POST_NORMS: Pairs =
    &[("post_attention_layernorm", "post_attention_norm"), ("post_feedforward_layernorm", "post_ffw_norm")];
const BOTH_NORMS: Pairs = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];
/// Tensors of a block that predicts the token after the next, besides those of a layer.
const MTP: Pairs = &[
    ("eh_proj", "nextn.eh_proj"),
    ("enorm", "nextn.enorm"),
    ("hnorm", "nextn.hnorm"),
    ("shared_head.norm", "nextn.shared_head_norm"),
];
/// A layer of Nemotron-H has one norm, whatever it is of.
const NEMOTRON_H_NORMS: Pairs =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "attn_norm")];
const QWEN35_NORMS: Pairs =
    &[("input_layernorm", "attn_norm"), ("post_attention_layernorm", "post_attention_norm")];

/// The names of a family's tensors outside the layers.
fn model_tables(arch: Arch) -> [Pairs; 2] {
    match arch {
        Arch::Lfm2 | Arch::Lfm2Moe => [LFM2_MODEL, &[]],
        Arch::Gemma4 => [MODEL, PER_LAYER_MODEL],
        _ => [MODEL, &[]],
    }
}

/// The names of a family's tensors in a layer.
fn layer_tables(arch: Arch) -> [Pairs; 4] {
    let family = arch.family();
    let norms = match (family.pre_norms, family.post_norms) {
        (true, true) => BOTH_NORMS,
        (false, _) => POST_NORMS,
        (true, false) if arch.is_qwen35() || arch == Arch::GptOss => QWEN35_NORMS,
        (true, false) if arch == Arch::NemotronH => NEMOTRON_H_NORMS,
        (true, false) => PRE_NORMS,
    };
    let experts = if family.experts.is_some() { EXPERTS } else { &[] };
    match arch {
        Arch::Gpt2 => [norms, FUSED, NO_GATE, &[]],
        Arch::Phi3 => [norms, FUSED, FUSED_GATE, &[]],
        Arch::Lfm2 | Arch::Lfm2Moe => [norms, LAYER, SHORT_CONV, experts],
        Arch::Qwen35 | Arch::Qwen35Moe => [norms, LAYER, DELTA_NET, experts],
        Arch::Gemma4 => [norms, LAYER, PER_LAYER, GEMMA4_EXPERTS],
        Arch::GraniteMoeHybrid | Arch::FalconH1 | Arch::NemotronH => [norms, LAYER, MAMBA, experts],
        _ => [norms, LAYER, &[], experts],
    }
}

/// Divisors of the RoPE frequencies, `[pairs]`. Hugging Face uses a formula instead.
pub const ROPE_FREQS: &str = "rope_freqs.weight";
/// Divisors of LongRoPE for short sequences, `[pairs]`.
pub const ROPE_SHORT: &str = "rope_factors_short.weight";
/// Divisors of LongRoPE for long sequences, `[pairs]`.
pub const ROPE_LONG: &str = "rope_factors_long.weight";

/// The engine's prefix of a layer's number.
const LAYERS: &str = "model.layers.";

/// Translates a checkpoint's tensor name to GGUF's; `None` if there is none.
pub fn to_gguf_name(arch: Arch, name: &str) -> Option<String> {
    let is = |plain: &str, name: &str| arch.checkpoint_name(plain) == name;
    if let Some((_, stored)) = model_tables(arch).into_iter().flatten().find(|(plain, _)| is(plain, name)) {
        return Some(stored.to_string());
    }
    let (layer, rest) = split_layer_name(name, &arch.checkpoint_name(LAYERS))?;
    if let Some((_, stored)) = value_table(arch).iter().find(|(plain, _)| is(plain, rest)) {
        return Some(format!("blk.{layer}.{stored}"));
    }
    let (part, kind) = split_kind(rest)?;
    let mut pairs = layer_tables(arch).into_iter().chain([MTP]).flatten();
    let (_, stored) = pairs.find(|(plain, _)| is(plain, part))?;
    Some(format!("blk.{layer}.{stored}.{kind}"))
}

/// Translates a GGUF tensor name to the checkpoint's; `None` if there is none.
pub fn to_hf_name(arch: Arch, stored: &str) -> Option<String> {
    let plain = if let Some((plain, _)) =
        model_tables(arch).into_iter().flatten().find(|(_, name)| *name == stored)
    {
        plain.to_string()
    } else {
        let (layer, rest) = split_gguf_name(stored)?;
        if let Some((plain, _)) = value_table(arch).iter().find(|(_, name)| *name == rest) {
            format!("{LAYERS}{layer}.{plain}")
        } else {
            let (part, kind) = split_kind(rest)?;
            let (plain, _) = layer_tables(arch).into_iter().flatten().find(|(_, name)| *name == part)?;
            format!("{LAYERS}{layer}.{plain}.{kind}")
        }
    };
    Some(arch.checkpoint_name(&plain))
}

/// The names of a family's tensors in a layer that end neither in `.weight` nor in `.bias`.
fn value_table(arch: Arch) -> Pairs {
    match arch {
        Arch::Qwen35 | Arch::Qwen35Moe => DELTA_VALUES,
        Arch::Lfm2Moe => CHOICE_BIAS,
        Arch::GptOss => SINKS,
        Arch::Gemma4 => GEMMA4_VALUES,
        Arch::GraniteMoeHybrid | Arch::NemotronH => MAMBA_VALUES,
        Arch::FalconH1 => FALCON_H1_VALUES,
        _ => &[],
    }
}

/// Splits a GGUF tensor name into layer and rest; `None` outside the layers.
pub(super) fn split_gguf_name(stored: &str) -> Option<(usize, &str)> {
    split_layer_name(stored, "blk.")
}

/// Splits a name that starts with `prefix` into layer and rest.
fn split_layer_name<'a>(name: &'a str, prefix: &str) -> Option<(usize, &'a str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let layer: usize = number.parse().ok().filter(|layer: &usize| layer.to_string() == number)?;
    Some((layer, rest))
}

/// Splits off `weight` or `bias`.
fn split_kind(rest: &str) -> Option<(&str, &str)> {
    rest.rsplit_once('.').filter(|(_, kind)| matches!(*kind, "weight" | "bias"))
}

/// The order of a tensor's rows (or a bias's values) in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowOrder {
    /// As in the engine.
    Unchanged,
    /// Rows of each head are interleaved for a RoPE that rotates neighbours: rows `i` and `i + head_dim / 2` of the
    /// engine, which are rotated together, are rows `2i` and `2i + 1` here. `head_dim` is even.
    Interleaved { head_dim: usize },
    /// The rows of each head follow those of the same head of another tensor, of which there are `parts`.
    HeadPart { head_dim: usize, part: usize, parts: usize },
    /// Values of a vector: those of a matrix of this many columns, row by row, are here column by column.
    Transposed { cols: usize, rows: usize },
}

impl RowOrder {
    /// Row order in a GGUF file of the checkpoint's tensor `name`. llama.cpp's `convert_hf_to_gguf.py` reorders q and k of Llama and
    /// of the classes derived from it (`LlamaModel.permute`), not of the others.
    pub fn for_tensor(arch: Arch, name: &str, head_dim: usize) -> RowOrder {
        use Arch::{Granite, GraniteMoeHybrid, Llama, Ministral3, Mistral, SmolLm3};
        match split_layer_name(name, LAYERS).and_then(|(_, rest)| split_kind(rest)) {
            Some(("self_attn.q_proj" | "self_attn.k_proj", _))
                if matches!(arch, Llama | Mistral | Ministral3 | SmolLm3 | Granite | GraniteMoeHybrid) =>
            {
                RowOrder::Interleaved { head_dim }
            }
            _ => RowOrder::Unchanged,
        }
    }

    /// Index in the file of row `row` of the engine's tensor.
    pub fn file_row(self, row: usize) -> usize {
        match self {
            RowOrder::Unchanged => row,
            RowOrder::Interleaved { head_dim } => {
                let (head, row, half) = (row / head_dim, row % head_dim, head_dim / 2);
                head * head_dim + row % half * 2 + row / half
            }
            RowOrder::HeadPart { head_dim, part, parts } => {
                (row / head_dim * parts + part) * head_dim + row % head_dim
            }
            RowOrder::Transposed { cols, rows } => row % rows * cols + row / rows,
        }
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
            (Arch::Gpt2, "ln_f.bias", "output_norm.bias"),
            (Arch::Gpt2, "h.3.ln_2.weight", "blk.3.ffn_norm.weight"),
            (Arch::Lfm2, "model.embedding_norm.weight", "token_embd_norm.weight"),
            (Arch::Lfm2, "model.layers.0.operator_norm.weight", "blk.0.attn_norm.weight"),
            (Arch::Lfm2, "model.layers.0.conv.conv.weight", "blk.0.shortconv.conv.weight"),
            (Arch::Lfm2, "model.layers.1.self_attn.out_proj.weight", "blk.1.attn_output.weight"),
            (Arch::Lfm2, "model.layers.1.self_attn.q_layernorm.weight", "blk.1.attn_q_norm.weight"),
            (Arch::Lfm2, "model.layers.1.feed_forward.w2.weight", "blk.1.ffn_down.weight"),
            (Arch::HunyuanDense, "model.layers.1.self_attn.key_layernorm.weight", "blk.1.attn_k_norm.weight"),
            (Arch::Qwen35, "model.layers.0.linear_attn.in_proj_qkv.weight", "blk.0.attn_qkv.weight"),
            (Arch::Qwen35, "model.layers.0.linear_attn.in_proj_a.weight", "blk.0.ssm_alpha.weight"),
            (Arch::Qwen35, "model.layers.0.linear_attn.A_log", "blk.0.ssm_a"),
            (Arch::Qwen35, "model.layers.0.linear_attn.dt_bias", "blk.0.ssm_dt.bias"),
            (
                Arch::Qwen35,
                "model.layers.0.post_attention_layernorm.weight",
                "blk.0.post_attention_norm.weight",
            ),
            (Arch::Gemma4, "model.embed_tokens_per_layer.weight", "per_layer_token_embd.weight"),
            (Arch::Gemma4, "model.layers.1.per_layer_projection.weight", "blk.1.proj.weight"),
            (Arch::Gemma4, "model.layers.1.layer_scalar", "blk.1.layer_output_scale.weight"),
            (Arch::Gemma4, "model.layers.1.mlp.gate_proj.weight", "blk.1.ffn_gate.weight"),
            (Arch::Gemma4, "model.layers.1.router.proj.weight", "blk.1.ffn_gate_inp.weight"),
            (Arch::Gemma4, "model.layers.1.router.per_expert_scale", "blk.1.ffn_down_exps.scale"),
            (Arch::Gemma4, "model.layers.1.experts.gate_up_proj.weight", "blk.1.ffn_gate_up_exps.weight"),
            (Arch::Qwen3Moe, "model.layers.0.mlp.gate.weight", "blk.0.ffn_gate_inp.weight"),
            (Arch::Qwen3Moe, "model.layers.0.mlp.experts.up_proj.weight", "blk.0.ffn_up_exps.weight"),
            (
                Arch::Qwen35Moe,
                "model.layers.0.mlp.shared_expert.down_proj.weight",
                "blk.0.ffn_down_shexp.weight",
            ),
            (Arch::Lfm2Moe, "model.layers.2.feed_forward.experts.w1.weight", "blk.2.ffn_gate_exps.weight"),
            (Arch::Lfm2Moe, "model.layers.2.feed_forward.expert_bias", "blk.2.exp_probs_b.bias"),
            (Arch::GptOss, "model.layers.0.mlp.router.bias", "blk.0.ffn_gate_inp.bias"),
            (Arch::GptOss, "model.layers.0.mlp.experts.down_proj.bias", "blk.0.ffn_down_exps.bias"),
            (Arch::GptOss, "model.layers.0.self_attn.sinks", "blk.0.attn_sinks.weight"),
            (Arch::Olmo3, "model.layers.0.post_feedforward_layernorm.weight", "blk.0.post_ffw_norm.weight"),
            (Arch::GraniteMoeHybrid, "model.layers.0.mamba.in_proj.weight", "blk.0.ssm_in.weight"),
            (Arch::GraniteMoeHybrid, "model.layers.0.mamba.conv1d.bias", "blk.0.ssm_conv1d.bias"),
            (
                Arch::GraniteMoeHybrid,
                "model.layers.0.mlp.shared_expert.up_proj.weight",
                "blk.0.ffn_up_shexp.weight",
            ),
            (Arch::FalconH1, "model.layers.0.pre_ff_layernorm.weight", "blk.0.ffn_norm"),
            (Arch::FalconH1, "model.layers.0.feed_forward.up_proj.weight", "blk.0.ffn_up.weight"),
            (Arch::FalconH1, "model.final_layernorm.weight", "output_norm.weight"),
            (Arch::NemotronH, "backbone.layers.1.norm.weight", "blk.1.attn_norm.weight"),
            (Arch::NemotronH, "backbone.layers.0.mixer.norm.weight", "blk.0.ssm_norm.weight"),
            (Arch::NemotronH, "backbone.layers.1.mixer.up_proj.weight", "blk.1.ffn_up.weight"),
            (Arch::NemotronH, "backbone.layers.3.mixer.q_proj.weight", "blk.3.attn_q.weight"),
            (Arch::NemotronH, "backbone.layers.0.mixer.D", "blk.0.ssm_d"),
            (Arch::NemotronH, "backbone.norm_f.weight", "output_norm.weight"),
            (Arch::NemotronH, "backbone.embeddings.weight", "token_embd.weight"),
        ] {
            assert_eq!(to_gguf_name(arch, plain_name).as_deref(), Some(stored_name));
            assert_eq!(to_hf_name(arch, stored_name).as_deref(), Some(plain_name));
        }
        for none in [
            "",
            "blk.0",
            "blk..attn_q.weight",
            "blk.00.attn_q.weight",
            "blk.+1.attn_q.weight",
            "blk.0.ssm_a",
            ROPE_FREQS,
        ] {
            assert_eq!(to_hf_name(Arch::Llama, none), None, "{none}");
        }
        for none in
            ["model.layers.0.mlp.router.weight", "model.layers.0.self_attn.q_proj.scale", "blk.0.attn_q.bias"]
        {
            assert_eq!(to_gguf_name(Arch::Llama, none), None, "{none}");
        }
        // It has no norms of inputs.
        assert_eq!(to_hf_name(Arch::Exaone4, "blk.0.attn_norm.weight"), None);
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
        let undone: Vec<usize> = (0..heads * head_dim).map(|row| converted[rows.file_row(row)]).collect();
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
        assert_eq!(of(Arch::Ministral3, "q_proj.weight"), RowOrder::Interleaved { head_dim: 16 });
        assert_eq!(of(Arch::Qwen2, "q_proj.weight"), RowOrder::Unchanged);
        assert_eq!(RowOrder::Unchanged.file_row(7), 7);
    }
}
