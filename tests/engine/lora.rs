//! LoRA adapters: logits of PEFT and transformers, the same bits from every file that holds the same numbers, and one
//! line for an adapter that cannot be added. The files are those of `tests/fixtures/lora.py`, for the story model.

use crate::support::gguf::file::File;
use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::Error;
use antigravity::dims::{DIM, FFN_DIM, MODEL, TIED, VOCAB};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, Logits, Run};
use antigravity::model::weights::{
    Checkpoint, Importance, LoadOptions, ModelPath, WeightType, Weights, load_config, pack,
};
use files::blocks::BlockType;
use files::lora::LoraFile;
use files::packed_file::key;
use files::source::Safetensors;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const WEIGHT_TYPES: [WeightType; 5] =
    [WeightType::F32, WeightType::Native, WeightType::Q4_0, WeightType::Iq4Nl, WeightType::Q4];

fn fixture(name: &str) -> PathBuf {
    paths::root().join("tests/fixtures/lora").join(name)
}

/// An adapter of the fixtures, `NAME` or `NAME:SCALE`.
fn adapter(text: &str) -> LoraFile {
    LoraFile::from(&*fixture(text).to_string_lossy())
}

/// The adapters are for the story model, whose checkpoint is here.
fn is_story() -> bool {
    MODEL == "story" && paths::model().join("model.safetensors").exists()
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(fixture("story/expected.json")).unwrap()).unwrap()
}

fn ids() -> Vec<u32> {
    serde_json::from_value(expected()["ids"].clone()).unwrap()
}

fn load(path: &Path, weight_type: WeightType, adapters: &[LoraFile], threads: usize) -> Weights {
    let model = ModelPath::new(path).unwrap().open_with_adapters(weight_type, adapters).unwrap();
    let text = ids();
    let load = LoadOptions { importance: Importance::Text(&text), ..LoadOptions::new(weight_type, threads) };
    Weights::load(&model, &load).unwrap()
}

/// The logits behind the last token.
fn logits(weights: Weights) -> Vec<f32> {
    let (isa, ids, kv_types) = (Isa::detect().unwrap(), ids(), KvTypes::same(KvType::F32));
    let options = CpuOptions { threads: 1, isa, kv_types, slots: ids.len(), max_tokens: ids.len() };
    let mut cpu = CpuDevice::new(Arc::new(weights), options).unwrap();
    let mut cache = cpu.new_cache(ids.len()).unwrap();
    let mut logits = vec![0.0; VOCAB];
    cpu.forward(&mut [Run::new(&mut *cache, &ids, 0, Logits::Last(&mut logits))], None).unwrap();
    logits
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn logits_are_those_of_peft() {
    if !is_story() {
        return;
    }
    let both = [adapter("story:0.5"), adapter("story-rslora:-2")];
    let plain = logits(load(&paths::model(), WeightType::F32, &[], 2));
    for (name, adapters) in [("1", &[adapter("story")][..]), ("0.5,-2", &both)] {
        let want: Vec<f32> = serde_json::from_value(expected()["logits"][name].clone()).unwrap();
        let exact = distance(&logits(load(&paths::model(), WeightType::F32, adapters, 2)), &want);
        // The checkpoint is in bf16: sums are rounded.
        let native = distance(&logits(load(&paths::model(), WeightType::Native, adapters, 2)), &want);
        let (changed, largest) = (distance(&plain, &want), distance(&want, &vec![0.0; VOCAB]));
        assert!(exact < 1e-4 * largest, "{name}: {exact} of {largest}");
        assert!(native > exact && native < 0.02 * largest && changed > 0.2 * largest, "{native} {changed}");
    }
}

/// A GGUF adapter has the numbers of the PEFT one, a GGUF model those of the checkpoint; rows of q and k are reordered.
#[test]
fn files_of_both_kinds_give_the_same_bits() {
    if !is_story() {
        return;
    }
    let dir = TestDir::new();
    let gguf = dir.file("model.gguf");
    File::of(&Safetensors::open(&paths::model()).unwrap(), |_| BlockType::BF16).write(&gguf);
    let from_file = LoraFile { path: fixture("story/adapter_model.safetensors"), scale: 1.0 };
    for weight_type in [WeightType::F32, WeightType::Q4_0] {
        let want = logits(load(&paths::model(), weight_type, &[adapter("story")], 2));
        for (model, adapter) in [
            (&paths::model(), &adapter("story/adapter.gguf")),
            (&gguf, &adapter("story")),
            (&gguf, &adapter("story/adapter.gguf")),
            (&paths::model(), &from_file),
        ] {
            let found = logits(load(model, weight_type, std::slice::from_ref(adapter), 2));
            assert!(found == want, "{} with {}", model.display(), adapter.path.display());
        }
    }
}

/// Tensors of a GGUF adapter with these matrices, of which the second factor is as high as the model's.
fn write_gguf(path: &Path, matrices: &[(&str, usize, usize)]) {
    use crate::support::gguf::file::Tensor;
    use crate::support::gguf::writer::{F32, STRING, pair, text};
    let value = |i: usize| ((i * 37 % 101) as f32 / 50.0 - 1.0) / 16.0;
    let factor = |name: &str, end: &str, shape: [usize; 2]| Tensor {
        name: format!("{name}.lora_{end}"),
        block: BlockType::F32,
        shape: shape.into(),
        bytes: (0..shape[0] * shape[1]).flat_map(|i| value(i).to_le_bytes()).collect(),
    };
    let tensors = matrices
        .iter()
        .flat_map(|&(name, rows, cols)| [factor(name, "a", [2, cols]), factor(name, "b", [rows, 2])]);
    let pairs = vec![
        pair("general.architecture", STRING, text("llama")),
        pair("general.type", STRING, text("adapter")),
        pair("adapter.type", STRING, text("lora")),
        pair("adapter.lora.alpha", F32, 2f32.to_le_bytes()),
    ];
    File { pairs, tensors: tensors.collect() }.write(path);
}

#[test]
fn an_adapter_of_a_tied_head_leaves_the_embedding() {
    if !is_story() || !TIED {
        return;
    }
    let dir = TestDir::new();
    let file = dir.file("head.gguf");
    write_gguf(&file, &[("output.weight", VOCAB, DIM)]);
    let adapters = [LoraFile { path: file, scale: 1.0 }];
    for weight_type in WEIGHT_TYPES {
        let [plain, found] = [&[][..], &adapters].map(|a| load(&paths::model(), weight_type, a, 2));
        let row = |weights: &Weights| {
            let (mut embedding, mut head) = ([0.0; DIM], [0.0; DIM]);
            weights.embed_token(7, 0, &mut embedding);
            weights.head.decode_row(7, &mut head);
            (embedding, head)
        };
        let (plain, found) = (row(&plain), row(&found));
        assert!(plain.0 == found.0 && plain.1 != found.1, "{weight_type}");
    }
}

#[test]
fn a_packed_file_is_the_same_with_any_number_of_threads_and_is_taken_with_its_adapters_only() {
    if !is_story() {
        return;
    }
    let adapters = [adapter("story:0.5"), adapter("story-rslora:-2")];
    let names = ["config.json", "model.safetensors", "tokenizer.json"];
    for weight_type in WEIGHT_TYPES {
        let dir = TestDir::new();
        for name in names {
            fs::copy(paths::model().join(name), dir.file(name)).unwrap();
        }
        let path = ModelPath::new(&dir.0).unwrap();
        let source = Checkpoint::open(&dir.0).unwrap().with_adapters(&adapters).unwrap();
        let config = load_config(&dir.0, &source).unwrap();
        let out = path.packed_path().unwrap();
        let written = [3, 1].map(|threads| {
            let text = ids();
            let load =
                LoadOptions { importance: Importance::Text(&text), ..LoadOptions::new(weight_type, threads) };
            pack::write_packed(&source, &config, &out, &load, None).unwrap();
            fs::read(&out).unwrap()
        });
        assert!(written[0] == written[1], "{weight_type} by three threads and by one");
        let packed = Safetensors::open(&out).unwrap();
        assert_eq!(packed.metadata()[key::ADAPTERS], "story:0.5, story-rslora:-2");

        let loaded = load(&paths::model(), weight_type, &adapters, 2);
        let mapped = load(&out, weight_type, &[], 2);
        assert_eq!(loaded.fingerprint, mapped.fingerprint);
        assert!(logits(loaded) == logits(mapped), "{weight_type}");
        let opened = |adapters: &[LoraFile]| {
            let model = path.open_with_adapters(weight_type, adapters).unwrap();
            (model.checkpoint.packed().is_some(), model.checkpoint.source_fingerprint())
        };
        let fresh = weight_type != WeightType::F32;
        assert_eq!(opened(&adapters), (fresh, source.fingerprint()));
        let others = [vec![], adapters[..1].to_vec(), vec![adapters[1].clone(), adapters[0].clone()]];
        let rescaled = vec![adapter("story:0.5"), adapter("story-rslora:2")];
        for other in others.into_iter().chain([rescaled]) {
            let (packed, fingerprint) = opened(&other);
            assert!(!packed && fingerprint != source.fingerprint(), "{other:?}");
        }
    }
}

/// Opening fails in one line that holds all of `words`.
#[track_caller]
fn refused(model: &Path, adapter: &LoraFile, words: &[&str]) {
    let opened =
        ModelPath::new(model).unwrap().open_with_adapters(WeightType::Auto, std::slice::from_ref(adapter));
    let e = match opened {
        Err(Error::Model(e) | Error::Usage(e)) => e,
        Err(e) => panic!("{e:?}"),
        Ok(_) => panic!("{adapter:?} is added"),
    };
    assert!(!e.contains('\n'), "{e}");
    words.iter().for_each(|word| assert!(e.contains(word), "no {word:?} in: {e}"));
}

#[test]
fn wrong_configs_are_refused() {
    if !is_story() {
        return;
    }
    let config: Value =
        serde_json::from_slice(&fs::read(fixture("story/adapter_config.json")).unwrap()).unwrap();
    for (field, value, words) in [
        ("peft_type", json!("IA3"), &["\"IA3\"", "\"LORA\"", "merge"][..]),
        ("use_dora", json!(true), &["true", "merge"]),
        ("bias", json!("all"), &["\"all\"", "merge"]),
        ("modules_to_save", json!(["lm_head"]), &["lm_head", "merge"]),
        ("alora_invocation_tokens", json!([1, 2]), &["[1,2]", "merge"]),
        ("init_lora_weights", json!("pissa_niter_4"), &["pissa", "gaussian", "path_initial"]),
        ("r", json!(4), &["is 4", "3, the rank of the factors of model.layers."]),
        ("r", json!(0), &["is 0", "from 1"]),
        ("rank_pattern", json!({"k_proj": 3}), &["is 3", "2, the rank", "k_proj"]),
        ("rank_pattern", json!({"layers.(1|4).k_proj": 2}), &["(1|4)", "regular expressions"]),
        ("lora_alpha", Value::Null, &["null", "a positive number"]),
        ("lora_alpha", json!(1e39), &["1e", "a positive number"]),
        ("alpha_pattern", json!({"q_proj": "x"}), &["a number"]),
        ("alpha_pattern", json!({"q_proj": 1e40}), &["adapter of model.layers.", "not a finite f32"]),
    ] {
        let dir = TestDir::new();
        fs::copy(fixture("story/adapter_model.safetensors"), dir.file("adapter_model.safetensors")).unwrap();
        let mut wrong = config.clone();
        wrong[field] = value;
        fs::write(dir.file("adapter_config.json"), wrong.to_string()).unwrap();
        let words = [&["adapter_config.json", field][..], words].concat();
        // A wrong alpha shows in the scale of a tensor.
        let words = if words.contains(&"not a finite f32") { &words[2..] } else { &words };
        refused(&paths::model(), &LoraFile { path: dir.0.clone(), scale: 1.0 }, words);
    }
    let scaled = |scale| LoraFile { path: fixture("story"), scale };
    refused(&paths::model(), &scaled(f32::NAN), &["`EngineOptions::lora`", "story:NaN", "finite"]);
    refused(&paths::model(), &scaled(f32::MAX), &["adapter of", "not a finite f32"]);
    assert_eq!(adapter("story"), scaled(1.0));
    assert_eq!(adapter("story:-0.5"), scaled(-0.5));
    assert_eq!(adapter("story:b").path, fixture("story:b"), "no number");
}

#[test]
fn wrong_files_and_models_are_refused() {
    if !is_story() {
        return;
    }
    let dir = TestDir::new();
    let file = |name: &str| LoraFile { path: dir.file(name), scale: 1.0 };
    refused(&paths::model(), &file("none"), &["none", "cannot be read", "`EngineOptions::lora`"]);
    refused(&paths::model(), &LoraFile { path: dir.0.clone(), scale: 1.0 }, &["adapter_model.safetensors"]);
    fs::copy(fixture("story/adapter_model.safetensors"), dir.file("alone.safetensors")).unwrap();
    refused(&paths::model(), &file("alone.safetensors"), &["adapter_config.json", "missing"]);
    let words = ["transformer.h.0.attn.c_attn.weight", "no matrix of story", "for this model"];
    refused(&paths::model(), &adapter("m8-gpt2-bare-f32"), &words);
    refused(&paths::model(), &adapter("m1-llama32-bf16"), &["its product is [", "for this model"]);
    let (q, down) = ("blk.0.attn_q.weight", "blk.1.ffn_down.weight");
    for (matrices, words) in [
        (&[][..], &["holds no factors"][..]),
        (&[("token_embd.weight", VOCAB, DIM)], &["token_embd.weight", "looked up by row", "merge"]),
        (&[("blk.9.attn_q.weight", DIM, DIM)], &["blk.9.attn_q.weight", "no matrix of story"]),
        (&[(q, DIM, DIM), (down, FFN_DIM, DIM)], &[down, "[768, 256]", "[256, 768]", "for this model"]),
    ] {
        write_gguf(&dir.file("some.gguf"), matrices);
        refused(&paths::model(), &file("some.gguf"), &[&["some.gguf"][..], words].concat());
    }

    write_gguf(&dir.file("good.gguf"), &[(q, DIM, DIM), (down, DIM, FFN_DIM)]);
    let good = fs::read(dir.file("good.gguf")).unwrap();
    let changed = |from: &str, to: &[u8]| {
        let at = good.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to);
        bytes
    };
    let nan = [&good[..good.len() - 4], &f32::NAN.to_le_bytes()].concat();
    for (bytes, words) in [
        (changed("adapter", b"mistake"), &["general.type", "mistake", "\"adapter\""][..]),
        (changed("lora", b"aloa"), &["adapter.type", "aloa"]),
        (changed("llama", b"bloom"), &["general.architecture", "bloom", "llama"]),
        (
            changed("attn_q.weight.lora_b", b"attn_q.weight.lora_c"),
            &["attn_q.weight.lora_c", "factor", "merge"],
        ),
        (changed("attn_q.weight.lora_b", b"attn_k.weight.lora_b"), &["only one of its two factors"]),
        (nan, &["element 511", "ffn_down.weight.lora_b", "NaN"]),
        (good[..good.len() - 32].into(), &["go past the end"]),
    ] {
        fs::write(dir.file("changed.gguf"), bytes).unwrap();
        refused(&paths::model(), &file("changed.gguf"), &[&["changed.gguf"][..], words].concat());
    }

    let quantised = dir.file("model.gguf");
    let source = Safetensors::open(&paths::model()).unwrap();
    File::of(&source, |_| BlockType::Q8_0).write(&quantised);
    refused(&quantised, &file("good.gguf"), &["model.gguf", "blk.0.attn_q.weight", "Q8_0", "unquantised"]);
    let packed = dir.file("packed.safetensors");
    let source = Checkpoint::open(&paths::model()).unwrap();
    let config = load_config(&paths::model(), &source).unwrap();
    let load = LoadOptions::new(WeightType::Q4_0, 2);
    pack::write_packed(&source, &config, &packed, &load, None).unwrap();
    let words = ["packed.safetensors is packed", "give the checkpoint it was packed from"];
    refused(&packed, &file("good.gguf"), &words);
}
