//! `list`: shows the model that the program runs, and the files that it finds for it.

use super::columns::{Align, ReportFormat, align_columns};
use crate::cli::args::PathArgs;
use crate::cli::terminal::write_stdout;
use crate::dims::{ARCH, LAYERS, MAX_POSITION, MODEL};
use crate::model::weights::{ModelPath, WeightType};
use crate::run::plan::format_mib;
use clap::Args;
use files::error::{MAX_LINE_BYTES, escape, one_line};
use files::{Error, Result};
use serde_json::json;
use std::fs;
use std::path::Path;

/// Flags of `list`.
#[derive(Args, Clone)]
pub struct ListArgs {
    #[command(flatten)]
    model: PathArgs,
    /// Text, or one JSON object
    #[arg(long, value_enum, default_value = "text")]
    format: ReportFormat,
}

/// A file of the model.
struct ModelFile {
    name: String,
    bytes: u64,
    purpose: &'static str,
}

pub fn run(args: &ListArgs) -> Result<()> {
    let path = ModelPath::new(&args.model.model_path()?)?;
    let used = path.open(WeightType::Auto)?.checkpoint.path().to_owned();
    let files =
        if path.dir.is_dir() { find_files(&path.dir, &used)? } else { vec![read_file(&used, &used)?] };
    let text = match args.format {
        ReportFormat::Text => files_text(&path.dir, &files),
        ReportFormat::Json => {
            let entry = |f: &ModelFile| json!({"name": f.name, "bytes": f.bytes, "use": f.purpose});
            let files: Vec<_> = files.iter().map(entry).collect();
            format!("{}\n", json!({"model": MODEL, "path": path.dir.to_string_lossy(), "files": files}))
        }
    };
    write_stdout(&text)
}

/// The files of a directory that have to do with a model, by name.
fn find_files(dir: &Path, used: &Path) -> Result<Vec<ModelFile>> {
    let entries = fs::read_dir(dir).map_err(|e| Error::io(dir, e))?;
    let paths = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file());
    let mut files = paths.map(|path| read_file(&path, used)).collect::<Result<Vec<_>>>()?;
    files.retain(|file| !file.purpose.is_empty());
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn read_file(path: &Path, used: &Path) -> Result<ModelFile> {
    let bytes = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_weights = name.ends_with(".safetensors") || name.ends_with(".gguf");
    // A directory stands for its checkpoint, which may be in several files.
    let is_checkpoint = name.ends_with(".safetensors") && !name.ends_with(".packed.safetensors");
    let purpose = match &*name {
        _ if path == used || (is_checkpoint && path.parent() == Some(used)) => "weights",
        "config.json" => "sizes",
        "tokenizer.json" => "tokenizer",
        "tokenizer_config.json" | "chat_template.jinja" | "chat_template.json" => "chat template",
        "generation_config.json" => "recommended sampling",
        _ if is_weights => "weights, not used",
        _ => "",
    };
    Ok(ModelFile { name: escape(&name).to_string(), bytes, purpose })
}

fn files_text(place: &Path, files: &[ModelFile]) -> String {
    let size = |bytes: u64| match bytes {
        0..0x10_0000 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format_mib(bytes),
    };
    let row = |f: &ModelFile| vec![format!("  {}", f.name), size(f.bytes), f.purpose.to_owned()];
    format!(
        "{MODEL}: {}, {LAYERS} layers, trained for {MAX_POSITION} tokens\n{}\n{}",
        ARCH.name(),
        one_line(&place.to_string_lossy(), MAX_LINE_BYTES),
        align_columns(&[Align::Left, Align::Right, Align::Left], &files.iter().map(row).collect::<Vec<_>>())
    )
}
