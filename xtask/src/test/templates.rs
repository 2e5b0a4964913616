//! Chat templates, rendered by `text::chat` and by jinja2 as transformers does.

use super::report::skip;
use super::{Outcome, cargo, python};
use crate::error::{Error, Result};
use crate::{build, command};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The package whose source distribution has the templates of llama.cpp's tests.
const SOURCES: &str = "llama-cpp-python";

pub fn run() -> Outcome {
    let fetched = python::with_packages("templates", &["jinja2>=3.1,<4"], &["jinja2"])
        .and_then(|python| Ok((fetch_archive(&python)?, python)));
    let (archive, python) = match fetched {
        Ok(fetched) => fetched,
        Err(e) => return Ok(skip(&format!("comparison of chat templates with jinja2: {e}"), python::REMEDY)),
    };
    // With `--workspace`, as the tests have built it already; alone the package has other features.
    command::build(&mut cargo(&["build", "--workspace", "--example", "render_templates"]))?;
    let renderer = build::target_dir().join("debug/examples/render_templates");
    let mut script = Command::new(python);
    script.arg(command::root().join("tests/templates.py")).arg(renderer).arg(archive);
    python::count_promises("a template", &mut script)
}

/// The archive, downloaded the first time.
fn fetch_archive(python: &Path) -> Result<PathBuf> {
    let dir = command::root().join("target/templates/sources");
    if let Some(archive) = archive_in(&dir) {
        return Ok(archive);
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", SOURCES, SOURCES, "--dest"]);
    command::run(pip.arg(&dir))?;
    archive_in(&dir).ok_or_else(|| Error::Failed(format!("pip has downloaded no archive of {SOURCES}")))
}

fn archive_in(dir: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    files.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "gz"))
}
