//! `pack`: writes the packed model file.

use crate::cli::args::{MAX_THREADS, QuietArgs, WeightArgs};
use crate::cli::signal;
use crate::cli::terminal::{Verbosity, track_progress};
use crate::model::cpu::InputSquares;
use crate::model::weights::{
    Checkpoint, Importance, ImportanceFile, LoadOptions, ModelPath, Weights, load_config, pack,
};
use crate::run::calibration;
use crate::run::engine::tokenizer_in;
use crate::run::plan::format_mib;
use clap::Args;
use files::error::{MAX_LINE_BYTES, one_line};
use files::packed_file::PACKED_NAME;
use files::text_file::read_text_file;
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
    /// File that decides which errors count in q4 and iq4_nl: a text, of which up to 4096 tokens are read, or an
    /// importance file of llama.cpp (.gguf, .dat) [default: a text that is part of the program]
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
        return args.packing.run(&out, (&source, None), |_, _| {
            atomic_file::write_file(&out, content).map_err(|e| pack::write_error(&out, e))?;
            Ok(content.len() as u64)
        });
    }
    let config = load_config(&path.dir, &source)?;
    // Without a tokenizer there is no calibration; the program that runs the model computes it.
    let tokenizer = tokenizer_in(source.gguf(), &path.weights).ok();
    args.packing.run(&out, (&source, tokenizer.as_ref()), |options, calibration_of| {
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
    /// Measurements and tokens that weigh the errors of a checkpoint's columns: those of `--calibration`, or the tokens
    /// of the program's own text; none without a tokenizer.
    fn read_importance(
        &self,
        source: &Checkpoint,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<(Option<InputSquares>, Vec<u32>)> {
        let Some(file) = &self.calibration else {
            let text = tokenizer.map(|t| calibration::encode_weighing_text(t, None)).transpose()?;
            return Ok((None, text.unwrap_or_default()));
        };
        let unusable = |why: String| Err(Error::Usage(format!("--calibration {}: {why}", file.display())));
        let weight_type = source.resolve_weight_type(self.weights.weight_type);
        if !weight_type.is_calibrated() {
            return unusable(format!("{weight_type} weights do not use it; add --weight-type q4 or iq4_nl"));
        }
        if let Some(measured) = ImportanceFile::open(file)? {
            return Ok((Some(measured.input_squares(source)?), Vec::new()));
        }
        let Some(tokenizer) = tokenizer else {
            let remedy = "leave it out, or put tokenizer.json beside the model";
            return unusable(format!("the model has no tokenizer; {remedy}"));
        };
        Ok((None, calibration::encode_weighing_text(tokenizer, Some(&read_text_file(file)?))?))
    }

    /// Calls `write` with the resolved flags and a function that computes the calibration, and reports what was written
    /// to `out`.
    pub fn run(
        &self,
        out: &Path,
        (source, tokenizer): (&Checkpoint, Option<&Tokenizer>),
        write: impl FnOnce(&LoadOptions<'_>, Option<&pack::CalibrationOf<'_>>) -> Result<u64>,
    ) -> Result<()> {
        let began = Instant::now();
        signal::watch_signals()?;
        if let Some(losses) = source.describe_losses(self.weights.weight_type) {
            print_stderr!("{}", one_line(&losses, MAX_LINE_BYTES));
        }
        let text = tokenizer.and_then(|t| calibration::encode_text(t).ok());
        let (measured, weighing_text) = self.read_importance(source, tokenizer)?;
        let threads = self.threads.unwrap_or_else(topology::default_threads).clamp(1, MAX_THREADS);
        let options = LoadOptions {
            importance: measured.as_ref().map_or(Importance::Text(&weighing_text), Importance::Known),
            progress: &track_progress("packing", "tensors", self.quiet.verbosity()),
            ..LoadOptions::new(self.weights.weight_type, threads)
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
