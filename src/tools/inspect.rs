//! `inspect`: shows the contents of any model file, and the model this program was built for.

use super::columns::{Align, ReportFormat, columns};
use crate::cli::args::PathArgs;
use crate::cli::terminal::put;
use crate::dims;
use crate::model::weights::{Checkpoint, ModelPath, read_text};
use crate::run::plan::mib;
use clap::Args;
use files::Result;
use files::config::ModelConfig;
use files::error::{LINE, is_harmless, one_line};
use files::packed_file;
use files::source::Unreadable;
use files::source::gguf::metadata::Metadata;
use files::source::gguf::value::Value as GgufValue;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Flags of `inspect`.
#[derive(Args, Clone)]
pub struct InspectArgs {
    /// Model to inspect, as with --model-path
    #[arg(value_name = "PATH", conflicts_with = "model_path")]
    path: Option<PathBuf>,
    #[command(flatten)]
    model: PathArgs,
    /// Text, or one JSON object
    #[arg(long, value_enum, default_value = "text")]
    format: ReportFormat,
}

pub fn run(args: &InspectArgs) -> Result<()> {
    let path = PathArgs { model_path: args.path.clone().or(args.model.model_path.clone()) }.path()?;
    let path = ModelPath::new(&path)?;
    let packed = path.packed().filter(|packed| packed.is_file());
    let opened = match (Checkpoint::open(&path.weights), &packed) {
        // A directory may hold only the packed file.
        (Err(_), Some(packed)) if path.weights.is_dir() => Checkpoint::open(packed)?,
        (other, _) => other?,
    };
    let report = ModelReport {
        config: config(&path, &opened),
        beside: packed.as_ref().map(|packed| {
            let name = packed.file_name().unwrap_or_default();
            (name.to_string_lossy().into_owned(), packed_state(&opened, packed))
        }),
        opened: &opened,
    };
    match args.format {
        ReportFormat::Text => put(&report.text()),
        ReportFormat::Json => put(&escape_json(&format!("{:#}\n", report.json()))),
    }
}

/// Escapes characters that control a terminal. JSON has them in strings only, and escapes some itself.
fn escape_json(json: &str) -> String {
    let escape = |c: char| match c {
        c if c == '\n' || is_harmless(c) => c.to_string(),
        c => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    };
    json.chars().map(escape).collect()
}

/// Comparison of a model's config with the built-in one.
#[derive(Debug, PartialEq)]
enum Fit {
    /// No config, neither as a file nor in the metadata.
    None,
    /// This program cannot read the config; the reason.
    Other(String),
    Same,
    /// Field, built-in value, value in the file.
    Differs(&'static str, String, String),
}

/// Compares the config beside the weights, in a packed file, or in a GGUF file's header.
fn config(path: &ModelPath, opened: &Checkpoint) -> Fit {
    let file = path.dir.join("config.json");
    let parsed = |text: &str| ModelConfig::parse(text).map_err(|e| e.to_string());
    let found = match opened {
        Checkpoint::Gguf(gguf) => gguf.config().map_err(|e| e.to_string()),
        Checkpoint::Safetensors(_) if file.exists() => {
            read_text(&file).map_err(|e| e.to_string()).and_then(|text| parsed(&text))
        }
        Checkpoint::Safetensors(source) => match source.metadata().get("config") {
            Some(text) => parsed(text),
            None => return Fit::None,
        },
    };
    match found {
        Err(e) => Fit::Other(e),
        Ok(found) => match dims::baked().difference(&found) {
            None => Fit::Same,
            Some((field, ours, theirs)) => Fit::Differs(field, ours, theirs),
        },
    }
}

/// State of the packed file beside a checkpoint.
fn packed_state(opened: &Checkpoint, packed: &Path) -> &'static str {
    let found = Checkpoint::open(packed);
    match found.as_ref().map(Checkpoint::packed) {
        Err(_) => "unreadable",
        Ok(_) if opened.packed().is_some() => "shown",
        Ok(Some(p)) if packed_file::layout_version(p) != Some(packed_file::LAYOUT) => "of another version",
        Ok(Some(p)) if p.metadata().get("source") == Some(&opened.fingerprint()) => "of this checkpoint",
        Ok(_) => "of another checkpoint",
    }
}

/// A row of the table of tensors.
#[derive(Serialize)]
struct TensorLine {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
}

impl TensorLine {
    fn new(name: &str, dtype: String, shape: &[usize], bytes: usize) -> Self {
        Self { name: name.into(), dtype, shape: shape.into(), bytes }
    }
}

/// The tensors that this program can read, sorted by name.
fn tensors(opened: &Checkpoint) -> Vec<TensorLine> {
    match opened {
        Checkpoint::Safetensors(source) => (source.tensors())
            .map(|t| TensorLine::new(&t.name, format!("{:?}", t.dtype), &t.shape, t.data.bytes().len()))
            .collect(),
        Checkpoint::Gguf(gguf) => (gguf.tensors())
            .map(|t| TensorLine::new(&t.name, t.block.name(), &t.shape, t.data.bytes().len()))
            .collect(),
    }
}

/// The tensors whose types this program cannot read. (A GGUF file with such tensors does not open.)
fn unreadable(opened: &Checkpoint) -> Vec<TensorLine> {
    let Checkpoint::Safetensors(source) = opened else { return Vec::new() };
    let line = |t: &Unreadable| TensorLine::new(&t.name, t.dtype.clone(), &t.shape, t.bytes);
    source.unreadable().map(line).collect()
}

/// Metadata keys and values; arrays in a GGUF file are shown by their length.
fn metadata(opened: &Checkpoint) -> BTreeMap<String, String> {
    let shown = |all: &Metadata| {
        let value = |v: &GgufValue| v.as_str().map_or_else(|| v.to_string(), Into::into);
        all.iter().map(|(key, v)| (key.to_string(), value(v))).collect()
    };
    match opened {
        Checkpoint::Safetensors(source) => source.metadata().clone(),
        Checkpoint::Gguf(gguf) => shown(gguf.metadata()),
    }
}

struct ModelReport<'a> {
    opened: &'a Checkpoint,
    config: Fit,
    /// Name and state of the packed file.
    beside: Option<(String, &'static str)>,
}

/// Totals over the tensors of one data type.
#[derive(Default, Serialize)]
struct Total {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

impl ModelReport<'_> {
    /// Totals by data type.
    fn totals(&self) -> BTreeMap<String, Total> {
        let mut totals: BTreeMap<String, Total> = BTreeMap::new();
        for t in tensors(self.opened) {
            let total = totals.entry(t.dtype).or_default();
            total.tensors += 1;
            total.elements += t.shape.iter().product::<usize>() as u64;
            total.bytes += t.bytes as u64;
        }
        totals
    }

    fn text(&self) -> String {
        const SIDES: [Align; 4] = [Align::Left, Align::Left, Align::Left, Align::Right];
        let mut lines = vec![vec!["tensor".to_string(), "type".into(), "shape".into(), "bytes".into()]];
        let line = |t: TensorLine, note: &str| {
            let shape = format!("{:?}", t.shape);
            vec![one_line(&t.name, 120), format!("{}{note}", t.dtype), shape, t.bytes.to_string()]
        };
        lines.extend(tensors(self.opened).into_iter().map(|t| line(t, "")));
        lines.extend(unreadable(self.opened).into_iter().map(|t| line(t, " (unsupported)")));
        let path = one_line(&self.opened.path().to_string_lossy(), LINE);
        let mut text = format!("{path}\n\n{}", columns(&SIDES, &lines));
        text += "\ntotals\n";
        let total = |(dtype, t): (String, Total)| {
            vec![dtype, format!("{} tensors", t.tensors), format!("{} elements", t.elements), mib(t.bytes)]
        };
        let lines: Vec<Vec<String>> = self.totals().into_iter().map(total).collect();
        text += &columns(&[Align::Left, Align::Right, Align::Right, Align::Right], &lines);
        text += "\nmetadata\n";
        let metadata = metadata(self.opened);
        let lines = metadata.iter().map(|(k, v)| vec![one_line(k, 60), one_line(v, 100)]);
        let lines: Vec<Vec<String>> = lines.collect();
        text += &columns(&[Align::Left, Align::Left], &lines);
        text += &format!("fingerprint  {}\n", self.opened.fingerprint());
        if let Some((name, state)) = &self.beside {
            text += &format!("{}  {state}\n", one_line(name, 300));
        }
        text + "\n" + &built_for() + "\n" + &self.fit() + "\n"
    }

    /// The comparison of the configs as a sentence.
    fn fit(&self) -> String {
        match &self.config {
            Fit::None => "no config.json to compare with".into(),
            Fit::Other(why) => format!("this program cannot run it: {}", one_line(why, 300)),
            Fit::Same => "this program runs it".into(),
            Fit::Differs(field, ours, theirs) => {
                let theirs = one_line(theirs, 120);
                format!(
                    "this program cannot run it: {field} is {theirs}, but this program was built for {ours}"
                )
            }
        }
    }

    fn json(&self) -> Value {
        let different = match &self.config {
            Fit::Differs(field, ours, theirs) => json!({"field": field, "built": ours, "file": theirs}),
            _ => Value::Null,
        };
        json!({
            "path": self.opened.path().to_string_lossy(),
            "fingerprint": self.opened.fingerprint(),
            "packed_layout": self.opened.packed().and_then(packed_file::layout_version),
            "packed_file": self.beside.as_ref().map(|(_, state)| state),
            "tensors": tensors(self.opened),
            "not_read": unreadable(self.opened),
            "totals": self.totals(),
            "metadata": metadata(self.opened),
            "built_for": built_for_json(),
            "runs_here": self.config == Fit::Same,
            "difference": different,
            "verdict": self.fit(),
        })
    }
}

fn built_for() -> String {
    use dims::*;
    let mut variants = vec![];
    for (on, name) in [
        (QKV_BIAS, "q/k/v bias"),
        (O_BIAS, "o bias"),
        (QK_NORM, "q/k norm"),
        (POST_NORMS, "post-norms"),
        (WINDOW != 0, "sliding window"),
        (LEARNED_POSITIONS, "learned positions"),
        (TIED, "tied head"),
    ] {
        variants.extend(on.then_some(name));
    }
    format!(
        "built for {MODEL}: {}, {LAYERS} layers, dim {DIM}, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} KV heads, \
         ffn {FFN_DIM}, vocab {VOCAB}, context {MAX_POSITION}, rope theta {}, norm eps {NORM_EPS:e}, {}",
        ARCH.name(),
        ROPE.theta,
        if variants.is_empty() { "no biases".into() } else { variants.join(", ") }
    )
}

fn built_for_json() -> Value {
    use dims::*;
    json!({
        "model": MODEL, "model_type": ARCH.name(), "num_hidden_layers": LAYERS, "hidden_size": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": FFN_DIM, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": TIED, "rms_norm_eps": NORM_EPS, "rope_theta": ROPE.theta,
        "rope_scaling": format!("{:?}", ROPE.scaling),
        "qkv_bias": QKV_BIAS, "o_bias": O_BIAS, "qk_norm": QK_NORM,
    })
}
