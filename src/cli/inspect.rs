//! `inspect`: what a model file holds, this program's or another's, and what this program was built for.

use super::args::default_model;
use super::report::{ReportFormat, Side, columns, tame};
use super::terminal::put;
use crate::config::ModelConfig;
use crate::dims;
use crate::error::Result;
use crate::plan::mib;
use crate::weights::source::Source;
use crate::weights::{ModelPath, PACKED_NAME, pack, read_text};
use clap::Args;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a file holds.
#[derive(Args, Clone)]
pub(super) struct InspectArgs {
    /// Model directory, .safetensors file or packed file [default: the baked model's directory]
    #[arg(value_name = "PATH")]
    pub path: Option<PathBuf>,
    /// The same, as other commands spell it
    #[arg(short = 'm', long, visible_alias = "model", value_name = "PATH", conflicts_with = "path")]
    pub model_path: Option<PathBuf>,
    /// Text, or one JSON object
    #[arg(long, value_enum, default_value = "text")]
    pub format: ReportFormat,
}

pub(super) fn run(args: &InspectArgs) -> Result<()> {
    let path = args.path.clone().or_else(|| args.model_path.clone()).unwrap_or_else(default_model);
    let path = ModelPath::new(&path)?;
    let packed = path.weights.join(PACKED_NAME);
    let source = match Source::open(&path.weights) {
        // A directory may hold nothing but the packed file.
        Err(_) if packed.is_file() => Source::open(&packed)?,
        other => other?,
    };
    let report = Report {
        config: config(&path, &source),
        beside: packed.is_file().then(|| beside(&source, &packed)),
        source: &source,
    };
    match args.format {
        ReportFormat::Text => put(&report.text()),
        ReportFormat::Json => put(&format!("{:#}\n", report.json())),
    }
}

/// How a model's config compares with the baked one.
#[derive(Debug, PartialEq)]
enum Fit {
    /// Neither a file nor in the metadata.
    None,
    /// Not one this program understands.
    Other(String),
    Same,
    /// Field, ours, theirs.
    Differs(&'static str, String, String),
}

/// The config beside the weights, or inside a packed file.
fn config(path: &ModelPath, source: &Source) -> Fit {
    let file = path.dir.join("config.json");
    let text = if file.exists() {
        read_text(&file).map_err(|e| e.to_string())
    } else {
        match source.metadata().get("config") {
            Some(text) => Ok(text.clone()),
            None => return Fit::None,
        }
    };
    match text.and_then(|t| ModelConfig::parse(&t).map_err(|e| e.to_string())) {
        Err(e) => Fit::Other(e),
        Ok(found) => match dims::baked().difference(&found) {
            None => Fit::Same,
            Some((field, ours, theirs)) => Fit::Differs(field, ours, theirs),
        },
    }
}

/// What the packed file beside a checkpoint is worth.
fn beside(source: &Source, packed: &std::path::Path) -> &'static str {
    match Source::open(packed) {
        Err(_) => "unreadable",
        Ok(_) if pack::layout_version(source).is_some() => "shown",
        Ok(p) if pack::layout_version(&p) != Some(pack::LAYOUT) => "of another version",
        Ok(p) if p.metadata().get("source") == Some(&source.fingerprint()) => "of this checkpoint",
        Ok(_) => "of another checkpoint",
    }
}

struct Report<'a> {
    source: &'a Source,
    config: Fit,
    beside: Option<&'static str>,
}

/// Tensors, elements and bytes.
type Total = (usize, u64, u64);

impl Report<'_> {
    /// By element type.
    fn totals(&self) -> BTreeMap<String, Total> {
        let mut totals: BTreeMap<String, Total> = BTreeMap::new();
        for t in self.source.tensors() {
            let bytes = t.data.bytes().len();
            let total = totals.entry(format!("{:?}", t.dtype)).or_default();
            total.0 += 1;
            total.1 += (bytes / t.dtype.size()) as u64;
            total.2 += bytes as u64;
        }
        totals
    }

    fn text(&self) -> String {
        const SIDES: [Side; 4] = [Side::Left, Side::Left, Side::Left, Side::Right];
        let mut lines = vec![vec!["tensor".to_string(), "type".into(), "shape".into(), "bytes".into()]];
        lines.extend(self.source.tensors().map(|t| {
            let bytes = t.data.bytes().len().to_string();
            vec![tame(&t.name, 120), format!("{:?}", t.dtype), format!("{:?}", t.shape), bytes]
        }));
        lines.extend(self.source.unreadable().map(|t| {
            let shape = format!("{:?}", t.shape);
            vec![tame(&t.name, 120), format!("{} (not read)", t.dtype), shape, t.bytes.to_string()]
        }));
        let mut text = format!("{}\n\n{}", self.source.path().display(), columns(&SIDES, &lines));
        text += "\ntotals\n";
        let total = |(dtype, (tensors, elements, bytes)): (String, Total)| {
            vec![dtype, format!("{tensors} tensors"), format!("{elements} elements"), mib(bytes)]
        };
        let lines: Vec<Vec<String>> = self.totals().into_iter().map(total).collect();
        text += &columns(&[Side::Left, Side::Right, Side::Right, Side::Right], &lines);
        text += "\nmetadata\n";
        let metadata = self.source.metadata().iter();
        let lines: Vec<Vec<String>> = metadata.map(|(k, v)| vec![tame(k, 60), tame(v, 100)]).collect();
        text += &columns(&[Side::Left, Side::Left], &lines);
        text += &format!("fingerprint  {}\n", self.source.fingerprint());
        if let Some(beside) = self.beside {
            text += &format!("{PACKED_NAME}  {beside}\n");
        }
        text + "\n" + &built_for() + "\n" + &self.fit() + "\n"
    }

    /// The comparison as a sentence.
    fn fit(&self) -> String {
        match &self.config {
            Fit::None => "there is no config.json to compare with".into(),
            Fit::Other(why) => format!("this program cannot run it: {}", tame(why, 300)),
            Fit::Same => "this program runs it".into(),
            Fit::Differs(field, ours, theirs) => {
                let theirs = tame(theirs, 120);
                format!("this program cannot run it: {field} is {theirs}, but was built in as {ours}")
            }
        }
    }

    fn json(&self) -> Value {
        let tensors: Vec<Value> = self
            .source
            .tensors()
            .map(|t| {
                let bytes = t.data.bytes().len();
                json!({"name": t.name, "dtype": format!("{:?}", t.dtype), "shape": t.shape, "bytes": bytes})
            })
            .collect();
        let unreadable: Vec<Value> = self
            .source
            .unreadable()
            .map(|t| json!({"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.bytes}))
            .collect();
        let totals: BTreeMap<String, Value> = self
            .totals()
            .into_iter()
            .map(|(d, (n, e, b))| (d, json!({"tensors": n, "elements": e, "bytes": b})))
            .collect();
        let different = match &self.config {
            Fit::Differs(field, ours, theirs) => json!({"field": field, "built": ours, "file": theirs}),
            _ => Value::Null,
        };
        json!({
            "path": self.source.path().to_string_lossy(),
            "fingerprint": self.source.fingerprint(),
            "packed_layout": pack::layout_version(self.source),
            "packed_file": self.beside,
            "tensors": tensors,
            "not_read": unreadable,
            "totals": totals,
            "metadata": self.source.metadata(),
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
    for (on, name) in
        [(QKV_BIAS, "q/k/v bias"), (O_BIAS, "o bias"), (QK_NORM, "q/k norm"), (TIED, "tied head")]
    {
        variants.extend(on.then_some(name));
    }
    format!(
        "built for {MODEL}: {}, {LAYERS} layers, dim {DIM}, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} KV heads, \
         ffn {FFN_DIM}, vocab {VOCAB}, context {MAX_POSITION}, rope theta {ROPE_THETA}, norm eps {RMS_EPS:e}, {}",
        ARCH.name(),
        if variants.is_empty() { "no biases".into() } else { variants.join(", ") }
    )
}

fn built_for_json() -> Value {
    use dims::*;
    json!({
        "model": MODEL, "model_type": ARCH.name(), "num_hidden_layers": LAYERS, "hidden_size": DIM,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "intermediate_size": FFN_DIM, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITION,
        "tie_word_embeddings": TIED, "rms_norm_eps": RMS_EPS, "rope_theta": ROPE_THETA,
        "rope_scaling": format!("{ROPE_SCALING:?}"),
        "qkv_bias": QKV_BIAS, "o_bias": O_BIAS, "qk_norm": QK_NORM,
    })
}
