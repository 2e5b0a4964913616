//! `pack`: writes the packed model file.

use super::args::default_model;
use super::terminal::Progress;
use crate::cpu::topology;
use crate::error::{Error, Result};
use crate::weights::source::Source;
use crate::weights::{LoadOptions, ModelPath, PACKED_NAME, WeightType, check_config, pack, read_text};
use clap::Args;
use std::path::PathBuf;
use std::time::Instant;

/// Packing.
#[derive(Args, Clone)]
pub(super) struct PackArgs {
    /// Model directory or .safetensors file [default: the baked model's directory]
    #[arg(short = 'm', long, visible_alias = "model", value_name = "PATH")]
    model_path: Option<PathBuf>,
    /// The file to write [default: model.packed.safetensors in the model's directory]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Threads [default: the machine's big cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

pub(super) fn run(args: &PackArgs) -> Result<()> {
    let began = Instant::now();
    let path = ModelPath::new(&args.model_path.clone().unwrap_or_else(default_model))?;
    let config = path.dir.join("config.json");
    let text = read_text(&config)?;
    check_config(&config, &text)?;
    let source = Source::open(&path.weights)?;
    let out = args.out.clone().unwrap_or_else(|| path.dir.join(PACKED_NAME));
    if out.is_dir() {
        return Err(Error::Usage(format!("--out {}: is a directory; name a file in it", out.display())));
    }
    let progress = Progress::new("packing tensor", args.quiet);
    let options = LoadOptions {
        weight_type: WeightType::Q4_0,
        threads: args.threads.unwrap_or_else(topology::default_threads).clamp(1, 1024),
        progress: &|done, all| progress.show(done, all),
    };
    let bytes = pack::write(&source, &text, &out, &options)?;
    if !args.quiet {
        let seconds = began.elapsed().as_secs_f64();
        eprintln!("{}: {:.1} MiB in {seconds:.1} s", out.display(), bytes as f64 / 1_048_576.0);
    }
    Ok(())
}
