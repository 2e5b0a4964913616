//! Mixtures of experts: layers whose router chooses a few of many feed-forwards for each token.

use super::MAX_DIM;
use super::arch::Arch;
use super::fields::{ConfigError, Fields};
use serde_json::Value;

/// Maximum number of experts of a layer.
const MAX_EXPERTS: usize = 1 << 12;

/// Sizes of a mixture of experts, and how a router chooses and weighs them. Experts with equal scores are chosen by the
/// lower index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Experts of a layer; 0 if no layer has any.
    pub count: usize,
    /// Experts chosen for a token.
    pub used: usize,
    /// Width of an expert's feed-forward.
    pub dim: usize,
    /// Width of the feed-forward that every token goes through besides; 0 without.
    pub shared_dim: usize,
    /// That feed-forward, the experts and the router have norms of their own on the residual, and the outputs of both
    /// are normed before they are added. Otherwise all have one input, and the feed-forward's output a gate.
    pub own_norms: bool,
    pub router: Router,
    /// The weights of the chosen experts are divided by their sum.
    pub renormalised: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// Limit of gates and of the magnitude of ups, if the activation function clamps them.
    pub limit: f64,
}

/// The weights of experts, by their scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Router {
    /// Softmax. If renormalised, it is the softmax of the chosen experts alone.
    Softmax,
    /// Sigmoid of each score.
    Sigmoid,
    /// Sigmoid of each score. A bias of each expert is added for the choice, but not to its weight.
    BiasedSigmoid,
}

impl Experts {
    pub const NONE: Self = Self {
        count: 0,
        used: 0,
        dim: 0,
        shared_dim: 0,
        own_norms: false,
        router: Router::Softmax,
        renormalised: false,
        scale: 1.0,
        limit: 0.0,
    };
}

/// Reads the sizes of experts, and which layers of a model of this `width` have them.
pub(super) fn read_experts(
    f: &Fields<'_>,
    arch: Arch,
    (layers, width): (usize, usize),
) -> Result<(Experts, Vec<bool>), ConfigError> {
    let is_on = arch != Arch::Gemma4 || f.read_bool("enable_moe_block", false)?;
    let Some(default) = arch.family().experts.filter(|_| is_on) else {
        return Ok((Experts::NONE, vec![false; layers]));
    };
    for field in ["n_group", "topk_group"] {
        if f.get(field).is_some_and(|groups| groups.as_u64() != Some(1)) {
            return f.unsupported(field, "1, or no such field: experts are not chosen by groups");
        }
    }
    let or_required = |size: usize| (size > 0).then_some(size);
    let field = arch.field_name("num_experts");
    if arch == Arch::GraniteMoeHybrid && f.read_count(field, default.count, MAX_EXPERTS)? == 0 {
        return Ok((Experts::NONE, vec![false; layers]));
    }
    let count = f.read_size(field, or_required(default.count), MAX_EXPERTS)?;
    let used = f.read_size(arch.field_name("num_experts_per_tok"), or_required(default.used), count)?;
    let width_field = arch.field_name("moe_intermediate_size");
    let dim = f.read_size(width_field, or_required(default.dim), MAX_DIM)?;
    let mut experts = Experts { count, used, dim, ..default };
    // The rows of an expert are whole groups of sixteen of a matrix of all.
    if !dim.is_multiple_of(32) {
        return f.unsupported(width_field, "a multiple of 32");
    }
    if !width.is_multiple_of(16) {
        return f.unsupported("hidden_size", "a multiple of 16");
    }
    if default.own_norms {
        experts.shared_dim = f.read_size("intermediate_size", None, MAX_DIM)?;
        if f.read_bool("use_double_wide_mlp", false)? {
            return f.unsupported("use_double_wide_mlp", "false, in a model with experts");
        }
    } else if default.shared_dim > 0 {
        let field = arch.field_name("shared_expert_intermediate_size");
        experts.shared_dim = f.read_size(field, Some(default.shared_dim), MAX_DIM)?;
    }
    if default.limit > 0.0 {
        experts.limit = f.read_float("swiglu_limit", Some(default.limit))?;
    }
    experts.renormalised = f.read_bool("norm_topk_prob", default.renormalised)?;
    let has_experts = match arch {
        Arch::Lfm2Moe => {
            experts.scale = f.read_float("routed_scaling_factor", Some(1.0))?;
            if !f.read_bool("use_expert_bias", true)? {
                experts.router = Router::Sigmoid;
            }
            let dense = f.read_count("num_dense_layers", 2, layers)?;
            (0..layers).map(|layer| layer >= dense).collect()
        }
        _ => read_sparse_layers(f, layers)?,
    };
    Ok((experts, has_experts))
}

/// Reads which layers have experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`.
fn read_sparse_layers(f: &Fields<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let step = f.read_size("decoder_sparse_step", Some(1), 1 << 16)?;
    let mut sparse: Vec<bool> = (1..=layers).map(|layer| layer.is_multiple_of(step)).collect();
    let dense = f.get("mlp_only_layers").and_then(Value::as_array);
    for index in dense.map_or(&[][..], |all| all) {
        match index.as_u64().and_then(|i| sparse.get_mut(i as usize)) {
            Some(layer) => *layer = false,
            None => return f.unsupported("mlp_only_layers", &format!("numbers of layers below {layers}")),
        }
    }
    Ok(sparse)
}
