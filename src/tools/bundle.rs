//! `bundle`: writes one executable file with the model inside.

use super::pack::PackingArgs;
use crate::dims;
use crate::model::weights::{ModelPath, bundle};
use crate::run::engine::{template_source, tokenizer_of};
use clap::Args;
use files::bundle::{program_marker, read_program};
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
    /// Write the model alone: the asset of an app, which loads it from a path or a file descriptor
    #[arg(long, conflicts_with = "program")]
    no_program: bool,
}

pub fn run(args: &BundleArgs) -> Result<()> {
    let weights = &args.packing.weights;
    let path = ModelPath::new(&weights.model.model_path()?)?;
    let model = path.open_with_adapters(weights.weight_type, &weights.lora)?;
    let program = match &args.program {
        _ if args.no_program => Vec::new(),
        Some(file) => read_compatible_program(file)?,
        None => {
            let own = std::env::current_exe();
            read_compatible_program(&own.map_err(|e| {
                Error::Other(format!("cannot find this program's own file: {e}; use --program"))
            })?)?
        }
    };
    // Checked here, because errors would otherwise appear only where the bundle runs.
    let tokenizer = tokenizer_of(&model)?;
    template_source(&model).load_template()?;
    args.packing.run(&args.out, (&model.checkpoint, Some(&tokenizer)), |options, calibration_of| {
        bundle::write_bundle(&model, &program, &args.out, options, calibration_of)
    })
}

/// Reads a program and checks that it is built for the same model.
fn read_compatible_program(file: &Path) -> Result<Vec<u8>> {
    let program = read_program(file)?;
    let Some(config) = find_built_config(&program) else {
        let why = "is not a compatible antigravity program; build it from the same sources";
        return Err(Error::io(file, why));
    };
    let Some((field, ours, theirs)) = dims::baked_config().find_difference(&config) else {
        return Ok(program);
    };
    let why = format!(
        "is not built for this program's model, {}: {field} is {theirs}, not {ours}; build it with the same ANTIGRAVITY_MODEL",
        dims::MODEL
    );
    Err(Error::io(file, why))
}

/// The model config stored in a program's file.
fn find_built_config(program: &[u8]) -> Option<ModelConfig> {
    let mark = program_marker();
    let mut found = program.windows(mark.len()).enumerate().filter(|(_, words)| *words == mark.as_bytes());
    found.find_map(|(at, _)| {
        let json = program[at + mark.len()..].split(|&b| b == b'\n').next()?;
        ModelConfig::parse(std::str::from_utf8(json).ok()?).ok()
    })
}
