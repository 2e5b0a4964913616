//! `cargo xtask synth`: a model of real shapes with random weights, to measure without a download. It is a BF16
//! checkpoint, or with `--gguf` a GGUF file with quantised blocks.
//!
//! All cores write the weights. Each chunk has a seed of its own, so the bytes do not depend on the number of threads.

mod gguf;
mod shapes;
mod tokenizer;

use crate::error::{AtPath, Error, Result};
use crate::{build, command, json, size};
use clap::Args;
use files::atomic_file::AtomicFile;
use files::blocks::BlockType;
use files::config::ModelConfig;
use shapes::{Fill, Tensor};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokenizer::TokenConfig;

/// Values in one unit of work: 4 MiB of bf16.
const CHUNK: usize = 1 << 21;
const STD: f32 = 0.02;

#[derive(Args)]
pub struct SynthArgs {
    /// The model whose shapes to use, e.g. llama3.2-1b
    model: String,
    /// The folder to write [default: target/synth/MODEL]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of the random weights
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Write a GGUF file with these block types, e.g. q4_k
    #[arg(long, value_name = "TYPES")]
    gguf: Option<String>,
}

pub fn run(args: &SynthArgs) -> Result<()> {
    let model = build::model_dir(&args.model)?;
    let name = model.file_name().unwrap_or_default().to_string_lossy();
    let mix = args.gguf.as_ref().map_or(String::new(), |mix| format!("-{mix}"));
    let default = || build::target_dir().join("synth").join(format!("{name}{mix}"));
    let out = args.out.clone().unwrap_or_else(default);
    if fs::canonicalize(&out).is_ok_and(|out| out == model) {
        return Err(Error::Usage(format!("--out {} is the model itself", out.display())));
    }

    let written = write(&model, args.gguf.as_deref(), &out, args.seed)?;
    println!("{}", written.display());
    let run = format!("ANTIGRAVITY_MODEL={} cargo run --release -- bench", command::quote_path(&written));
    command::print_next_step("its speed", &run);
    Ok(())
}

/// Writes a model with the shapes of the `config.json` in `model`: a GGUF file in the block types of `mix`, or a BF16
/// checkpoint. Returns the path for `--model`.
pub fn write(model: &Path, mix: Option<&str>, out: &Path, seed: u64) -> Result<PathBuf> {
    let source = model.join("config.json");
    let config: serde_json::Value = json::read(&source)?;
    let shape = ModelConfig::parse(&config.to_string()).at(&source)?;
    let tokens: TokenConfig = json::read(&source)?;
    fs::create_dir_all(out).at(out)?;
    let start = std::time::Instant::now();
    let (file, plan) = match mix {
        Some(mix) => (out.join("model.gguf"), gguf::plan_file(&tokens, &shape, mix)?),
        None => {
            json::write(&out.join("config.json"), &config)?;
            write_texts(out, &tokens)?;
            (out.join("model.safetensors"), safetensors(&shapes::tensors(&shape)))
        }
    };
    write_file(&file, &plan, seed)?;
    let seconds = start.elapsed().as_secs_f64();
    eprintln!("{} tensors, {} in {seconds:.1} s", plan.parts.len(), size::megabytes(plan.len));
    Ok(if mix.is_some() { file } else { out.into() })
}

/// Writes the files beside the weights of a checkpoint.
fn write_texts(out: &Path, config: &TokenConfig) -> Result<()> {
    json::write(&out.join("generation_config.json"), &tokenizer::generation_config(config))?;
    json::write(&out.join("tokenizer_config.json"), &tokenizer::tokenizer_config(config)?)?;
    json::write(&out.join("tokenizer.json"), &tokenizer::tokenizer(config)?)
}

/// A file to write: its header, and the tensors after it.
struct FilePlan {
    head: Vec<u8>,
    parts: Vec<TensorData>,
    /// Length of the file in bytes.
    len: u64,
}

/// One tensor's data.
struct TensorData {
    content: Content,
    /// Number of values or blocks.
    units: usize,
    /// Position in the file, in bytes.
    offset: u64,
}

/// The values of a tensor.
#[derive(Clone)]
enum Content {
    Bf16(Fill),
    F32(Fill),
    Blocks(BlockType),
    /// The bytes themselves.
    Given(Vec<u8>),
}

impl Content {
    /// Bytes of one value or block, and the number of its values.
    fn unit(&self) -> (usize, usize) {
        match self {
            Content::Bf16(_) => (2, 1),
            Content::F32(_) | Content::Given(_) => (4, 1),
            Content::Blocks(block) => (block.bytes_per_block(), block.values_per_block()),
        }
    }
}

/// A safetensors file of these tensors: the length of the JSON, the JSON padded with spaces to a multiple of 8, the
/// data.
fn safetensors(tensors: &[Tensor]) -> FilePlan {
    let mut entries = serde_json::Map::new();
    entries.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    let (mut parts, mut end) = (Vec::new(), 0);
    for tensor in tensors {
        let begin = end;
        end += 2 * tensor.len() as u64;
        let entry = serde_json::json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]});
        entries.insert(tensor.name.clone(), entry);
        parts.push(TensorData { content: Content::Bf16(tensor.fill), units: tensor.len(), offset: begin });
    }
    let mut text = serde_json::Value::Object(entries).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let head = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
    parts.iter_mut().for_each(|part| part.offset += head.len() as u64);
    FilePlan { len: head.len() as u64 + end, head, parts }
}

/// Writes a file atomically.
fn write_file(file: &Path, plan: &FilePlan, seed: u64) -> Result<()> {
    let write = || {
        let unfinished = AtomicFile::create(file)?;
        unfinished.file.set_len(plan.len)?;
        unfinished.file.write_all_at(&plan.head, 0)?;
        write_chunks(&unfinished.file, &plan.parts, seed)?;
        unfinished.commit()
    };
    write().at(file)
}

/// One unit of work.
struct Chunk<'a> {
    content: &'a Content,
    seed: u64,
    /// Position in the file, in bytes.
    offset: u64,
    units: usize,
}

fn split_chunks(parts: &[TensorData], seed: u64) -> Vec<Chunk<'_>> {
    let mut chunks = Vec::new();
    let mut seeds = Random(seed);
    for TensorData { content, units, offset } in parts {
        let (bytes, values) = content.unit();
        let (mut offset, mut left) = (*offset, *units);
        while left > 0 {
            let units = left.min(CHUNK / values);
            chunks.push(Chunk { content, seed: seeds.next(), offset, units });
            offset += (bytes * units) as u64;
            left -= units;
        }
    }
    chunks
}

fn write_chunks(out: &File, parts: &[TensorData], seed: u64) -> std::io::Result<()> {
    let chunks = split_chunks(parts, seed);
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            bytes.clear();
            fill_chunk(chunk, &mut bytes);
            out.write_all_at(&bytes, chunk.offset)?;
        }
        Ok(())
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|w| w.join().expect("a worker does not panic"))
    })
}

/// Appends the random bytes of a chunk.
fn fill_chunk(chunk: &Chunk<'_>, bytes: &mut Vec<u8>) {
    let mut random = Random(chunk.seed);
    let mut value = |fill: Fill| match fill {
        Fill::Weights => STD * random.normal(),
        Fill::Norm => 1.0 + STD * random.normal(),
    };
    match chunk.content {
        Content::Bf16(fill) => {
            (0..chunk.units).for_each(|_| bytes.extend(to_bf16(value(*fill)).to_le_bytes()))
        }
        Content::F32(fill) => (0..chunk.units).for_each(|_| bytes.extend(value(*fill).to_le_bytes())),
        Content::Blocks(block) => {
            let len = chunk.units * block.bytes_per_block();
            bytes.reserve(len + 8);
            while bytes.len() < len {
                bytes.extend(random.next().to_le_bytes());
            }
            bytes.truncate(len);
            bytes.chunks_exact_mut(block.bytes_per_block()).for_each(|bytes| gguf::set_scales(*block, bytes));
        }
        Content::Given(given) => bytes.extend(given),
    }
}

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A nearly normal number of mean 0 and variance 1: the sum of four uniform 16-bit numbers, of variance
    /// 4 * 65536^2 / 12.
    fn normal(&mut self) -> f32 {
        let x = self.next();
        let sum = (x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48);
        (sum as f32 - 2.0 * 65535.0) * (3f32.sqrt() / 65536.0)
    }
}

/// Rounds to bfloat16, ties to even. The values here are finite and far from overflow.
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], fill: Fill) -> Tensor {
        Tensor { name: name.into(), shape: shape.into(), fill }
    }

    #[test]
    fn the_header_is_a_safetensors_header() {
        let tensors = [tensor("b", &[3, 5], Fill::Weights), tensor("a", &[7], Fill::Norm)];
        let plan = safetensors(&tensors);
        let bytes = &plan.head;
        assert_eq!((plan.len - bytes.len() as u64, bytes.len() % 8), (44, 0));
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(length, bytes.len() - 8);
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..]).unwrap();
        assert_eq!(json["b"]["data_offsets"], serde_json::json!([0, 30]));
        assert_eq!(json["a"]["data_offsets"], serde_json::json!([30, 44]));
        assert_eq!(json["a"]["dtype"], "BF16");
        assert_eq!(json["b"]["shape"], serde_json::json!([3, 5]));
    }

    #[test]
    fn a_file_depends_on_its_seed_only() {
        let dir = std::env::temp_dir().join(format!("xtask-synth-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let tensors = [tensor("w", &[1000, 2500], Fill::Weights), tensor("n", &[64], Fill::Norm)];
        let write = |name: &str, seed| {
            let file = dir.join(name);
            let plan = safetensors(&tensors);
            write_file(&file, &plan, seed).unwrap();
            let bytes = fs::read(&file).unwrap();
            assert_eq!(bytes.len() as u64, plan.len);
            bytes
        };
        let (a, b, c) = (write("a", 1), write("b", 1), write("c", 2));
        fs::remove_dir_all(&dir).unwrap();
        assert!(a == b && a != c);
        let head = safetensors(&tensors).head;
        let value = |b: &[u8]| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16));
        let values: Vec<f64> = a[head.len()..].chunks_exact(2).map(value).collect();
        let (weights, norm) = values.split_at(2_500_000);
        let mean = weights.iter().sum::<f64>() / weights.len() as f64;
        let std = (weights.iter().map(|x| x * x).sum::<f64>() / weights.len() as f64).sqrt();
        assert!(mean.abs() < 1e-4 && (std - 0.02).abs() < 1e-4, "mean {mean}, std {std}");
        assert!(norm.iter().all(|x| (x - 1.0).abs() < 0.1));
        let rounded = [1.0, -2.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0].map(to_bf16);
        assert_eq!(rounded, [0x3f80, 0xc000, 0x3f80, 0x3f82], "to even");
    }
}
