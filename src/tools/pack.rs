//! `pack`: writes the packed model file.

use crate::cli::args::{MAX_THREADS, QuietArgs, WeightArgs};
use crate::cli::signal;
use crate::cli::terminal::{Verbosity, track_progress};
use crate::model::weights::{Checkpoint, LoadOptions, ModelPath, Weights, load_config, pack, read_text_file};
use crate::run::calibration;
use crate::run::engine::tokenizer_in;
use crate::run::plan::format_mib;
use clap::Args;
use files::packed_file::PACKED_NAME;
use files::{Error, Result, atomic_file, print_stderr};
use numeric::topology;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use text::tokenizer::Tokenizer;

/// Flags of `pack`.
#[derive(Args, Clone)]
pub struct PackArgs {
    #[command(flatten)]
    packing: PackingArgs,
    /// File to write [default: model.packed.safetensors in the model's directory, or X.packed.safetensors next to X if
    /// X is a .gguf file or a bundle]
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Flags that `pack` and `bundle` share.
#[derive(Args, Clone)]
pub struct PackingArgs {
    #[command(flatten)]
    pub weights: WeightArgs,
    /// Text whose activations decide which errors count in iq4_nl, up to 4096 tokens [default: one that is part of the
    /// program]
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Number of CPU threads [default: one per performance core]
    #[arg(short, long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    quiet: QuietArgs,
}

pub fn run(args: &PackArgs) -> Result<()> {
    let weights = &args.packing.weights;
    let path = ModelPath::new(&weights.model.model_path()?)?;
    let source = Checkpoint::open(&path.weights)?.with_adapters(&weights.lora)?;
    let out = args.out.clone().unwrap_or_else(|| default_path(&path));
    if out.is_dir() {
        return Err(Error::Usage(format!("--out {}: is a directory; name a file in it", out.display())));
    }
    if path.is_bundle() {
        source.check_packed_as(source.resolve_weight_type(weights.weight_type))?;
        let content = source.packed().and_then(|packed| packed.only_file()).map_or(&[][..], |f| f.bytes());
        return args.packing.run(&out, None, |_, _| {
            atomic_file::write_file(&out, content).map_err(|e| pack::write_error(&out, e))?;
            Ok(content.len() as u64)
        });
    }
    let config = load_config(&path.dir, &source)?;
    // Without a tokenizer there is no calibration; the program that runs the model computes it.
    let tokenizer = tokenizer_in(source.gguf(), &path.weights).ok();
    args.packing.run(&out, tokenizer.as_ref(), |options, calibration_of| {
        pack::write_packed(&source, &config, &out, options, calibration_of)
    })
}

/// The default path of the packed file.
fn default_path(path: &ModelPath) -> PathBuf {
    if path.is_bundle() {
        let mut name = path.weights.clone().into_os_string();
        name.push(".packed.safetensors");
        return name.into();
    }
    path.packed_path().unwrap_or_else(|| path.dir.join(PACKED_NAME))
}

impl PackingArgs {
    /// Tokens of the text that weighs the errors; none without a tokenizer.
    fn weighing_text(&self, tokenizer: Option<&Tokenizer>) -> Result<Vec<u32>> {
        let text = self.calibration.as_deref().map(read_text_file).transpose()?;
        match (tokenizer, &self.calibration) {
            (Some(tokenizer), _) => calibration::encode_weighing_text(tokenizer, text.as_deref()),
            (None, None) => Ok(Vec::new()),
            (None, Some(file)) => Err(Error::Usage(format!(
                "--calibration {}: the model has no tokenizer; leave it out, or put tokenizer.json beside the model",
                file.display()
            ))),
        }
    }

    /// Calls `write` with the resolved flags and a function that computes the calibration, and reports what was written
    /// to `out`.
    pub fn run(
        &self,
        out: &Path,
        tokenizer: Option<&Tokenizer>,
        write: impl FnOnce(&LoadOptions<'_>, Option<&pack::CalibrationOf<'_>>) -> Result<u64>,
    ) -> Result<()> {
        let began = Instant::now();
        signal::watch_signals()?;
        let text = tokenizer.and_then(|t| calibration::encode_text(t).ok());
        let weighing_text = self.weighing_text(tokenizer)?;
        let options = LoadOptions {
            text: &weighing_text,
            weight_type: self.weights.weight_type,
            threads: self.threads.unwrap_or_else(topology::default_threads).clamp(1, MAX_THREADS),
            progress: &track_progress("packing", "tensors", self.quiet.verbosity()),
        };
        let calibration_of = text.as_ref().map(|tokens| {
            |weights: Weights| calibration::compute_calibration(&Arc::new(weights), tokens, options.threads)
        });
        let calibration_of = calibration_of.as_ref().map(|of| of as &pack::CalibrationOf<'_>);
        let bytes = write(&options, calibration_of)?;
        if self.quiet.verbosity() != Verbosity::Quiet {
            let seconds = began.elapsed().as_secs_f64();
            print_stderr!("{}: {} in {seconds:.1} s", out.display(), format_mib(bytes));
        }
        Ok(())
    }
}
