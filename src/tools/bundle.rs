//! `bundle`: writes one executable file with the model inside.

use super::pack::PackingArgs;
use crate::dims;
use crate::model::weights::{ModelPath, bundle};
use crate::run::engine::{template_source, tokenizer_of};
use clap::Args;
use files::bundle::{built_for, program};
use files::config::ModelConfig;
use files::{Error, Result};
use std::path::{Path, PathBuf};

/// Flags of `bundle`.
#[derive(Args, Clone)]
pub struct BundleArgs {
    #[command(flatten)]
    packing: PackingArgs,
    /// File to write
    #[arg(short, long, value_name = "FILE")]
    out: PathBuf,
    /// Program to bundle: another build for the same model, for a phone for example [default: this program]
    #[arg(long, value_name = "FILE")]
    program: Option<PathBuf>,
}

pub fn run(args: &BundleArgs) -> Result<()> {
    let weights = &args.packing.weights;
    let model = ModelPath::new(&weights.model.path()?)?.open(weights.weight_type)?;
    let program = match &args.program {
        Some(file) => checked(file)?,
        None => {
            let own = std::env::current_exe();
            checked(&own.map_err(|e| {
                Error::Other(format!("cannot find this program's own file: {e}; use --program"))
            })?)?
        }
    };
    // Checked here, because errors would otherwise appear only where the bundle runs.
    let tokenizer = tokenizer_of(&model)?;
    template_source(&model).load()?;
    args.packing.run(&args.out, Some(&tokenizer), |options, calibration_of| {
        bundle::write(&model, &program, &args.out, options, calibration_of)
    })
}

/// Reads a program and checks that it is built for the same model.
fn checked(file: &Path) -> Result<Vec<u8>> {
    let program = program(file)?;
    let Some(config) = config_of(&program) else {
        let why = "is not a compatible antigravity program; build it from the same sources";
        return Err(Error::io(file, why));
    };
    let Some((field, ours, theirs)) = dims::baked().difference(&config) else { return Ok(program) };
    let why = format!(
        "is not built for this program's model, {}: {field} is {theirs}, not {ours}; build it with the same ANTIGRAVITY_MODEL",
        dims::MODEL
    );
    Err(Error::io(file, why))
}

/// The model config stored in a program's file.
fn config_of(program: &[u8]) -> Option<ModelConfig> {
    let mark = built_for();
    let mut found = program.windows(mark.len()).enumerate().filter(|(_, words)| *words == mark.as_bytes());
    found.find_map(|(at, _)| {
        let json = program[at + mark.len()..].split(|&b| b == b'\n').next()?;
        ModelConfig::parse(std::str::from_utf8(json).ok()?).ok()
    })
}
