//! Models that are well-formed files but wrong: one clear error each, no panic.

use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::model::weights::{Checkpoint, LoadOptions, WeightType, pack};
use antigravity::{Engine, EngineOptions, Error, GenerateOptions, dims};
use files::packed_file::PACKED_NAME;
use numeric::kv::{KvType, KvTypes};
use serde_json::{Map, Value, json};
use std::fs;

/// A copy of the bundled model that is removed at the end.
pub struct Model(pub TestDir);

impl Model {
    pub fn copy() -> Self {
        let temp = TestDir::new();
        for file in
            ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS]
        {
            fs::copy(paths::model().join(file), temp.file(file)).unwrap();
        }
        Self(temp)
    }

    /// A copy with a packed file instead of the checkpoint.
    pub fn packed() -> Self {
        let model = Self::copy();
        let source = Checkpoint::open(&model.0.0).unwrap();
        let config = fs::read_to_string(model.0.file("config.json")).unwrap();
        let options = LoadOptions::new(WeightType::Q4_0, 2);
        pack::write_packed(&source, &config, &model.0.file(PACKED_NAME), &options, None).unwrap();
        drop(source);
        fs::remove_file(model.0.file(WEIGHTS)).unwrap();
        model
    }

    /// Rewrites a safetensors file: `edit` gets its header and data.
    pub fn edit(&self, file: &str, edit: impl FnOnce(&mut Map<String, Value>, &mut Vec<u8>)) {
        let path = self.0.file(file);
        let bytes = fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let mut data = bytes[8 + n..].to_vec();
        edit(&mut header, &mut data);
        let header = serde_json::to_vec(&header).unwrap();
        let mut out = (header.len() as u64).to_le_bytes().to_vec();
        out.extend(header);
        out.extend(data);
        fs::write(path, out).unwrap();
    }

    pub fn load(&self, weights: WeightType) -> Result<(), Error> {
        let options = EngineOptions { weight_type: weights, threads: 1, ..EngineOptions::new(&self.0.0) };
        Engine::load(options).map(|_| ())
    }

    /// Loading fails with exit code 3 and one line that holds all of `words`.
    fn refused(&self, what: &str, words: &[&str]) {
        match self.load(WeightType::Q4_0) {
            Err(Error::Model(message)) => {
                assert!(!message.contains('\n'), "{what}: {message}");
                for word in words {
                    assert!(message.contains(word), "{what}: no {word:?} in: {message}");
                }
            }
            other => panic!("{what}: {other:?}"),
        }
    }
}

pub const WEIGHTS: &str = "model.safetensors";
const NORM: &str = "model.layers.3.input_layernorm.weight";
const GATE: &str = "model.layers.2.mlp.gate_proj.weight";

fn start(header: &Map<String, Value>, name: &str) -> usize {
    header[name]["data_offsets"][0].as_u64().unwrap() as usize
}

#[test]
fn the_copy_itself_loads_both_ways() {
    let model = Model::copy();
    model.load(WeightType::Q4_0).unwrap();
    model.load(WeightType::F32).unwrap();
    Model::packed().load(WeightType::Q4_0).unwrap();
}

#[test]
fn tensors_missing_or_of_the_wrong_kind_are_refused() {
    let model = Model::copy();
    let rename = |header: &mut Map<String, Value>, _: &mut Vec<u8>| {
        let t = header.remove(GATE).unwrap();
        header.insert("something.else".into(), t);
    };
    model.edit(WEIGHTS, rename);
    model.refused("missing", &[GATE, "missing"]);

    let model = Model::copy();
    model.edit(WEIGHTS, |h, _| h[GATE]["shape"].as_array_mut().unwrap().reverse());
    model.refused("transposed", &[WEIGHTS, GATE, "[256, 768]", "[768, 256]"]);

    let model = Model::copy();
    model.edit(WEIGHTS, |h, _| h[NORM]["shape"] = json!([1, 256]));
    model.refused("a norm with two dimensions", &[NORM, "[1, 256]", "[256]"]);

    let model = Model::copy();
    model.edit(WEIGHTS, |h, _| {
        h[GATE]["dtype"] = json!("U8");
        h[GATE]["shape"] = json!([768, 512]);
    });
    model.refused("bytes", &[GATE, "[768, 512]"]);

    let model = Model::copy();
    model.edit(WEIGHTS, |h, _| {
        h[GATE]["dtype"] = json!("I16");
    });
    model.refused("integers", &[GATE, "I16", "BF16"]);
}

#[test]
fn values_that_are_not_numbers_are_refused() {
    for (name, bits, word) in [
        (NORM, 0x7fc0u16, "NaN"),
        (NORM, 0xff80, "inf"),
        (GATE, 0x7fc0, "NaN"),
        (GATE, 0x7f80, "infinity"),
        (GATE, 0x4ae0, "too large"), // 7,340,032: its scale overflows f16
    ] {
        let model = Model::copy();
        model.edit(WEIGHTS, |h, data| {
            let at = start(h, name);
            data[at..at + 2].copy_from_slice(&bits.to_le_bytes());
        });
        model.refused(word, &[WEIGHTS, name, word]);
    }
}

#[test]
fn a_value_that_overflows_the_cache_is_told_from_broken_weights() {
    let model = Model::copy();
    model.edit(WEIGHTS, |header, data| {
        let name = "model.layers.3.self_attn.v_proj.weight";
        let range = start(header, name)..header[name]["data_offsets"][1].as_u64().unwrap() as usize;
        // 2^24 times as large.
        for half in data[range].as_chunks_mut::<2>().0.iter_mut().filter(|half| **half != [0; 2]) {
            *half = (u16::from_le_bytes(*half) + (24 << 7)).to_le_bytes();
        }
    });
    let generate = |kv: KvType| {
        let (weight_type, kv_types) = (WeightType::F32, KvTypes::same(kv));
        let options = EngineOptions { weight_type, kv_types, threads: 1, ..EngineOptions::new(&model.0.0) };
        let options =
            Engine::load(options).and_then(|engine| engine.generate("The cat", &GenerateOptions::default()));
        options.map_err(|e| (e.exit_code(), e.to_string()))
    };
    assert_eq!(generate(KvType::F32).map(drop), Ok(()));
    let (code, line) = generate(KvType::F16).expect_err("it overflows");
    assert!(code == 3 && line.contains("layer 3") && line.contains("type f16"), "{code} {line}");
    assert!(line.contains("`EngineOptions::kv_types` f32") && !line.contains("broken"), "{line}");
}

/// Zeros from `at` on, in bytes of the data; negative counts from the end.
fn lose(model: &Model, file: &str, at: isize) {
    model.edit(file, |_, data| {
        let at = if at < 0 { data.len() - at.unsigned_abs() } else { at.unsigned_abs() };
        data[at..].fill(0);
    });
}

#[test]
fn files_whose_end_is_missing_are_refused() {
    let words = ["is all zeros", "part of the file is missing", "download it again"];
    // In the middle of the last norm, of the last matrix, and far before.
    for (at, tensor) in [
        (-100, "model.norm.weight"),
        (-512, "model.norm.weight"),
        (-700, "model.norm.weight"),
        (-70_000, "model.layers.5.self_attn.q_proj.weight"),
        (3_000_000, "model.layers.0.self_attn.q_proj.weight"),
        (1_000_000, "model.embed_tokens.weight"),
        (0, "model.embed_tokens.weight"),
    ] {
        let model = Model::copy();
        lose(&model, WEIGHTS, at);
        let cut = matches!(at, -100 | -70_000 | 1_000_000);
        let words = if cut { ["ends in zeros, and so does", words[1], words[2]] } else { words };
        model.refused(&format!("from {at}"), &[&[tensor, WEIGHTS][..], &words].concat());
        assert!(model.load(WeightType::F32).is_err(), "as stored, from {at}");
    }
    for at in [-9_000, -40_000, 3_000_000, 0] {
        let model = Model::packed();
        lose(&model, PACKED_NAME, at);
        model.refused(&format!("packed, from {at}"), &[PACKED_NAME, "zeros", words[1], words[2]]);
    }
}

#[test]
fn a_matrix_that_ends_the_file_is_looked_at_and_a_padded_vocabulary_is_not_refused() {
    // The embedding, which is first in the file, comes last.
    let ends_with_embedding = || {
        let model = Model::copy();
        model.edit(WEIGHTS, |header, data| {
            let len = header["model.embed_tokens.weight"]["data_offsets"][1].as_u64().unwrap();
            let all = data.len() as u64;
            data.rotate_left(len as usize);
            for (name, entry) in header.iter_mut().filter(|(name, _)| *name != "__metadata__") {
                let shift = |n: &Value| {
                    let n = n.as_u64().unwrap();
                    json!(if name == "model.embed_tokens.weight" { n + all - len } else { n - len })
                };
                let offsets = entry["data_offsets"].as_array().unwrap().iter().map(shift).collect();
                entry["data_offsets"] = Value::Array(offsets);
            }
        });
        model
    };
    let row = (2 * dims::DIM) as isize;
    for padding in [0, 1, 100, dims::VOCAB as isize / 8] {
        let model = ends_with_embedding();
        if padding != 0 {
            lose(&model, WEIGHTS, -padding * row);
        }
        model.load(WeightType::Q4_0).unwrap();
        model.load(WeightType::F32).unwrap();
    }
    let model = ends_with_embedding();
    lose(&model, WEIGHTS, -(dims::VOCAB as isize / 4) * row);
    model.refused("a quarter", &["model.embed_tokens.weight", "ends in zeros", "download it again"]);
    // Rows in the middle are what they are.
    let model = Model::copy();
    model.edit(WEIGHTS, |h, data| {
        let at = start(h, GATE);
        data[at..at + 100 * 2 * dims::DIM].fill(0);
    });
    model.load(WeightType::Q4_0).unwrap();
}

#[test]
fn packed_files_that_are_wrong_are_refused() {
    let whole = Model::packed();
    let size = fs::metadata(whole.0.file(PACKED_NAME)).unwrap().len();
    for cut in [0, 7, 100, size / 2, size - 1] {
        let model = Model::packed();
        fs::File::options().write(true).open(model.0.file(PACKED_NAME)).unwrap().set_len(cut).unwrap();
        model.refused("truncated", &[PACKED_NAME]);
    }
    type Edit = fn(&mut Map<String, Value>, &mut Vec<u8>);
    let edits: [(&str, &[&str], Edit); 6] = [
        ("another layout", &["layout", "antigravity pack"], |h, _| {
            h["__metadata__"]["antigravity.layout"] = json!("99");
        }),
        ("no config", &["config", "antigravity pack"], |h, _| {
            h["__metadata__"].as_object_mut().unwrap().remove("config");
        }),
        ("another model", &["num_hidden_layers", "rebuild"], |h, _| {
            let config = h["__metadata__"]["config"].as_str().unwrap();
            h["__metadata__"]["config"] =
                json!(config.replace("\"num_hidden_layers\": 6", "\"num_hidden_layers\": 7"));
        }),
        ("broken types", &["dtypes"], |h, _| h["__metadata__"]["dtypes"] = json!("[")),
        ("a scale that is infinite", &[GATE, "scale"], |h, data| {
            let at = start(h, &format!("{GATE}.scales"));
            data[at..at + 2].copy_from_slice(&0x7c00u16.to_le_bytes());
        }),
        ("a tensor too few", &[GATE, "missing"], |h, _| {
            let t = h.remove(&format!("{GATE}.quants")).unwrap();
            h.insert("spare".into(), t);
        }),
    ];
    for (what, words, edit) in edits {
        let model = Model::packed();
        model.edit(PACKED_NAME, edit);
        model.refused(what, words);
    }
    assert!(matches!(whole.load(WeightType::F32), Err(Error::Usage(_))), "f32 from a packed file");
}

#[test]
fn configs_that_are_wrong_are_refused() {
    let config = fs::read_to_string(paths::model().join("config.json")).unwrap();
    let deep = format!("{}{}", "[".repeat(200_000), "]".repeat(200_000));
    let cases: Vec<(&str, String, &[&str])> = vec![
        (
            "other width",
            config.replace("\"hidden_size\": 256", "\"hidden_size\": 512"),
            &["hidden_size", "512", "256", "ANTIGRAVITY_MODEL="],
        ),
        ("other theta", config.replace("10000.0", "20000.0"), &["rope_theta", "20000", "10000"]),
        ("other family", config.replace("\"llama\"", "\"mamba\""), &["model_type", "mamba", "llama"]),
        (
            "heads",
            config.replace("\"num_key_value_heads\": 4", "\"num_key_value_heads\": 3"),
            &["num_key_value_heads", "3"],
        ),
        ("zero", config.replace("\"vocab_size\": 4096", "\"vocab_size\": 0"), &["vocab_size", "0"]),
        ("huge", config.replace("\"vocab_size\": 4096", "\"vocab_size\": 1e300"), &["vocab_size"]),
        ("negative", config.replace("\"hidden_size\": 256", "\"hidden_size\": -1"), &["hidden_size", "-1"]),
        ("text", config.replace("\"hidden_size\": 256", "\"hidden_size\": \"256\""), &["hidden_size"]),
        (
            "scaling",
            config.replace("\"rope_scaling\": null", "\"rope_scaling\": {\"rope_type\": \"dynamic\"}"),
            &["rope_scaling", "dynamic", "llama3"],
        ),
        ("not json", "{".into(), &["config.json"]),
        ("an array", "[]".into(), &["config.json", "object"]),
        ("nested", deep, &["config.json"]),
        ("empty", String::new(), &["config.json"]),
    ];
    for (what, text, words) in cases {
        let model = Model::copy();
        fs::write(model.0.file("config.json"), text).unwrap();
        model.refused(what, words);
    }
    let model = Model::copy();
    fs::remove_file(model.0.file("config.json")).unwrap();
    model.refused("no config", &["config.json"]);
    let model = Model::copy();
    fs::remove_file(model.0.file("config.json")).unwrap();
    fs::create_dir(model.0.file("config.json")).unwrap();
    model.refused("a directory", &["config.json", "regular file"]);
}

#[test]
fn tokenizers_that_do_not_fit_are_refused() {
    let model = Model::copy();
    let file = model.0.file("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    tokenizer["model"]["vocab"]["zzzzzz"] = json!(dims::VOCAB);
    fs::write(&file, tokenizer.to_string()).unwrap();
    model.refused("a vocabulary too large", &["tokenizer.json"]);
    fs::remove_file(&file).unwrap();
    model.refused("no tokenizer", &["tokenizer.json"]);
}
