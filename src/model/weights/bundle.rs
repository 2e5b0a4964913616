//! Writes a bundle: one file with the program and the model's files that it reads.

use super::config::load_config;
use super::convert::LoadOptions;
use super::model_path::OpenModel;
use super::pack::{CalibrationOf, PackTarget, write_error, write_to};
use files::atomic_file::AtomicFile;
use files::bundle::BundleWriter;
use files::model_dir::{POOLING_FILE, TEXT_FILES};
use files::{Error, Result};
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Maximum size of a text file in bytes, above each reader's own limit.
const LIMIT: u64 = 64 << 20;

/// Writes the program and the model to `out`, which appears complete or not at all, and returns its size.
///
/// A packed model is copied; any other is packed first.
///
/// # Errors
///
/// [`Error::Usage`]: `out` is not a regular file, or a packed file has another weight type than asked for.
/// [`Error::Model`]: the model cannot be used. [`Error::Other`]: `out` cannot be written.
pub fn write_bundle(
    model: &OpenModel,
    program: &[u8],
    out: &Path,
    options: &LoadOptions<'_>,
    calibration_of: Option<&CalibrationOf<'_>>,
) -> Result<u64> {
    model.check_config()?;
    model.checkpoint.check_packed_as(model.weight_type)?;
    let fail = |e: io::Error| write_error(out, e);
    let unfinished = AtomicFile::create(out).map_err(fail)?;
    let Some(path) = unfinished.path() else {
        return Err(Error::Usage(format!("{}: is not a regular file; a bundle must be one", out.display())));
    };
    let begun = BundleWriter::new(&unfinished.file, program, &text_files(model)?).map_err(fail)?;
    if let Some(packed) = model.checkpoint.packed().and_then(|packed| packed.only_file()) {
        let mut file = &unfinished.file;
        file.write_all(packed.bytes()).map_err(fail)?;
    } else {
        let config = load_config(&model.path.dir, &model.checkpoint)?;
        let place = PackTarget { file: &unfinished.file, from: begun.model, path: Some(path), name: out };
        write_to(&model.checkpoint, &config, &place, options, calibration_of)?;
    }
    let bytes = begun.finish(path)?;
    // Some file systems have no modes, so a failure is ignored.
    let _ = unfinished.file.set_permissions(Permissions::from_mode(0o755));
    unfinished.commit().map_err(fail)?;
    Ok(bytes)
}

/// The model's text files by name. A GGUF model has none: its packed file holds their content.
fn text_files(model: &OpenModel) -> Result<Vec<(String, Vec<u8>)>> {
    if model.gguf().is_some() {
        return Ok(Vec::new());
    }
    let folder = model.path.text_folder()?;
    let file = |name: &str| Ok(folder.read_file(name, LIMIT)?.map(|bytes| (name.to_string(), bytes)));
    TEXT_FILES.iter().chain([&POOLING_FILE]).filter_map(|name| file(name).transpose()).collect()
}
