//! Checks that files belong to the model that this program was built for.

use super::checkpoint::Checkpoint;
use crate::dims::{MODEL, baked_config};
use files::config::ModelConfig;
use files::source::path_exists;
use files::text_file::read_text_file;
use files::{Error, Result};
use std::fs;
use std::path::Path;

/// Text of the `config.json` in `dir`, or one made from the checkpoint's GGUF header; compared with the baked model.
///
/// # Errors
///
/// [`Error::Model`]: it is missing, cannot be read, or differs from the baked model.
pub fn load_config(dir: &Path, checkpoint: &Checkpoint) -> Result<String> {
    if let Some(gguf) = checkpoint.gguf() {
        let config = gguf.read_config()?;
        compare_with_baked(gguf.path(), gguf.path(), &config)?;
        return Ok(config.to_json());
    }
    let file = dir.join("config.json");
    if !path_exists(&file)? {
        return Err(Error::model(&file, "is missing; download the whole model"));
    }
    let text = read_text_file(&file)?;
    check_config(&file, &text)?;
    Ok(text)
}

/// Compares the text of `file`, a `config.json`, with the baked model.
///
/// # Errors
///
/// [`Error::Model`]: names the field that differs, both values and the command that rebuilds.
pub(super) fn check_config(file: &Path, text: &str) -> Result<()> {
    let found = ModelConfig::parse(text).map_err(|e| Error::model(file, e))?;
    compare_with_baked(file, file.parent().unwrap_or(Path::new(".")), &found)
}

/// Fails on the first difference from the baked model; names the command that builds for `model`.
fn compare_with_baked(file: &Path, model: &Path, found: &ModelConfig) -> Result<()> {
    let Some((field, here, there)) = baked_config().find_difference(found) else { return Ok(()) };
    let model = fs::canonicalize(model).unwrap_or_else(|_| model.into());
    Err(Error::model(
        file,
        format!(
            "{field} is {there}, but this program was built for {MODEL} with {here}; \
             rebuild: ANTIGRAVITY_MODEL={} cargo build --release",
            model.display()
        ),
    ))
}
