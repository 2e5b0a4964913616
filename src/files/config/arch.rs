//! Model families.
//!
//! A family that needs no new switch is an [`Arch`], its row in [`Arch::family`], and its names in GGUF files
//! (`files::source::gguf::names`).

use super::families::*;

/// The model families that this program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    Mistral,
    Ministral3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen35,
    Qwen35Moe,
    SmolLm3,
    Phi3,
    Granite,
    GraniteMoeHybrid,
    Gemma3,
    Gemma4,
    Gpt2,
    Ernie45,
    HunyuanDense,
    Olmo2,
    Olmo3,
    Exaone4,
    Lfm2,
    Lfm2Moe,
    Lfm3,
    GptOss,
    FalconH1,
    NemotronH,
}

impl Arch {
    pub const ALL: [Arch; 26] = [
        Arch::Llama,
        Arch::Mistral,
        Arch::Ministral3,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::Qwen3Moe,
        Arch::Qwen35,
        Arch::Qwen35Moe,
        Arch::SmolLm3,
        Arch::Phi3,
        Arch::Granite,
        Arch::GraniteMoeHybrid,
        Arch::Gemma3,
        Arch::Gemma4,
        Arch::Gpt2,
        Arch::Ernie45,
        Arch::HunyuanDense,
        Arch::Olmo2,
        Arch::Olmo3,
        Arch::Exaone4,
        Arch::Lfm2,
        Arch::Lfm2Moe,
        Arch::Lfm3,
        Arch::GptOss,
        Arch::FalconH1,
        Arch::NemotronH,
    ];

    /// The family's row.
    pub const fn family(self) -> Family {
        match self {
            Arch::Llama => LLAMA,
            Arch::Mistral => MISTRAL,
            Arch::Ministral3 => MINISTRAL_3,
            Arch::Qwen2 => QWEN_2,
            Arch::Qwen3 => QWEN_3,
            Arch::Qwen3Moe => QWEN_3_MOE,
            Arch::Qwen35 => QWEN_3_5,
            Arch::Qwen35Moe => QWEN_3_5_MOE,
            Arch::SmolLm3 => SMOLLM_3,
            Arch::Phi3 => PHI_3,
            Arch::Granite => GRANITE,
            Arch::GraniteMoeHybrid => GRANITE_MOE_HYBRID,
            Arch::Gemma3 => GEMMA_3,
            Arch::Gemma4 => GEMMA_4,
            Arch::Gpt2 => GPT_2,
            Arch::Ernie45 => ERNIE_4_5,
            Arch::HunyuanDense => HUNYUAN_DENSE,
            Arch::Olmo2 => OLMO_2,
            Arch::Olmo3 => OLMO_3,
            Arch::Exaone4 => EXAONE_4,
            Arch::Lfm2 => LFM_2,
            Arch::Lfm2Moe => LFM_2_MOE,
            Arch::Lfm3 => LFM_3,
            Arch::GptOss => GPT_OSS,
            Arch::FalconH1 => FALCON_H1,
            Arch::NemotronH => NEMOTRON_H,
        }
    }

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.family().model_type
    }

    /// The `model_type` of the family whose files this one's are like, where only names differ.
    pub(super) fn compatible_name(self) -> &'static str {
        match self {
            Arch::Mistral => Arch::Llama.name(),
            Arch::Olmo3 => Arch::Olmo2.name(),
            arch => arch.name(),
        }
    }

    /// Translates the engine's name of a tensor, or a part of it, to a checkpoint's.
    pub fn checkpoint_name(self, name: &str) -> String {
        self.family().tensor_names.iter().fold(name.into(), |name, (from, to)| name.replace(from, to))
    }

    /// True for Qwen 3.5, with or without experts.
    pub const fn is_qwen35(self) -> bool {
        matches!(self, Arch::Qwen35 | Arch::Qwen35Moe)
    }

    /// True for LFM2, with or without experts.
    pub(crate) fn is_lfm2(self) -> bool {
        matches!(self, Arch::Lfm2 | Arch::Lfm2Moe)
    }

    /// True if the RoPE of sliding-window layers is another than that of full-attention layers.
    pub(super) fn has_local_rope(self) -> bool {
        matches!(self, Arch::Gemma3 | Arch::Gemma4 | Arch::Lfm3 | Arch::Olmo3)
    }

    /// The `general.architecture` of a GGUF file.
    pub fn gguf_name(self) -> &'static str {
        self.family().gguf_name
    }

    /// Lists the names of all families for errors.
    pub fn list_names(name: impl Fn(Arch) -> &'static str) -> String {
        let mut names = Self::ALL.map(|arch| format!("{:?}", name(arch))).to_vec();
        names.dedup();
        names.join(", ")
    }

    /// Translates a field name of Llama's config to this family's.
    pub(crate) fn field_name(self, name: &'static str) -> &'static str {
        match (self, name) {
            (_, "rms_norm_eps") => self.epsilon_field(),
            (Arch::Gpt2, "hidden_size") => "n_embd",
            (Arch::Gpt2, "num_attention_heads") => "n_head",
            (Arch::Gpt2, "num_hidden_layers") => "n_layer",
            (Arch::Gpt2, "intermediate_size") => "n_inner",
            (Arch::Gpt2, "max_position_embeddings") => "n_positions",
            (Arch::Gemma4, "num_experts_per_tok") => "top_k_experts",
            (Arch::GptOss | Arch::GraniteMoeHybrid, "num_experts") => "num_local_experts",
            (Arch::GptOss | Arch::GraniteMoeHybrid, "moe_intermediate_size") => "intermediate_size",
            (Arch::GraniteMoeHybrid, "intermediate_size" | "shared_expert_intermediate_size") => {
                "shared_intermediate_size"
            }
            (Arch::NemotronH, "mamba_n_heads") => "mamba_num_heads",
            (Arch::NemotronH, "mamba_d_head") => "mamba_head_dim",
            (Arch::NemotronH, "mamba_d_state") => "ssm_state_size",
            (Arch::NemotronH, "mamba_n_groups") => "n_groups",
            (Arch::NemotronH, "mamba_d_conv") => "conv_kernel",
            (Arch::NemotronH, "mamba_conv_bias") => "use_conv_bias",
            _ => name,
        }
    }

    /// Name of the field with the epsilon of norms.
    pub(crate) fn epsilon_field(self) -> &'static str {
        self.family().epsilon_field
    }
}
