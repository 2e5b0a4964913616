//! A synthetic model as a GGUF file: random blocks, with scales that give weights of a usual size.

use super::shapes::{self, Fill, Tensor};
use super::tokenizer::{self, TokenConfig};
use super::{Content, FilePlan, TensorData};
use crate::error::{Error, Result};
use files::blocks::BlockType;
use files::config::{Arch, Experts, LayerKind, ModelConfig, RopeScaling, Router};
use files::source::gguf::names::{ROPE_FREQS, to_gguf_name};

/// Mixes of block types, named as in llama.cpp: the type of most matrices, and of the more important ones.
pub(super) const MIXES: [(&str, BlockType, BlockType); 7] = [
    ("q4_0", BlockType::Q4_0, BlockType::Q4_0),
    ("q8_0", BlockType::Q8_0, BlockType::Q8_0),
    ("q4_k", BlockType::Q4_K, BlockType::Q6_K),
    ("q5_k", BlockType::Q5_K, BlockType::Q6_K),
    ("q6_k", BlockType::Q6_K, BlockType::Q6_K),
    ("iq4_nl", BlockType::IQ4_NL, BlockType::IQ4_NL),
    ("iq4_xs", BlockType::IQ4_XS, BlockType::Q6_K),
];
const ALIGNMENT: usize = 32;
/// Types of metadata values.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A GGUF file of the model, its matrices in the block types of `mix`.
pub(super) fn plan_file(config: &TokenConfig, model: &ModelConfig, mix: &str) -> Result<FilePlan> {
    let Some((_, most, better)) = MIXES.iter().find(|(name, ..)| *name == mix) else {
        let names = MIXES.map(|(name, ..)| name).join(", ");
        return Err(Error::Usage(format!("--gguf {mix}: use one of {names}")));
    };
    use Arch::{Gemma3, Gemma4, Lfm2, Lfm2Moe, Llama, Qwen2, Qwen3, Qwen3Moe, Qwen35};
    let known = [Llama, Qwen2, Qwen3, Qwen3Moe, Qwen35, Gemma3, Gemma4, Lfm2, Lfm2Moe];
    if !known.contains(&model.arch) || model.experts.own_norms {
        let what = if model.experts.own_norms { " with experts" } else { "" };
        let text = format!("--gguf {mix}: not available for {} models{what}", model.arch.name());
        return Err(Error::Usage(text));
    }
    let mut metadata = Metadata::default();
    metadata.write_model(config, model)?;
    let divisors = rope_divisors(model);
    let mut infos = Vec::new();
    if let Some(divisors) = &divisors {
        infos.push((ROPE_FREQS.to_string(), vec![divisors.len()], BlockType::F32, None));
    }
    for tensor in shapes::tensors(model).into_iter().filter_map(|tensor| join_experts(model, tensor)) {
        // As in llama.cpp's mixes: values, the second FFN matrix, embedding and head.
        let better_parts = ["embed_tokens", "lm_head", "v_proj", "down_proj", ".w2."];
        let matters = better_parts.iter().any(|part| tensor.name.contains(part));
        let (block, shape) = match (&tensor.shape[..], matters) {
            (&[channels, 1, taps], _) => (BlockType::F32, vec![channels, taps]),
            ([_], _) => (BlockType::F32, tensor.shape),
            _ if ["mlp.gate.weight", "feed_forward.gate.weight"].iter().any(|n| tensor.name.ends_with(n)) => {
                (BlockType::F32, tensor.shape)
            }
            (_, true) => (*better, tensor.shape),
            (_, false) => (*most, tensor.shape),
        };
        let cols = shape.last().copied().unwrap_or(0);
        if !cols.is_multiple_of(block.values_per_block()) {
            let text =
                format!("{} has rows of {cols} values, not a multiple of a {block:?} block", tensor.name);
            return Err(Error::Failed(text));
        }
        let name = to_gguf_name(model.arch, &tensor.name).unwrap_or_else(|| tensor.name.clone());
        infos.push((name, shape, block, Some(tensor.fill)));
    }
    Ok(metadata.finish(infos, divisors.unwrap_or_default()))
}

/// One tensor for all experts in place of the first one's; `None` for the others'.
fn join_experts(model: &ModelConfig, tensor: Tensor) -> Option<Tensor> {
    let Some((before, rest)) = tensor.name.split_once(".experts.") else { return Some(tensor) };
    let (_, part) = rest.split_once('.').filter(|(expert, _)| *expert == "0")?;
    let shape = [&[model.experts.count], &tensor.shape[..]].concat();
    Some(Tensor { name: format!("{before}.experts.{part}"), shape, fill: tensor.fill })
}

/// Divisors of RoPE's frequencies, if they are scaled.
fn rope_divisors(model: &ModelConfig) -> Option<Vec<f32>> {
    let divisor =
        |i: usize| (1.0 / model.rope.scaling.frequency_multiplier(i, model.rope.base_frequency(i))) as f32;
    (model.rope.scaling != RopeScaling::Unscaled).then(|| (0..model.head_dim / 2).map(divisor).collect())
}

/// Name, shape, block type and values of a tensor.
type TensorInfo = (String, Vec<usize>, BlockType, Option<Fill>);

/// The metadata of a GGUF file.
#[derive(Default)]
struct Metadata {
    pairs: Vec<u8>,
    count: u64,
}

impl Metadata {
    fn push_pair(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.pairs.extend(encode_string(key));
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.count += 1;
    }

    fn push_array(&mut self, key: &str, kind: u32, elements: &[Vec<u8>]) {
        let head = [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes()].concat();
        self.push_pair(key, ARRAY, &[head, elements.concat()].concat());
    }

    /// Writes the dimensions and the tokenizer.
    fn write_model(&mut self, config: &TokenConfig, m: &ModelConfig) -> Result<()> {
        let arch = m.arch.gguf_name();
        self.push_pair("general.architecture", STRING, &encode_string(arch));
        self.push_pair("general.name", STRING, &encode_string("synthetic"));
        self.write_layers(m);
        for (key, n) in [
            ("block_count", m.layers),
            ("embedding_length", m.dim),
            ("attention.head_count", m.heads),
            ("attention.key_length", m.head_dim),
            ("attention.value_length", m.head_dim),
            ("context_length", m.max_position),
            ("vocab_size", m.vocab),
        ] {
            self.push_pair(&format!("{arch}.{key}"), U32, &(n as u32).to_le_bytes());
        }
        let mut floats =
            vec![("attention.layer_norm_rms_epsilon", m.norm_eps), ("rope.freq_base", m.rope.theta)];
        if m.sliding_window > 0 {
            let window = (m.sliding_window as u32).to_le_bytes();
            self.push_pair(&format!("{arch}.attention.sliding_window"), U32, &window);
            floats.push(("rope.freq_base_swa", m.rope.local_theta));
        }
        for (key, x) in floats {
            self.push_pair(&format!("{arch}.{key}"), F32, &(x as f32).to_le_bytes());
        }
        let tokenizer = tokenizer::list_tokens(config)?;
        let pre = if arch == "llama" { "llama-bpe" } else { "qwen2" };
        self.push_pair("tokenizer.ggml.model", STRING, &encode_string("gpt2"));
        self.push_pair("tokenizer.ggml.pre", STRING, &encode_string(pre));
        let tokens: Vec<Vec<u8>> = tokenizer.tokens.iter().map(|(token, _)| encode_string(token)).collect();
        // Control tokens are of type 3, ordinary ones of type 1.
        let kinds: Vec<Vec<u8>> = tokenizer
            .tokens
            .iter()
            .map(|(_, special)| if *special { 3i32 } else { 1 }.to_le_bytes().into())
            .collect();
        self.push_array("tokenizer.ggml.tokens", STRING, &tokens);
        self.push_array("tokenizer.ggml.token_type", 5, &kinds);
        self.push_array("tokenizer.ggml.merges", STRING, &[]);
        for (key, id) in [("bos_token_id", tokenizer.bos), ("eos_token_id", tokenizer.eos)] {
            if let Some(id) = id {
                self.push_pair(&format!("tokenizer.ggml.{key}"), U32, &id.to_le_bytes());
            }
        }
        Ok(())
    }

    /// Writes the sizes of layers, which may differ.
    fn write_layers(&mut self, m: &ModelConfig) {
        let arch = m.arch.gguf_name();
        let ints =
            |all: Vec<usize>| all.into_iter().map(|n| (n as u32).to_le_bytes().into()).collect::<Vec<_>>();
        let widths: Vec<usize> = (0..m.layers)
            .map(|l| if l < m.layers - m.shared_kv_layers { m.ffn_dim } else { m.shared_ffn_dim })
            .collect();
        let is_conv = |kind: &LayerKind| *kind == LayerKind::ShortConv;
        let heads = m.layer_kinds.iter().map(|kind| if is_conv(kind) { 0 } else { m.kv_heads }).collect();
        for (key, all) in [("feed_forward_length", widths), ("attention.head_count_kv", heads)] {
            let key = format!("{arch}.{key}");
            if all.iter().all(|n| *n == all[0]) {
                self.push_pair(&key, U32, &(all[0] as u32).to_le_bytes());
            } else {
                self.push_array(&key, U32, &ints(all));
            }
        }
        let delta = &m.delta_net;
        let sizes: &[(&str, usize)] = match m.arch {
            Arch::Lfm2 | Arch::Lfm2Moe => &[("shortconv.l_cache", m.conv_taps)],
            Arch::Qwen35 => &[
                ("ssm.conv_kernel", m.conv_taps),
                ("ssm.state_size", delta.key_dim),
                ("ssm.group_count", delta.key_heads),
                ("ssm.time_step_rank", delta.value_heads),
                ("ssm.inner_size", delta.value_heads * delta.value_dim),
                ("rope.dimension_count", m.rope.dim),
            ],
            Arch::Gemma4 => &[
                ("attention.shared_kv_layers", m.shared_kv_layers),
                ("embedding_length_per_layer_input", m.per_layer_dim),
                ("attention.key_length_swa", m.local_head_dim),
                ("attention.value_length_swa", m.local_head_dim),
                ("rope.dimension_count", m.rope.dim),
                ("rope.dimension_count_swa", m.rope.local_dim),
            ],
            _ => &[],
        };
        let experts: &[(&str, usize)] = match m.experts {
            Experts { count: 0, .. } => &[],
            Experts { count, used, dim, router, .. } => &[
                ("expert_count", count),
                ("expert_used_count", used),
                ("expert_feed_forward_length", dim),
                ("expert_gating_func", if router == Router::Softmax { 1 } else { 2 }),
                ("leading_dense_block_count", m.expert_layers.iter().filter(|has| !**has).count()),
            ],
        };
        for (key, n) in sizes.iter().chain(experts) {
            self.push_pair(&format!("{arch}.{key}"), U32, &(*n as u32).to_le_bytes());
        }
        self.write_layer_kinds(m);
    }

    /// Writes the kinds of layers, and what goes with them.
    fn write_layer_kinds(&mut self, m: &ModelConfig) {
        let arch = m.arch.gguf_name();
        if m.arch == Arch::Qwen35 {
            let recurrent = m.layer_kinds.iter().map(|kind| vec![u8::from(*kind == LayerKind::DeltaNet)]);
            self.push_array(
                &format!("{arch}.attention.recurrent_layers"),
                BOOL,
                &recurrent.collect::<Vec<_>>(),
            );
            // A text has one position in each of them.
            let sections = [m.rope.dim / 2, 0, 0, 0].map(|n| (n as u32).to_le_bytes().to_vec());
            self.push_array(&format!("{arch}.rope.dimension_sections"), I32, &sections);
        }
        if m.arch == Arch::Gemma4 {
            let sliding = m.layer_kinds.iter().map(|kind| vec![u8::from(*kind == LayerKind::SlidingWindow)]);
            self.push_array(
                &format!("{arch}.attention.sliding_window_pattern"),
                BOOL,
                &sliding.collect::<Vec<_>>(),
            );
            let cap = (m.logit_softcap as f32).to_le_bytes();
            self.push_pair(&format!("{arch}.final_logit_softcapping"), F32, &cap);
        }
    }

    fn finish(self, infos: Vec<TensorInfo>, divisors: Vec<f32>) -> FilePlan {
        let mut head = b"GGUF".to_vec();
        head.extend(3u32.to_le_bytes());
        head.extend((infos.len() as u64).to_le_bytes());
        head.extend(self.count.to_le_bytes());
        head.extend(self.pairs);
        let mut offset = 0usize;
        let mut parts = Vec::new();
        for (name, shape, block, fill) in infos {
            head.extend(encode_string(&name));
            head.extend((shape.len() as u32).to_le_bytes());
            shape.iter().rev().for_each(|dim| head.extend((*dim as u64).to_le_bytes()));
            head.extend(block.id().to_le_bytes());
            head.extend((offset as u64).to_le_bytes());
            let units = shape.iter().product::<usize>() / block.values_per_block();
            let content = match fill {
                None => Content::Given(divisors.iter().flat_map(|x| x.to_le_bytes()).collect()),
                Some(fill) if block == BlockType::F32 => Content::F32(fill),
                Some(_) => Content::Blocks(block),
            };
            parts.push(TensorData { content, units, offset: offset as u64 });
            offset += (units * block.bytes_per_block()).next_multiple_of(ALIGNMENT);
        }
        head.resize(head.len().next_multiple_of(ALIGNMENT), 0);
        parts.iter_mut().for_each(|part| part.offset += head.len() as u64);
        let len = (head.len() + offset) as u64;
        FilePlan { head, parts, len }
    }
}

/// A string with its length, as GGUF stores it.
fn encode_string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Writes the f16 scales of a random block so that the deviation of its values is `STD`. The integers are uniform, in
/// K-quants the sub-block scales too, and the minimum is about the mean of scale times integer.
pub(super) fn set_scales(block: BlockType, bytes: &mut [u8]) {
    // f16: 0.0043; 2.7e-4; 9.0e-5 and 6.7e-4; 4.5e-5 and 7.0e-4; 1.5e-5; 3.0e-04; 1.6e-05.
    let scales: &[(usize, u16)] = match block {
        BlockType::Q4_0 => &[(0, 0x1c67)],
        BlockType::Q8_0 => &[(0, 0x0c6c)],
        BlockType::Q4_K => &[(0, 0x05e6), (2, 0x1188)],
        BlockType::Q5_K => &[(0, 0x02f3), (2, 0x11b7)],
        BlockType::Q6_K => &[(208, 0x00fc)],
        BlockType::IQ4_NL => &[(0, 0x0cdc)],
        BlockType::IQ4_XS => &[(0, 0x010d)],
        _ => unreachable!("invariant: no mix has it"),
    };
    for (at, bits) in scales {
        bytes[*at..at + 2].copy_from_slice(&bits.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{build, json};
    use files::source::gguf::Gguf;

    #[test]
    fn a_file_of_experts_has_the_config_that_it_was_made_from() {
        for name in ["m21-lfm2moe-bf16", "m23-qwen3moe-bf16"] {
            let config = build::model_dir(name).unwrap().join("config.json");
            let text = std::fs::read_to_string(&config).unwrap();
            // Qwen's files do not say it: llama.cpp always does it.
            let text = text.replace("\"norm_topk_prob\": false", "\"norm_topk_prob\": true");
            let model = ModelConfig::parse(&text).unwrap();
            let plan = plan_file(&json::read(&config).unwrap(), &model, "q8_0").unwrap();
            let file = std::env::temp_dir().join(format!("xtask-{name}-{}.gguf", std::process::id()));
            super::super::write_file(&file, &plan, 1).unwrap();
            let gguf = Gguf::open(&file).unwrap();
            std::fs::remove_file(&file).unwrap();
            assert_eq!(model.find_difference(&gguf.read_config().unwrap()), None, "{name}");
            let joined = gguf.tensors().filter(|t| t.name.ends_with("ffn_down_exps.weight")).count();
            assert_eq!(joined, model.expert_layers.iter().filter(|has| **has).count(), "{name}");
        }
    }
}
