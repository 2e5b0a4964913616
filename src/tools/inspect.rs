//! `inspect`: shows the contents of any model file, and the model this program was built for.

use super::columns::{Align, ReportFormat, align_columns};
use crate::cli::args::PathArgs;
use crate::cli::terminal::write_stdout;
use crate::dims;
use crate::model::weights::{
    Checkpoint, ModelFile, ModelPath, TensorRole, TensorSpec, WeightType, model_tensors,
};
use crate::run::plan::format_mib;
use clap::Args;
use files::Result;
use files::config::{Experts, ModelConfig, QkNorm};
use files::error::{MAX_LINE_BYTES, is_printable, one_line};
use files::packed_file;
use files::source::UnsupportedTensor;
use files::source::gguf::metadata::Metadata;
use files::source::gguf::value::Value as GgufValue;
use files::text_file::read_text_file;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Flags of `inspect`.
#[derive(Args, Clone)]
pub struct InspectArgs {
    /// Model to inspect, as with --model-path, or a config.json
    #[arg(value_name = "PATH", conflicts_with = "model_path")]
    path: Option<PathBuf>,
    #[command(flatten)]
    model: PathArgs,
    /// Text, or one JSON object
    #[arg(long, value_enum, default_value = "text")]
    format: ReportFormat,
}

pub fn run(args: &InspectArgs) -> Result<()> {
    let given = args.path.as_deref().or(args.model.model_path.as_deref());
    if let Some(config) = given.and_then(find_lone_config) {
        return describe_lone_config(&config, args.format);
    }
    let path = PathArgs { model_path: args.path.clone().or(args.model.model_path.clone()) }.model_path()?;
    let path = ModelPath::new(&path)?;
    let packed = path.packed_path().filter(|packed| packed.is_file());
    let opened = match (Checkpoint::open(&path.weights), &packed) {
        // A directory may hold only the packed file.
        (Err(_), Some(packed)) if path.weights.is_dir() => Checkpoint::open(packed)?,
        (other, _) => other?,
    };
    let found = find_config(&path, &opened);
    let report = ModelReport {
        config: compare_config(found.as_ref()),
        found: found.and_then(|found| found.ok()),
        beside: packed.as_ref().map(|packed| {
            let name = packed.file_name().unwrap_or_default();
            (name.to_string_lossy().into_owned(), packed_state(&opened, packed))
        }),
        opened: &opened,
    };
    match args.format {
        ReportFormat::Text => write_stdout(&report.to_text()),
        ReportFormat::Json => write_stdout(&escape_json(&format!("{:#}\n", report.to_json()))),
    }
}

/// The file if it is a `config.json`, or that of a folder that holds no weights.
fn find_lone_config(path: &Path) -> Option<PathBuf> {
    if path.extension().is_some_and(|extension| extension == "json") {
        return Some(path.into());
    }
    let config = path.join("config.json");
    (config.is_file() && !has_weights(path)).then_some(config)
}

/// True if a folder has a file of weights, perhaps one of several.
fn has_weights(folder: &Path) -> bool {
    let mut files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    files.any(|file| {
        let name = file.file_name();
        let name = name.to_string_lossy();
        name.contains(".safetensors") || name.ends_with(".gguf")
    })
}

/// Says of a config without weights whether a program can run its model.
fn describe_lone_config(file: &Path, format: ReportFormat) -> Result<()> {
    let parsed = ModelConfig::parse(&read_text_file(file)?).map_err(|e| e.to_string());
    let verdict = compare_config(Some(&parsed)).describe();
    let path = file.to_string_lossy();
    match format {
        ReportFormat::Text => {
            let config = parsed.as_ref().ok().map(|config| format!("{}\n", describe_config(config)));
            let path = one_line(&path, MAX_LINE_BYTES);
            write_stdout(&format!("{path}\n\n{}{verdict}\n", config.unwrap_or_default()))
        }
        ReportFormat::Json => {
            let report = json!({"path": path, "built_for": built_model_json(), "verdict": verdict});
            write_stdout(&escape_json(&format!("{report:#}\n")))
        }
    }
}

/// A model's architecture and main sizes.
fn describe_config(config: &ModelConfig) -> String {
    let ModelConfig { arch, layers, dim, heads, kv_heads, experts, .. } = config;
    let experts = describe_experts(experts);
    format!("{}, {layers} layers, dim {dim}, {heads} heads, {kv_heads} KV heads{experts}", arch.name())
}

/// The experts of a model, after a comma; empty if it has none.
fn describe_experts(experts: &Experts) -> String {
    let Experts { count, used, dim, .. } = experts;
    if *count == 0 { String::new() } else { format!(", {used} of {count} experts of {dim}") }
}

/// Escapes characters that control a terminal. JSON has them in strings only, and escapes some itself.
fn escape_json(json: &str) -> String {
    let escape = |c: char| match c {
        c if c == '\n' || is_printable(c) => c.to_string(),
        c => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
    };
    json.chars().map(escape).collect()
}

/// Comparison of a model's config with the built-in one.
#[derive(Debug, PartialEq)]
enum ConfigMatch {
    /// No config, neither as a file nor in the metadata.
    NoConfig,
    /// This program cannot read the config; the reason.
    Unreadable(String),
    Same,
    /// Field, built-in value, value in the file.
    Differs(&'static str, String, String),
}

impl ConfigMatch {
    /// The comparison as a sentence.
    fn describe(&self) -> String {
        match self {
            ConfigMatch::NoConfig => "no config.json to compare with".into(),
            ConfigMatch::Unreadable(why) => format!("no program can run it: {}", one_line(why, 300)),
            ConfigMatch::Same => "this program runs it".into(),
            ConfigMatch::Differs(field, ours, theirs) => {
                let theirs = one_line(theirs, 120);
                format!(
                    "a program built for it can run it; this one cannot: {field} is {theirs}, but it was built for {ours}"
                )
            }
        }
    }
}

/// The config beside the weights, in a packed file, or in a GGUF file's header, or why it cannot be read; `None` if
/// there is none.
fn find_config(path: &ModelPath, opened: &Checkpoint) -> Option<std::result::Result<ModelConfig, String>> {
    let file = path.dir.join("config.json");
    let parsed = |text: &str| ModelConfig::parse(text).map_err(|e| e.to_string());
    match opened.model_file() {
        ModelFile::Gguf(gguf) => Some(gguf.read_config().map_err(|e| e.to_string())),
        ModelFile::Safetensors(_) if file.exists() => {
            Some(read_text_file(&file).map_err(|e| e.to_string()).and_then(|text| parsed(&text)))
        }
        ModelFile::Safetensors(source) => source.metadata().get("config").map(|text| parsed(text)),
    }
}

/// Compares a model's config with the built-in one.
fn compare_config(found: Option<&std::result::Result<ModelConfig, String>>) -> ConfigMatch {
    match found {
        None => ConfigMatch::NoConfig,
        Some(Err(e)) => ConfigMatch::Unreadable(e.clone()),
        Some(Ok(found)) => match dims::baked_config().find_difference(found) {
            None => ConfigMatch::Same,
            Some((field, ours, theirs)) => ConfigMatch::Differs(field, ours, theirs),
        },
    }
}

/// State of the packed file beside a checkpoint.
fn packed_state(opened: &Checkpoint, packed: &Path) -> &'static str {
    let found = Checkpoint::open(packed);
    match found.as_ref().map(Checkpoint::packed) {
        Err(_) => "unreadable",
        Ok(_) if opened.packed().is_some() => "shown",
        Ok(Some(p)) if packed_file::read_layout_version(p) != Some(packed_file::LAYOUT_VERSION) => {
            "of another version"
        }
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
fn list_tensors(opened: &Checkpoint) -> Vec<TensorLine> {
    match opened.model_file() {
        ModelFile::Safetensors(source) => (source.tensors())
            .map(|t| TensorLine::new(&t.name, format!("{:?}", t.dtype), &t.shape, t.data.bytes().len()))
            .collect(),
        ModelFile::Gguf(gguf) => (gguf.tensors())
            .map(|t| TensorLine::new(&t.name, t.block.name(), &t.shape, t.data.bytes().len()))
            .collect(),
    }
}

/// The tensors whose types this program cannot read. (A GGUF file with such tensors does not open.)
fn list_unreadable(opened: &Checkpoint) -> Vec<TensorLine> {
    let ModelFile::Safetensors(source) = opened.model_file() else { return Vec::new() };
    let line = |t: &UnsupportedTensor| TensorLine::new(&t.name, t.dtype.clone(), &t.shape, t.bytes);
    source.unsupported_tensors().map(line).collect()
}

/// Metadata keys and values; arrays in a GGUF file are shown by their length.
fn read_metadata(opened: &Checkpoint) -> BTreeMap<String, String> {
    let shown = |all: &Metadata| {
        let value = |v: &GgufValue| v.as_str().map_or_else(|| v.to_string(), Into::into);
        all.iter().map(|(key, v)| (key.to_string(), value(v))).collect()
    };
    match opened.model_file() {
        ModelFile::Safetensors(source) => source.metadata().clone(),
        ModelFile::Gguf(gguf) => shown(gguf.metadata()),
    }
}

struct ModelReport<'a> {
    opened: &'a Checkpoint,
    config: ConfigMatch,
    /// The model's own config.
    found: Option<ModelConfig>,
    /// Name and state of the packed file.
    beside: Option<(String, &'static str)>,
}

/// Totals over the tensors of one data type.
#[derive(Default, Serialize)]
struct TensorTotals {
    tensors: usize,
    elements: u64,
    bytes: u64,
}

impl ModelReport<'_> {
    /// Totals by data type.
    fn sum_by_dtype(&self) -> BTreeMap<String, TensorTotals> {
        let mut totals: BTreeMap<String, TensorTotals> = BTreeMap::new();
        for t in list_tensors(self.opened) {
            let total = totals.entry(t.dtype).or_default();
            total.tensors += 1;
            total.elements += t.shape.iter().product::<usize>() as u64;
            total.bytes += t.bytes as u64;
        }
        totals
    }

    fn to_text(&self) -> String {
        let path = one_line(&self.opened.path().to_string_lossy(), MAX_LINE_BYTES);
        let facts = self.list_facts().map(|(name, value)| vec![name.to_string(), value]);
        let (built, runs) = (describe_built_model(), self.config.describe());
        let mut text = format!("{path}\n\n{}{runs}\n{built}\n", align_columns(&[Align::Left; 2], &facts));
        let metadata = read_metadata(self.opened);
        let lines = metadata.iter().map(|(k, v)| vec![one_line(k, 60), one_line(v, 100)]);
        let lines: Vec<Vec<String>> = lines.collect();
        text += &format!("\nmetadata\n{}", align_columns(&[Align::Left; 2], &lines));
        text += &format!("fingerprint  {}\n", self.opened.fingerprint());
        if let Some((name, state)) = &self.beside {
            text += &format!("{}  {state}\n", one_line(name, 300));
        }
        format!("{text}\n{}", self.tensor_table())
    }

    /// The facts that are asked for first.
    fn list_facts(&self) -> [(&'static str, String); 5] {
        let (totals, unknown) = (self.sum_by_dtype(), || "unknown".to_string());
        let sum = |count: &dyn Fn(&TensorSpec) -> u64| {
            let counted = |t: &&TensorSpec| !(t.tied && t.role == TensorRole::Matrix);
            model_tensors().iter().filter(counted).map(count).sum::<u64>()
        };
        let baked = || sum(&|t| (t.rows * t.cols) as u64);
        let of_token = match &self.config {
            ConfigMatch::Same if dims::HAS_EXPERTS => {
                let count = sum(&|t| t.share_of_token((t.rows * t.cols) as u64));
                format!(", of which a token reads {:.1}", count as f64 / 1e6)
            }
            _ => String::new(),
        };
        let parameters: Option<u64> = match &self.config {
            ConfigMatch::Same => Some(baked()),
            _ if self.opened.packed().is_some() => None,
            _ => Some(totals.values().map(|t| t.elements).sum()),
        };
        let types = match self.opened.packed() {
            Some(packed) => {
                let weight_type = self.opened.resolve_weight_type(WeightType::Auto);
                let mut counts: BTreeMap<String, usize> = BTreeMap::new();
                packed_file::read_dtypes(packed)
                    .into_values()
                    .for_each(|name| *counts.entry(name).or_default() += 1);
                let others =
                    counts.iter().map(|(name, n)| format!(", {name} ({n} tensors)")).collect::<String>();
                format!("{weight_type}, packed{others}")
            }
            None => totals
                .iter()
                .map(|(dtype, t)| format!("{dtype} ({} tensors)", t.tensors))
                .collect::<Vec<_>>()
                .join(", "),
        };
        let path = self.opened.path();
        let file = path.is_file().then(|| path.metadata().ok()).flatten().map(|file| file.len());
        let config = self.found.as_ref();
        [
            ("architecture", config.map_or_else(unknown, describe_config)),
            (
                "parameters",
                parameters.map_or_else(unknown, |n| format!("{:.1} million{of_token}", n as f64 / 1e6)),
            ),
            ("type", types),
            ("context", config.map_or_else(unknown, |c| format!("{} tokens", c.max_position))),
            ("file size", format_mib(file.unwrap_or_else(|| totals.values().map(|t| t.bytes).sum()))),
        ]
    }

    /// The totals of each data type, then all tensors.
    fn tensor_table(&self) -> String {
        const SIDES: [Align; 4] = [Align::Left, Align::Left, Align::Left, Align::Right];
        let mut lines = vec![vec!["tensor".to_string(), "type".into(), "shape".into(), "bytes".into()]];
        let line = |t: TensorLine, note: &str| {
            let shape = format!("{:?}", t.shape);
            vec![one_line(&t.name, 120), format!("{}{note}", t.dtype), shape, t.bytes.to_string()]
        };
        lines.extend(list_tensors(self.opened).into_iter().map(|t| line(t, "")));
        lines.extend(list_unreadable(self.opened).into_iter().map(|t| line(t, " (unsupported)")));
        let total = |(dtype, t): (String, TensorTotals)| {
            let (tensors, elements) = (format!("{} tensors", t.tensors), format!("{} elements", t.elements));
            vec![dtype, tensors, elements, format_mib(t.bytes)]
        };
        let totals: Vec<Vec<String>> = self.sum_by_dtype().into_iter().map(total).collect();
        let totals = align_columns(&[Align::Left, Align::Right, Align::Right, Align::Right], &totals);
        format!("totals\n{totals}\n{}", align_columns(&SIDES, &lines))
    }

    fn to_json(&self) -> Value {
        let different = match &self.config {
            ConfigMatch::Differs(field, ours, theirs) => {
                json!({"field": field, "built": ours, "file": theirs})
            }
            _ => Value::Null,
        };
        json!({
            "path": self.opened.path().to_string_lossy(),
            "fingerprint": self.opened.fingerprint(),
            "packed_layout": self.opened.packed().and_then(packed_file::read_layout_version),
            "packed_file": self.beside.as_ref().map(|(_, state)| state),
            "tensors": list_tensors(self.opened),
            "not_read": list_unreadable(self.opened),
            "totals": self.sum_by_dtype(),
            "metadata": read_metadata(self.opened),
            "built_for": built_model_json(),
            "runs_here": self.config == ConfigMatch::Same,
            "difference": different,
            "verdict": self.config.describe(),
        })
    }
}

fn describe_built_model() -> String {
    use dims::*;
    let mut variants = vec![];
    for (on, name) in [
        (QKV_BIAS, "q/k/v bias"),
        (O_BIAS, "o bias"),
        (QK_NORM != QkNorm::None, "q/k norm"),
        (POST_NORMS, "post-norms"),
        (WINDOW != 0, "sliding window"),
        (LEARNED_POSITIONS, "learned positions"),
        (TIED, "tied head"),
    ] {
        variants.extend(on.then_some(name));
    }
    format!(
        "built for {MODEL}: {}, {LAYERS} layers, dim {DIM}, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} KV heads, \
         ffn {FFN_DIM}{}, vocab {VOCAB}, context {MAX_POSITION}, rope theta {}, norm eps {NORM_EPS:e}, {}",
        ARCH.name(),
        describe_experts(&EXPERTS),
        ROPE.theta,
        if variants.is_empty() { "no biases".into() } else { variants.join(", ") }
    )
}

fn built_model_json() -> Value {
    use dims::*;
    json!({
        "model": MODEL, "model_type": ARCH.name(), "num_hidden_layers": LAYERS, "hidden_size": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": FFN_DIM, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": TIED, "rms_norm_eps": NORM_EPS, "rope_theta": ROPE.theta,
        "rope_scaling": format!("{:?}", ROPE.scaling),
        "qkv_bias": QKV_BIAS, "o_bias": O_BIAS, "qk_norm": QK_NORM != QkNorm::None,
    })
}
