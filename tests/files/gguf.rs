//! GGUF files of every format: each tensor's values are the reference's bits; odd but valid headers are read.
//!
//! `checksums.json` has SHA-256 sums of the values as little-endian f32, which ggml's own decoders gave. Files named
//! `.part.gguf` hold a few tensors of their model, and no vocabulary.

use crate::support::gguf::writer::{ARRAY, F32, Parts, STRING, U32, U64, array, info, pair, text};
use crate::support::paths;
use files::blocks::BlockType;
use files::source::gguf::Gguf;
use files::source::gguf::header::GgufHeader;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    paths::root().join("tests/fixtures/gguf")
}

fn json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Checks one tensor's type, shape and decoded values.
fn check(gguf: &Gguf, name: &str, (kind, shape, hash): (&str, &[usize], &str)) {
    let tensor = gguf.get_required(name).unwrap();
    assert_eq!((tensor.block.name().as_str(), &tensor.shape[..]), (kind, shape), "{name}");
    let values = tensor.to_f32();
    assert_eq!(values.len(), shape.iter().product::<usize>(), "{name}");
    let mut sum = Sha256::new();
    values.iter().for_each(|value| sum.update(value.to_le_bytes()));
    let found: String = sum.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(found, hash, "values of {name} in {}", gguf.path().display());
}

fn shape(json: &Value) -> Vec<usize> {
    json.as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize).collect()
}

#[test]
fn tensors_of_every_format_decode_to_the_reference_bits() {
    let mut kinds = BTreeSet::new();
    for (file, tensors) in json(&fixtures().join("checksums.json")).as_object().unwrap() {
        let gguf = Gguf::open(&fixtures().join(file)).unwrap();
        let tensors = tensors.as_object().unwrap();
        assert_eq!(gguf.tensors().count(), tensors.len(), "{file}");
        for (name, expected) in tensors {
            let (kind, hash) = (expected[0].as_str().unwrap(), expected[2].as_str().unwrap());
            check(&gguf, name, (kind, &shape(&expected[1]), hash));
            kinds.insert(kind.to_string());
        }
    }
    // Q5_1 has no file; its decoder is tested on blocks.
    let missing: Vec<String> =
        BlockType::ALL.iter().map(|b| b.name()).filter(|name| !kinds.contains(name)).collect();
    assert_eq!(missing, ["Q5_1"]);
}

/// More files, `*/manifest.json` and what it names, where `ANTIGRAVITY_GGUF_FIXTURES` says.
#[test]
fn tensors_of_further_files_decode_to_the_reference_bits() {
    let Some(place) = std::env::var_os("ANTIGRAVITY_GGUF_FIXTURES") else {
        eprintln!("skipped: ANTIGRAVITY_GGUF_FIXTURES names no directory");
        return;
    };
    let mut files = 0;
    for dir in fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()) {
        for file in json(&dir.join("manifest.json"))["files"].as_array().unwrap() {
            let gguf = Gguf::open(&dir.join(file["file"].as_str().unwrap())).unwrap();
            for tensor in file["tensors"].as_array().unwrap() {
                let field = |name: &str| tensor[name].as_str().unwrap();
                let expected = (field("type"), &shape(&tensor["shape"])[..], field("dequant_sha256"));
                check(&gguf, field("name"), expected);
            }
            files += 1;
        }
    }
    assert!(files > 0);
}

#[test]
fn metadata_is_read_by_type() {
    let gguf = Gguf::open(&fixtures().join("m1-llama32-bf16.Q4_0.gguf")).unwrap();
    let m = gguf.metadata();
    assert_eq!(m.get_str("general.architecture"), Ok(Some("llama")));
    assert_eq!(m.get_u64("llama.block_count"), Ok(Some(4)));
    assert_eq!(m.get("llama.rope.freq_base").and_then(|v| v.as_f64()), Some(500_000.0));
    assert_eq!(m.get("llama.attention.layer_norm_rms_epsilon").and_then(|v| v.as_f64()), Some(1e-5));
    let tokens = m.get_strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.get(0), tokens.get(352)), (352, Some("!"), None));
    assert_eq!(m.get_strings("tokenizer.ggml.merges").unwrap().unwrap().get(0), Some("h e"));
    assert_eq!(m.get_str("no.such.key"), Ok(None));
    assert!(m.get_str("tokenizer.chat_template").unwrap().unwrap().contains("bos_token"));
    let error = m.get_str("llama.block_count").unwrap_err();
    assert_eq!(error, "metadata \"llama.block_count\" is 4; supported: a string");
    assert!(m.get_u64("tokenizer.ggml.tokens").unwrap_err().contains("an array of 352 values"));
    assert!(m.get_bool("general.name").is_err());
}

#[test]
fn shapes_are_row_major_and_files_have_ids() {
    let gguf = Gguf::open(&fixtures().join("m1-llama32-bf16.Q4_0.gguf")).unwrap();
    let down = gguf.get_required("blk.0.ffn_down.weight").unwrap();
    assert_eq!((&down.shape[..], down.data.bytes().len()), (&[64, 160][..], 64 * down.block.row_bytes(160)));
    let other = Gguf::open(&fixtures().join("m4-qwen2-bf16.Q4_1.gguf")).unwrap();
    assert!(gguf.fingerprint().len() == 32 && gguf.fingerprint() != other.fingerprint());
    let missing = gguf.get_required("blk.9.ffn_down.weight").unwrap_err().to_string();
    assert!(missing.contains("blk.9") && missing.contains("Q4_0.gguf"), "{missing}");
}

#[test]
fn a_header_that_is_cut_is_refused() {
    let file = fs::read(fixtures().join("m4-qwen2-bf16.Q8_0.gguf")).unwrap();
    let whole = GgufHeader::parse(&file).unwrap();
    assert!(GgufHeader::parse(&file[..whole.len - 1]).is_err());
}

fn parse(parts: &Parts) -> GgufHeader {
    let bytes = parts.bytes();
    GgufHeader::parse(&bytes).unwrap()
}

#[test]
fn odd_but_valid_headers_are_read() {
    let empty = parse(&Parts::default());
    assert_eq!((empty.version, empty.tensors.len(), empty.len), (3, 0, 24));
    assert_eq!(parse(&Parts { version: 2, ..Parts::default() }).version, 2);

    // Not in the order of names, with and without padding after the last.
    for bytes in [32 + 36, 32 + 64] {
        let two = Parts::default().info(info("b", &[8], 0, 0)).info(info("a", &[32, 2], 2, 32));
        let odd = parse(&two.data(bytes));
        let data = odd.len.next_multiple_of(32);
        assert_eq!(odd.tensors["b"].range, data..data + 32);
        assert_eq!(odd.tensors["a"].range, data + 32..data + 68);
        assert_eq!(odd.tensors["a"].shape, [2, 32]);
    }

    for (kind, value) in [(U32, 64u32.to_le_bytes().to_vec()), (U64, 8u64.to_le_bytes().to_vec())] {
        let alignment = value[0] as usize;
        let parts = Parts { alignment, ..Parts::default() }
            .pair(pair("general.alignment", kind, &value))
            .info(info("a", &[1], 0, 0))
            .info(info("b", &[1], 0, alignment as u64))
            .data(alignment + 4);
        let header = parse(&parts);
        assert_eq!(header.tensors["b"].range.start % alignment, 0);
        assert_eq!(header.tensors["b"].range.end, parts.bytes().len());
    }

    let metadata = parse(
        &Parts::default()
            .pair(pair("e", ARRAY, array(F32, 0, [])))
            .pair(pair("s", ARRAY, array(STRING, 2, [text("x"), text("")].concat())))
            .pair(pair("é", STRING, text("ü"))),
    )
    .metadata;
    assert_eq!(metadata.get_str("é"), Ok(Some("ü")));
    assert_eq!(metadata.get_strings("s").unwrap().unwrap().iter().collect::<Vec<_>>(), ["x", ""]);
    assert_eq!(metadata.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["e", "s", "é"]);
}
