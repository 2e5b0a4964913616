//! Parts of a layer in which families differ.

/// The normalisation of a layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// By the root mean square.
    Rms,
    /// By mean and variance, with a bias: LayerNorm.
    Layer,
}

/// The feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate) * up)`
    SwiGlu,
    /// `down(gelu(gate) * up)`, GELU by the tanh formula.
    GeGlu,
    /// `down(gelu(up))`, with biases.
    Gelu,
    /// `down(max(up, 0)^2)`
    SquaredRelu,
    /// `down(gate * sigmoid(1.702 gate) * (up + 1))` with gate and up clamped, and with biases: of experts.
    ClampedSwiGlu,
}

/// The norm of queries and keys, by the root mean square.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head, before RoPE.
    PerHead,
    /// Each head, after RoPE.
    AfterRope,
    /// All heads together, before RoPE.
    Whole,
}

/// The norm of Mamba2's output, of each group of heads by the root mean square.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MambaNorm {
    #[default]
    None,
    /// Of the gated output.
    AfterGate,
    /// Of the output before it is gated.
    BeforeGate,
}

/// The gate of attention's output: a sigmoid of a projection of the layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionGate {
    None,
    /// A factor for each head.
    PerHead,
    /// A factor for each element.
    PerElement,
}
