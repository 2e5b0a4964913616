//! GGUF files of the baked model in every format: the same numbers as from the checkpoint where the values are the
//! same, near ones where activations are quantised, the same bits from a packed file; wrong files are refused.

use crate::support::cpu_sequence::CpuSequence;
use crate::support::gguf::encoder::encode;
use crate::support::gguf::file::{File, Tensor};
use crate::support::gguf::writer::{U32, pair};
use crate::support::random::ids;
use crate::support::test_dir::TestDir;
use crate::support::{command, paths};
use antigravity::Error;
use antigravity::dims::*;
use antigravity::model::cpu::CpuOptions;
use antigravity::model::device::Logits;
use antigravity::model::weights::{
    Attention, Checkpoint, FeedForward, Ffn, Layer, LoadOptions, Matrix, Mixer, ModelPath, WeightType,
    Weights, load_config, model_tensors, pack,
};
use files::blocks::BlockType;
use files::blocks::gguf::decode_values;
use files::packed_file::{self, PACKED_NAME};
use files::source::Safetensors;
use files::source::gguf::Gguf;
use numeric::kv::{KvType, KvTypes};
use numeric::quant::format::Format;
use numeric::simd::Isa;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const EMBED: &str = "model.embed_tokens.weight";

/// The baked model's checkpoint; `None`, said aloud, where only its config is here.
pub fn checkpoint() -> Option<Safetensors> {
    let found =
        Safetensors::open(&paths::model()).ok().filter(|s| packed_file::read_layout_version(s).is_none());
    if found.is_none() {
        eprintln!("SKIPPED: no checkpoint of {MODEL}");
    }
    found
}

/// The formats whose blocks fit this model's rows.
fn formats() -> impl Iterator<Item = BlockType> {
    let fits = |block: &BlockType| {
        [DIM, Q_DIM, FFN_DIM].iter().all(|cols| cols.is_multiple_of(block.values_per_block()))
    };
    BlockType::ALL.into_iter().filter(fits)
}

pub fn load(path: &Path, weight_type: WeightType, threads: usize) -> Result<Weights, Error> {
    let model = ModelPath::new(path)?.open(weight_type)?;
    Weights::load(&model, &LoadOptions::new(weight_type, threads))
}

/// The logits of some tokens, one after another.
pub fn logits(weights: Weights) -> Vec<Vec<f32>> {
    const TOKENS: usize = 24;
    let options = CpuOptions {
        threads: 1,
        isa: Isa::detect().unwrap(),
        kv_types: KvTypes::same(KvType::F32),
        slots: TOKENS,
        max_tokens: TOKENS,
    };
    let mut cpu = CpuSequence::new(Arc::new(weights), options);
    let one = |id| {
        let mut logits = vec![0.0; VOCAB];
        cpu.forward(&[id], Logits::Last(&mut logits));
        logits
    };
    ids(TOKENS).into_iter().map(one).collect()
}

/// Largest difference, and root of the mean square, both over the standard deviation of the logits.
pub fn error(found: &[Vec<f32>], want: &[Vec<f32>]) -> (f64, f64) {
    let (found, want) = (found.concat(), want.concat());
    let n = want.len() as f64;
    let mean = want.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
    let deviation = (want.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n).sqrt();
    let off: Vec<f64> = found.iter().zip(&want).map(|(a, b)| f64::from(a - b).abs() / deviation).collect();
    assert!(off.iter().all(|x| x.is_finite()));
    (off.iter().fold(0.0, |m, x| x.max(m)), (off.iter().map(|x| x * x).sum::<f64>() / n).sqrt())
}

#[test]
fn unquantised_gguf_files_give_the_checkpoints_bits() {
    let Some(source) = checkpoint() else { return };
    let stored = source.get_required(EMBED).unwrap().dtype.block_type().unwrap();
    let want = logits(load(&paths::model(), WeightType::F32, 2).unwrap());
    let dir = TestDir::new();
    for block in [BlockType::F32, stored] {
        let path = dir.file("model.gguf");
        File::of(&source, |_| block).write(&path);
        for weight_type in [WeightType::Auto, WeightType::F32] {
            let found = logits(load(&path, weight_type, 2).unwrap());
            assert!(found == want, "{block:?} {weight_type}");
        }
    }
}

#[test]
fn blocks_are_near_their_values_and_packed_files_have_their_bits() {
    let Some(source) = checkpoint() else { return };
    for block in formats() {
        let dir = TestDir::new();
        let path = dir.file("some.model.gguf");
        File::of(&source, |_| block).write(&path);
        let exact = logits(load(&path, WeightType::F32, 2).unwrap());
        let weights = load(&path, WeightType::Auto, 2).unwrap();
        assert_eq!(weights.weight_type, WeightType::Native);
        let embeddings = Checkpoint::open(&path).unwrap().find_tensor(&model_tensors()[0]).unwrap();
        let embedded = |weights: &Weights| {
            [0, VOCAB / 2, VOCAB - 1].iter().all(|&token| {
                let (mut found, mut want) = ([0.0; DIM], [0.0; DIM]);
                weights.embed_token(token, 0, &mut found);
                decode_values(block, &embeddings.row_bytes_at(token), &mut want);
                found.map(f32::to_bits) == want.map(f32::to_bits)
            })
        };
        assert!(embedded(&weights), "{block:?}: embeddings as they are stored");
        let (bytes, matrices) = (weights.bytes_per_token, kinds(&weights));
        let native = logits(weights);
        let (most, rms) = error(&native, &exact);
        assert!(most <= 0.3 && rms <= 0.06, "{block:?}: {most} {rms}");
        assert_eq!(matrices, block, "as they are stored");
        assert!(logits(load(&path, WeightType::Native, 1).unwrap()) == native, "{block:?} on one thread");

        let packed = ModelPath::new(&path).unwrap().packed_path().unwrap();
        assert_eq!(packed, dir.file("some.model.gguf.packed.safetensors"));
        let options = LoadOptions::new(WeightType::Auto, 2);
        let source = Checkpoint::open(&path).unwrap();
        let config = load_config(&dir.0, &source).unwrap();
        pack::write_packed(&source, &config, &packed, &options, None).unwrap();
        let texts = packed_file::open_gguf_metadata(&Safetensors::open(&packed).unwrap())
            .unwrap()
            .expect("what the file says comes along");
        assert_eq!(texts.metadata(), Gguf::open(&path).unwrap().metadata());
        let used = ModelPath::new(&path).unwrap().open(WeightType::Auto).unwrap();
        assert_eq!(used.checkpoint.path(), packed, "the fresh packed file is taken");
        let opened = ModelPath::new(&path).unwrap().open(WeightType::Q4_0).unwrap();
        assert_eq!(opened.checkpoint.path(), path, "of other weights it is not");
        let mapped = load(&path, WeightType::Auto, 2).unwrap();
        assert_eq!((mapped.bytes_per_token, kinds(&mapped)), (bytes, block));
        assert!(embedded(&mapped), "{block:?}: embeddings of the packed file");
        // What the head has is not there twice.
        assert_eq!(Safetensors::open(&packed).unwrap().get(EMBED).is_none(), TIED);
        assert!(logits(mapped) == native, "{block:?} from the packed file");
        let alone = load(&packed, WeightType::Auto, 2).unwrap();
        assert_eq!(alone.weight_type, WeightType::Native);
        assert!(logits(alone) == native, "{block:?} from the packed file alone");
    }
}

/// Attention and feed-forward of a layer that has the usual ones.
pub fn halves(layer: &Layer) -> (&Attention<Q_DIM, GLOBAL_KV_DIM>, &FeedForward<FFN_DIM>) {
    match (&layer.mixer, &layer.ffn) {
        (Mixer::Attention(attention), Ffn::Usual(ffn)) => (attention, ffn),
        _ => panic!("another kind of layer"),
    }
}

/// Returns the block type of all matrices, which must share one.
fn kinds(weights: &Weights) -> BlockType {
    fn kind<const ROWS: usize, const COLS: usize>(m: &Matrix<ROWS, COLS>) -> BlockType {
        match m {
            Matrix::Quantised(w) => w.format().block_type(),
            Matrix::Dense { dtype, .. } => dtype.block_type().unwrap(),
        }
    }
    let head = kind(&weights.head);
    for l in &weights.layers {
        let (a, ffn) = halves(l);
        let attention =
            [kind(&a.wq), kind(a.wk.as_ref().unwrap()), kind(a.wv.as_ref().unwrap()), kind(&a.wo)];
        let rest = [kind(ffn.gate.as_ref().unwrap()), kind(&ffn.up), kind(&ffn.down)];
        assert!(attention.iter().chain(&rest).all(|k| *k == head));
    }
    head
}

/// Blocks that the engine's own quantiser made are packed to the bytes that loading the checkpoint makes.
#[test]
fn stored_q4_0_is_taken_bit_for_bit() {
    let Some(source) = checkpoint() else { return };
    if model_tensors().iter().any(|s| s.name.ends_with("proj.weight") && !s.is_quantised()) {
        return;
    }
    let dir = TestDir::new();
    let path = dir.file("model.gguf");
    let stored = source.get_required(EMBED).unwrap().dtype.block_type().unwrap();
    File::of(&source, |name| if name == EMBED { stored } else { BlockType::Q4_0 }).write(&path);
    let want = load(&paths::model(), WeightType::Q4_0, 2).unwrap();
    let found = load(&path, WeightType::Q4_0, 2).unwrap();
    let quants = |w: &Weights| match (&halves(&w.layers[0]).0.wq, &halves(&w.layers[LAYERS - 1]).0.wk) {
        (Matrix::Quantised(q), Some(Matrix::Quantised(k))) => {
            assert_eq!((q.format(), k.format()), (Format::Q4_0, Format::Q4_0));
            let (q_groups, k_groups) = (0..Q_DIM.div_ceil(16), 0..KV_DIM.div_ceil(16));
            [q.quants(q_groups.clone()), q.scales(q_groups), k.quants(k_groups.clone()), k.scales(k_groups)]
                .concat()
        }
        _ => panic!("q and k are not Q4_0"),
    };
    assert!(quants(&want) == quants(&found), "rows of q and k in the checkpoint's order");
    assert!(logits(found) == logits(want));
}

#[test]
fn mixed_formats_stay_as_they_are() {
    let Some(source) = checkpoint() else { return };
    if formats().count() < BlockType::ALL.len() {
        return;
    }
    let dir = TestDir::new();
    let path = dir.file("model.gguf");
    let choose = |name: &str| match name {
        EMBED => BlockType::Q6_K,
        _ if name.contains("down") => BlockType::Q6_K,
        _ if name.contains("v_proj") => BlockType::F16,
        // With these, as in files of quantisation-aware training.
        _ if name.contains("gate") || name.contains("up") => BlockType::Q4_0,
        _ => BlockType::Q4_K,
    };
    File::of(&source, choose).write(&path);
    let weights = load(&path, WeightType::Auto, 2).unwrap();
    assert!(matches!(halves(&weights.layers[1]).0.wv, Some(Matrix::Dense { .. })));
    assert!(
        matches!(&halves(&weights.layers[1]).1.down, Matrix::Quantised(m) if m.format().block_type() == BlockType::Q6_K)
    );
    assert!(
        matches!(&halves(&weights.layers[1]).1.up, Matrix::Quantised(m) if m.format().block_type() == BlockType::Q4_0)
    );
    let exact = logits(load(&path, WeightType::F32, 2).unwrap());
    let (most, rms) = error(&logits(weights), &exact);
    assert!(most <= 0.3 && rms <= 0.06, "{most} {rms}");
}

#[test]
fn a_directory_stands_for_its_only_gguf_file() {
    let Some(source) = checkpoint() else { return };
    let dir = TestDir::new();
    let file = File::of(&source, |_| BlockType::BF16);
    file.write(&dir.file("one.gguf"));
    let path = ModelPath::new(&dir.0).unwrap();
    assert_eq!((path.weights, path.dir), (dir.file("one.gguf"), dir.0.clone()));
    file.write(&dir.file("two.GGUF"));
    let Err(Error::Model(e)) = ModelPath::new(&dir.0) else { panic!("two files") };
    assert!(e.contains("one.gguf") && e.contains("two.GGUF") && !e.contains('\n'), "{e}");
    fs::write(dir.file(PACKED_NAME), "").unwrap();
    assert_eq!(ModelPath::new(&dir.0).unwrap().weights, dir.0, "a safetensors model");
}

#[test]
fn a_stale_packed_file_is_left_alone() {
    let Some(source) = checkpoint() else { return };
    let dir = TestDir::new();
    let path = dir.file("model.gguf");
    let mut file = File::of(&source, |_| BlockType::BF16);
    file.write(&path);
    let at = ModelPath::new(&path).unwrap();
    let options = LoadOptions::new(WeightType::Auto, 2);
    let source = Checkpoint::open(&path).unwrap();
    let config = load_config(&at.dir, &source).unwrap();
    let packed = at.packed_path().unwrap();
    pack::write_packed(&source, &config, &packed, &options, None).unwrap();
    assert_eq!(at.open(WeightType::Auto).unwrap().checkpoint.path(), packed);
    file.tensor("output_norm.weight").bytes[..4].copy_from_slice(&2f32.to_le_bytes());
    file.tensors.swap(0, 1);
    file.write(&path);
    assert_eq!(at.open(WeightType::Auto).unwrap().checkpoint.path(), path);
}

/// Loading fails in one line that holds all of `words`, with every type of weights; so does the program, with exit
/// code 3.
fn refused(file: &File, what: &str, words: &[&str]) {
    let dir = TestDir::new();
    let path = dir.file("model.gguf");
    file.write(&path);
    let check = |e: &str| {
        assert!(!e.contains('\n') && e.contains("model.gguf"), "{what}: {e}");
        words.iter().for_each(|word| assert!(e.contains(word), "{what}: no {word:?} in: {e}"));
    };
    for weight_type in [WeightType::Auto, WeightType::Q4_0, WeightType::F32] {
        match load(&path, weight_type, 2) {
            Err(Error::Model(e)) => check(&e),
            Err(e) => panic!("{what}: {e:?}"),
            Ok(_) => panic!("{what}: {weight_type} is loaded"),
        }
    }
    let mut program = Command::new(command::binary());
    program.args(["generate", "-q", "-n", "1", "-p", "x", "-m"]).arg(&path);
    let output = program.output().expect("the program starts");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0), "{what}");
    check(String::from_utf8(output.stderr).expect("text").trim_end());
}

#[test]
fn wrong_files_are_refused() {
    let Some(source) = checkpoint() else { return };
    let block = formats().last().unwrap();
    let whole = File::of(&source, |_| block);
    let gate = "blk.1.ffn_gate.weight";

    let mut file = whole.clone();
    file.tensors.retain(|t| t.name != gate);
    refused(&file, "missing", &[gate, "missing"]);

    let mut file = whole.clone();
    file.tensor(gate).shape.swap(0, 1);
    if DIM != FFN_DIM {
        refused(&file, "transposed", &[gate, &format!("[{DIM}, {FFN_DIM}]")]);
    }

    for (name, last) in [(gate, "ffn"), ("blk.0.attn_q.weight", "attn_q")] {
        for bits in [0x7e00u16, 0x7c00] {
            let mut file = whole.clone();
            let t = file.tensor(name);
            // The f16 scale: at the end of a block of Q6_K, at the start of the others.
            let at = t.bytes.len() - if block == BlockType::Q6_K { 2 } else { block.bytes_per_block() };
            t.bytes[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            refused(&file, "a scale that is no number", &[last, "row", "NaN"]);
        }
    }

    let mut file = whole.clone();
    file.tensor("output_norm.weight").bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&file, "a norm", &["output_norm.weight", "element 1", "NaN"]);

    let mut file = whole.clone();
    *file.tensor("output_norm.weight") = Tensor {
        name: "output_norm.weight".into(),
        block,
        shape: vec![DIM],
        bytes: encode(block, &vec![1.0; DIM]),
    };
    refused(&file, "a norm in blocks", &["output_norm.weight", &block.name(), "F32, F16, BF16"]);

    let mut file = whole.clone();
    let arch = ARCH.name();
    let count = format!("{arch}.block_count");
    file.pairs.retain(|p| !p.windows(count.len()).any(|w| w == count.as_bytes()));
    file.pairs.push(pair(&count, U32, (LAYERS as u32 + 1).to_le_bytes()));
    refused(
        &file,
        "another model",
        &["num_hidden_layers", "rebuild: ANTIGRAVITY_MODEL=", "model.gguf cargo"],
    );
}
