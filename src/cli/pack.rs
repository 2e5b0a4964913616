//! `pack`: writes the packed model file.

use super::args::{QuietArgs, WeightArgs};
use super::signal;
use super::terminal::{Progress, Verbosity};
use crate::model::weights::{Checkpoint, LoadOptions, ModelPath, Weights, config_of, pack};
use crate::run::engine::tokenizer_in;
use crate::run::key_means;
use clap::Args;
use files::packed_file::PACKED_NAME;
use files::{Error, Result, say};
use numeric::topology;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Packing.
#[derive(Args, Clone)]
pub(super) struct PackArgs {
    #[command(flatten)]
    weights: WeightArgs,
    /// File to write [default: model.packed.safetensors in the model's directory, or X.gguf.packed.safetensors beside
    /// X.gguf]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Threads [default: the machine's big cores]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    quiet: QuietArgs,
}

pub(super) fn run(args: &PackArgs) -> Result<()> {
    let began = Instant::now();
    let path = ModelPath::new(&args.weights.model.path()?)?;
    let source = Checkpoint::open(&path.weights)?;
    let config = config_of(&path.dir, &source)?;
    let beside = || path.packed().unwrap_or_else(|| path.dir.join(PACKED_NAME));
    let out = args.out.clone().unwrap_or_else(beside);
    if out.is_dir() {
        return Err(Error::Usage(format!("--out {}: is a directory; name a file in it", out.display())));
    }
    signal::watch()?;
    let progress = Progress::new("packing tensor", args.quiet.verbosity());
    let options = LoadOptions {
        weight_type: args.weights.weight_type,
        threads: args.threads.unwrap_or_else(topology::default_threads).clamp(1, 1024),
        progress: &|done, all| progress.show(done, all),
    };
    // Where there is no tokenizer, nobody can run the model from here; whoever does will compute them.
    let tokens = tokenizer_in(source.gguf(), &path.weights).and_then(|t| key_means::tokens(&t));
    let means_of = tokens.ok().map(|tokens| {
        move |weights: Weights| key_means::compute(&Arc::new(weights), &tokens, options.threads)
    });
    let means_of = means_of.as_ref().map(|of| of as &pack::MeansOf<'_>);
    let bytes = pack::write(&source, &config, &out, &options, means_of)?;
    if args.quiet.verbosity() != Verbosity::Quiet {
        let seconds = began.elapsed().as_secs_f64();
        say!("{}: {:.1} MiB in {seconds:.1} s", out.display(), bytes as f64 / 1_048_576.0);
    }
    Ok(())
}
