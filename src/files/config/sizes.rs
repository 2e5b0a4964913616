//! The sizes and factors of a model's parts, from the config's fields.

use super::arch::Arch;
use super::fields::positive_float;
use super::fields::{ConfigError, Fields};
use super::layer_kinds::LayerKind;
use super::{DeltaNetSizes, MAX_DIM, MAX_HEAD_DIM, MAX_LAYERS, MAX_TAPS, MambaNorm, MambaSizes, Scales};

pub(super) fn read_head_dim(
    f: &Fields<'_>,
    default: usize,
    dim: usize,
    heads: usize,
) -> Result<usize, ConfigError> {
    let named = ["head_dim", "attention_head_dim"].into_iter().find(|field| f.get(field).is_some());
    let head_dim = if let Some(field) = named {
        f.read_size(field, None, MAX_HEAD_DIM)?
    } else if default > 0 {
        default
    } else if dim.is_multiple_of(heads) {
        dim / heads
    } else {
        let supported = format!("a divisor of hidden_size ({dim}), or an explicit head_dim");
        return f.unsupported("num_attention_heads", &supported);
    };
    if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
        return f.unsupported("head_dim", &format!("an even number up to {MAX_HEAD_DIM}"));
    }
    if heads * head_dim > MAX_DIM {
        return f.unsupported("num_attention_heads", &format!("heads x head_dim up to {MAX_DIM}"));
    }
    Ok(head_dim)
}

/// Numbers of query heads and of key/value heads.
pub(super) fn read_heads(f: &Fields<'_>, arch: Arch) -> Result<(usize, usize), ConfigError> {
    let default = (arch == Arch::Gemma3).then_some(8);
    let heads = f.read_size(arch.field_name("num_attention_heads"), default, MAX_DIM)?;
    let default = if arch.family().kv_heads == 0 { heads } else { arch.family().kv_heads };
    let kv_heads = f.read_size("num_key_value_heads", Some(default), MAX_DIM)?;
    if heads.is_multiple_of(kv_heads) {
        return Ok((heads, kv_heads));
    }
    f.unsupported("num_key_value_heads", &format!("a divisor of num_attention_heads ({heads})"))
}

/// Number of KV heads of full-attention layers.
pub(super) fn read_global_kv_heads(f: &Fields<'_>, kv_heads: usize) -> Result<usize, ConfigError> {
    const FIELD: &str = "num_global_key_value_heads";
    let heads = f.read_size(FIELD, Some(kv_heads), MAX_DIM)?;
    if kv_heads.is_multiple_of(heads) {
        return Ok(heads);
    }
    f.unsupported(FIELD, &format!("a divisor of num_key_value_heads ({kv_heads})"))
}

/// Longest context that the model was trained for, in tokens.
pub(super) fn read_max_position(f: &Fields<'_>, arch: Arch) -> Result<usize, ConfigError> {
    let default = if arch == Arch::Gemma3 { 131_072 } else { 2048 };
    f.read_size(arch.field_name("max_position_embeddings"), Some(default), 1 << 30)
}

/// Cap of logits; 0 without.
pub(super) fn read_softcap(f: &Fields<'_>) -> Result<f64, ConfigError> {
    match f.get("final_logit_softcapping") {
        None => Ok(0.0),
        Some(_) => f.read_float("final_logit_softcapping", None),
    }
}

/// Width of the heads of full-attention layers.
pub(super) fn read_widest_head_dim(f: &Fields<'_>, arch: Arch, local: usize) -> Result<usize, ConfigError> {
    if arch != Arch::Gemma4 {
        return Ok(local);
    }
    if !local.is_multiple_of(16) {
        return f.unsupported("head_dim", "a multiple of 16");
    }
    match f.read_size("global_head_dim", Some(512), MAX_HEAD_DIM)? {
        width if width >= local && width.is_multiple_of(2) => Ok(width),
        _ => f.unsupported("global_head_dim", &format!("an even number from head_dim ({local}) on")),
    }
}

/// Number of last layers that read keys and values of an earlier layer, which must be there.
pub(super) fn read_shared_kv_layers(
    f: &Fields<'_>,
    arch: Arch,
    kinds: &[LayerKind],
) -> Result<usize, ConfigError> {
    const FIELD: &str = "num_kv_shared_layers";
    if arch != Arch::Gemma4 {
        return Ok(0);
    }
    let shared = f.read_count(FIELD, 0, MAX_LAYERS)?;
    let (own, reading) = kinds.split_at(kinds.len().saturating_sub(shared));
    if reading.iter().all(|kind| own.contains(kind)) {
        return Ok(shared);
    }
    f.unsupported(FIELD, "a number that leaves a layer of each kind with keys and values")
}

/// Width of the feed-forward of layers that share keys and values.
pub(super) fn read_shared_ffn_dim(
    f: &Fields<'_>,
    shared: usize,
    ffn_dim: usize,
) -> Result<usize, ConfigError> {
    match ffn_dim << u8::from(shared > 0 && f.read_bool("use_double_wide_mlp", false)?) {
        width @ ..=MAX_DIM => Ok(width),
        _ => f.unsupported("intermediate_size", &format!("a number up to {}", MAX_DIM / 2)),
    }
}

/// Width of the embedding that each layer has of a token; 0 without.
pub(super) fn read_per_layer_dim(f: &Fields<'_>, arch: Arch, layers: usize) -> Result<usize, ConfigError> {
    if arch != Arch::Gemma4 {
        return Ok(0);
    }
    let width = f.read_count("hidden_size_per_layer_input", 256, MAX_DIM / layers)?;
    if width > 0 && f.get("vocab_size_per_layer_input").is_some_and(|rows| Some(rows) != f.get("vocab_size"))
    {
        return f.unsupported("vocab_size_per_layer_input", "the same as vocab_size");
    }
    Ok(width)
}

/// Width of the feed-forward layer of a model of width `dim`.
pub(super) fn read_ffn_dim(f: &Fields<'_>, arch: Arch, dim: usize) -> Result<usize, ConfigError> {
    let default = match arch {
        Arch::Gpt2 => Some(4 * dim),
        // Configs of the larger Gemma 3 models omit fields that have the default value.
        Arch::Gemma3 => Some(9216),
        _ => None,
    };
    let lfm2 = arch == Arch::Lfm2;
    let older = lfm2 && f.get("block_ff_dim").is_some();
    let field = if older { "block_ff_dim" } else { arch.field_name("intermediate_size") };
    let width = f.read_size(field, default, MAX_DIM)?;
    if !lfm2 || !f.read_bool("block_auto_adjust_ff_dim", older)? {
        return Ok(width);
    }
    // As in transformers' `Lfm2MLP`.
    let factor = f.read_float("block_ffn_dim_multiplier", Some(1.0))?;
    let multiple = f.read_size("block_multiple_of", Some(256), MAX_DIM)?;
    let adjusted = ((2 * width / 3) as f64 * factor) as usize;
    match adjusted.next_multiple_of(multiple) {
        adjusted @ 1..=MAX_DIM => Ok(adjusted),
        _ => f.unsupported("block_ffn_dim_multiplier", "a factor that leaves a width up to 65536"),
    }
}

/// Taps of the causal convolutions; 0 if no layer has one.
pub(super) fn read_conv_taps(f: &Fields<'_>, arch: Arch, kinds: &[LayerKind]) -> Result<usize, ConfigError> {
    let field = match kinds.iter().find(|kind| kind.is_recurrent()) {
        None => return Ok(0),
        Some(LayerKind::ShortConv) => ("conv_L_cache", 3),
        Some(kind) if kind.has_mamba() => (arch.field_name("mamba_d_conv"), 4),
        Some(_) => ("linear_conv_kernel_dim", 4),
    };
    match f.read_size(field.0, Some(field.1), MAX_TAPS)? {
        1 => f.unsupported(field.0, &format!("an integer from 2 to {MAX_TAPS}")),
        taps => Ok(taps),
    }
}

/// Sizes of gated delta nets; zeros if no layer is one.
pub(super) fn read_delta_net(f: &Fields<'_>, kinds: &[LayerKind]) -> Result<DeltaNetSizes, ConfigError> {
    if !kinds.contains(&LayerKind::DeltaNet) {
        return Ok(DeltaNetSizes::default());
    }
    let sizes = DeltaNetSizes {
        key_heads: f.read_size("linear_num_key_heads", Some(16), MAX_DIM)?,
        value_heads: f.read_size("linear_num_value_heads", Some(32), MAX_DIM)?,
        key_dim: f.read_size("linear_key_head_dim", Some(128), MAX_HEAD_DIM)?,
        value_dim: f.read_size("linear_value_head_dim", Some(128), MAX_HEAD_DIM)?,
    };
    let DeltaNetSizes { key_heads, value_heads, key_dim, value_dim } = sizes;
    if !value_heads.is_multiple_of(key_heads) || value_heads * value_dim.max(key_dim) > MAX_DIM {
        let supported = format!("a multiple of linear_num_key_heads ({key_heads}), up to {MAX_DIM} in all");
        return f.unsupported("linear_num_value_heads", &supported);
    }
    for (field, width) in [("linear_key_head_dim", key_dim), ("linear_value_head_dim", value_dim)] {
        if !width.is_multiple_of(16) {
            return f.unsupported(field, "a multiple of 16");
        }
    }
    Ok(sizes)
}

/// Sizes of Mamba2 in a model of width `dim`; zeros if no layer has it.
pub(super) fn read_mamba(
    f: &Fields<'_>,
    arch: Arch,
    dim: usize,
    kinds: &[LayerKind],
) -> Result<MambaSizes, ConfigError> {
    if !kinds.iter().any(|kind| kind.has_mamba()) {
        return Ok(MambaSizes::default());
    }
    let [heads_field, width_field, state_field, groups_field] =
        ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups"]
            .map(|name| arch.field_name(name));
    let is_nemotron = arch == Arch::NemotronH;
    let (of_state, of_groups) = if is_nemotron { (128, 8) } else { (256, 1) };
    let heads = f.read_size(heads_field, Some(128), MAX_DIM)?;
    let state = f.read_size(state_field, Some(of_state), MAX_HEAD_DIM)?;
    let groups = f.read_size(groups_field, Some(of_groups), heads)?;
    let inner = match f.get("mamba_d_ssm") {
        _ if is_nemotron => None,
        Some(_) => Some(f.read_size("mamba_d_ssm", None, MAX_DIM)?),
        None => Some(f.read_size("mamba_expand", Some(2), MAX_HEAD_DIM)? * dim),
    };
    let is_auto = f.get(width_field).is_none_or(|width| width.as_str() == Some("auto"));
    let head_dim = match inner {
        Some(inner) if is_auto => inner / heads,
        _ => f.read_size(width_field, Some(64), MAX_HEAD_DIM)?,
    };
    if heads * head_dim > MAX_DIM || inner.is_some_and(|inner| inner != heads * head_dim) {
        let all = inner.unwrap_or(MAX_DIM);
        return f
            .unsupported(heads_field, &format!("a number that makes {all} columns of heads of {head_dim}"));
    }
    if !heads.is_multiple_of(groups) || groups * state > MAX_DIM {
        let supported = format!("a divisor of {heads_field} ({heads}), with up to {MAX_DIM} rows in all");
        return f.unsupported(groups_field, &supported);
    }
    for (field, width) in [(width_field, head_dim), (state_field, state)] {
        if !(16..=MAX_HEAD_DIM).contains(&width) || !width.is_multiple_of(16) {
            return f.unsupported(field, &format!("a multiple of 16 up to {MAX_HEAD_DIM}"));
        }
    }
    if f.get("mamba_hidden_act").is_some_and(|act| act.as_str() != Some("silu")) {
        return f.unsupported("mamba_hidden_act", "\"silu\"");
    }
    // The upper limit is infinite, which JSON has no number for.
    if let Some(limits) = f.get("time_step_limit")
        && !matches!(limits.as_array().map(Vec::as_slice), Some([low, high]) if low.as_f64() == Some(0.0) && !high.is_number())
    {
        return f.unsupported("time_step_limit", "from 0 to infinity, or no such field");
    }
    if f.get("attn_layer_indices").is_some_and(|_| arch == Arch::FalconH1) {
        return f.unsupported("attn_layer_indices", "null");
    }
    let norm = match arch {
        Arch::FalconH1 if !f.read_bool("mamba_rms_norm", false)? => MambaNorm::None,
        Arch::FalconH1 if f.read_bool("mamba_norm_before_gate", true)? => MambaNorm::BeforeGate,
        _ => MambaNorm::AfterGate,
    };
    let conv_bias = f.read_bool(arch.field_name("mamba_conv_bias"), true)?;
    Ok(MambaSizes { heads, head_dim, state, groups, conv_bias, norm })
}

pub(super) fn read_scales(
    f: &Fields<'_>,
    arch: Arch,
    (dim, head_dim): (usize, usize),
) -> Result<Scales, ConfigError> {
    // In f32, as the CPU kernels compute it.
    let by_root = |n: f64| f64::from(1.0 / (n as f32).sqrt());
    let mut scales = Scales { attention: by_root(head_dim as f64), ..Scales::NONE };
    match arch {
        Arch::Gemma3 => {
            scales.embedding = (dim as f64).sqrt();
            scales.attention = by_root(f.read_float("query_pre_attn_scalar", Some(256.0))?);
        }
        Arch::Gemma4 => {
            scales.embedding = (dim as f64).sqrt();
            scales.attention = 1.0;
        }
        Arch::Granite | Arch::GraniteMoeHybrid => {
            scales.embedding = f.read_float("embedding_multiplier", Some(1.0))?;
            scales.attention = f.read_float("attention_multiplier", Some(1.0))?;
            scales.residual = f.read_float("residual_multiplier", Some(1.0))?;
            scales.logits = 1.0 / f.read_float("logits_scaling", Some(1.0))?;
        }
        Arch::FalconH1 => read_multipliers(f, &mut scales)?,
        _ => {}
    }
    Ok(scales)
}

/// Reads the multipliers of Falcon-H1. Those of attention's input are part of the factor of scores, and of its output.
fn read_multipliers(f: &Fields<'_>, scales: &mut Scales) -> Result<(), ConfigError> {
    let one = |field| f.read_float(field, Some(1.0));
    let several = |field: &str, len: usize| match f.get(field) {
        None => Ok(vec![1.0; len]),
        Some(_) => f.read_array(field, len, positive_float, &format!("{len} positive numbers")),
    };
    let (input, ssm_input) = (one("attention_in_multiplier")?, one("ssm_in_multiplier")?);
    scales.embedding = one("embedding_multiplier")?;
    scales.logits = one("lm_head_multiplier")?;
    scales.attention *= one("key_multiplier")? * input * input;
    scales.attention_out = one("attention_out_multiplier")? * input;
    scales.ssm_out = one("ssm_out_multiplier")?;
    scales.mlp.copy_from_slice(&several("mlp_multipliers", 2)?);
    scales.ssm_in.copy_from_slice(&several("ssm_multipliers", 5)?);
    scales.ssm_in.iter_mut().for_each(|factor| *factor *= ssm_input);
    Ok(())
}
