//! The server beside real clients: Python packages in an environment of their own, and its page in Chromium.

use super::python::said_by;
use super::report::skip;
use super::{Outcome, python};
use crate::{build, sh};
use std::process::Command;

const PACKAGES: [&str; 3] = ["openai>=2,<4", "anthropic>=0.40,<3", "litellm>=1.60,<2"];

pub fn run() -> Outcome {
    let program = build::tested(&build::model_dir("story")?)?;
    let python = python::with_packages("clients", &PACKAGES, &["openai", "anthropic", "litellm"]);
    let mut tally = match python {
        Ok(python) => {
            said_by("a client", Command::new(python).arg(sh::root().join("tests/clients.py")).arg(&program))?
        }
        Err(e) => skip(&format!("clients of the server: {e}"), python::REMEDY),
    };
    tally += match ["chromedriver", "python3"].into_iter().find(|program| !sh::on_path(program)) {
        None => {
            said_by("a client", Command::new("python3").arg(sh::root().join("tests/page.py")).arg(&program))?
        }
        Some(missing) => skip(
            &format!("the page of the server: {missing} is missing"),
            "sudo apt-get install chromium chromium-driver python3",
        ),
    };
    Ok(tally)
}
