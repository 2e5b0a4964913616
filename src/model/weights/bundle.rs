//! Writes a bundle: a program and all files of a model that it reads.

use super::config::config_of;
use super::convert::LoadOptions;
use super::model_path::OpenModel;
use super::pack::{CalibrationOf, Place, unwritable, write_to};
use files::atomic_file::Unfinished;
use files::bundle::Begun;
use files::folder::TEXT_FILES;
use files::{Error, Result};
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// More than the longest of them may have.
const LIMIT: u64 = 64 << 20;

/// Writes the model around a program into `out`, which appears whole or not at all, and returns its size.
///
/// A model that is packed is copied, another is packed on the way, as [`pack`](super::pack::write) does.
///
/// # Errors
///
/// [`Error::Usage`]: `out` is no regular file, or a packed file has another type of weights than asked for.
/// [`Error::Model`]: the model cannot be used. [`Error::Other`]: `out` cannot be written.
pub fn write(
    model: &OpenModel,
    program: &[u8],
    out: &Path,
    options: &LoadOptions<'_>,
    calibration_of: Option<&CalibrationOf<'_>>,
) -> Result<u64> {
    model.check_config()?;
    model.checkpoint.check_packed_as(model.weight_type)?;
    let fail = |e: io::Error| unwritable(out, e);
    let unfinished = Unfinished::create(out).map_err(fail)?;
    let Some(path) = unfinished.path() else {
        return Err(Error::Usage(format!("{}: is no regular file; a program is one", out.display())));
    };
    let begun = Begun::new(&unfinished.file, program, &text_files(model)?).map_err(fail)?;
    if let Some(packed) = model.checkpoint.packed().and_then(|packed| packed.only_file()) {
        let mut file = &unfinished.file;
        file.write_all(packed.bytes()).map_err(fail)?;
    } else {
        let config = config_of(&model.path.dir, &model.checkpoint)?;
        let place = Place { file: &unfinished.file, from: begun.model, path: Some(path), name: out };
        write_to(&model.checkpoint, &config, &place, options, calibration_of)?;
    }
    let bytes = begun.finish(path)?;
    // Some file systems have no modes.
    let _ = unfinished.file.set_permissions(Permissions::from_mode(0o755));
    unfinished.finish().map_err(fail)?;
    Ok(bytes)
}

/// The text files of a model by name. What a GGUF file says is in its packed file.
fn text_files(model: &OpenModel) -> Result<Vec<(String, Vec<u8>)>> {
    if model.gguf().is_some() {
        return Ok(Vec::new());
    }
    let folder = model.path.folder()?;
    let file = |name: &str| Ok(folder.read(name, LIMIT)?.map(|bytes| (name.to_string(), bytes)));
    TEXT_FILES.iter().filter_map(|name| file(name).transpose()).collect()
}
