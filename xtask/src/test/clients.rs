//! The server with real clients: Python packages in an environment of their own, its page in Chromium, and coding
//! agents from npm.

use super::python::count_promises;
use super::report::skip;
use super::{Outcome, python};
use crate::error::{AtPath, Error, Result};
use crate::{build, command, fetch};
use std::path::PathBuf;
use std::process::Command;

const PACKAGES: [&str; 5] = [
    "openai>=2,<4",
    "anthropic>=0.40,<3",
    "litellm>=1.60,<2",
    "langchain-openai>=1,<2",
    "llama-index-embeddings-openai-like<1",
];

/// The agents in the versions that were tested, as they change fast.
const AGENTS: [&str; 3] = ["@openai/codex@~0.171", "@qwen-code/qwen-code@~0.24", "opencode-ai@~1.18"];
/// Their programs.
const AGENT_PROGRAMS: [&str; 3] = ["codex", "qwen", "opencode"];
/// The oldest Node.js that all agents support, and their model.
const NODE: u32 = 22;
const AGENTS_MODEL: &str = "smollm2-135m";

pub fn run() -> Outcome {
    let program = build::build_tested(&build::model_dir("story")?)?;
    let python = python::with_packages(
        "clients",
        &PACKAGES,
        &["openai", "anthropic", "litellm", "langchain_openai", "llama_index.embeddings.openai_like"],
    );
    let mut tally = match python {
        Ok(python) => count_promises(
            "a client",
            Command::new(python).arg(command::root().join("tests/clients.py")).arg(&program),
        )?,
        Err(e) => skip(&format!("clients of the server: {e}"), python::REMEDY),
    };
    tally += match ["chromedriver", "python3"].into_iter().find(|program| !command::is_on_path(program)) {
        None => count_promises(
            "a client",
            Command::new("python3").arg(command::root().join("tests/page.py")).arg(&program),
        )?,
        Some(missing) => skip(
            &format!("the page of the server: {missing} is missing"),
            "sudo apt-get install chromium chromium-driver python3",
        ),
    };
    // Last, as it builds the program for another model.
    tally += run_agents()?;
    Ok(tally)
}

/// Runs coding agents, each with a task.
fn run_agents() -> Outcome {
    let fetched = fetch::fetch_weights(AGENTS_MODEL).and_then(|model| Ok((model, install_agents()?)));
    let (model, modules) = match fetched {
        Ok(both) => both,
        Err(e) => {
            let remedy = "sudo apt-get install nodejs npm python3, and a network for the first time";
            return Ok(skip(&format!("coding agents as clients of the server: {e}"), remedy));
        }
    };
    let program = build::build_tested(&build::model_dir(AGENTS_MODEL)?)?;
    let script = command::root().join("tests/agents.py");
    count_promises("an agent", Command::new("python3").arg(script).arg(program).arg(model).arg(modules))
}

/// The folder of the agents' packages, installed the first time, with Node.js if this machine's is too old.
fn install_agents() -> Result<PathBuf> {
    if let Some(missing) = ["npm", "node"].into_iter().find(|program| !command::is_on_path(program)) {
        return Err(Error::Failed(format!("{missing} is missing")));
    }
    let dir = command::root().join("target/agents");
    // The versions that are installed.
    let (versions, wanted) = (dir.join("versions"), AGENTS.join(" "));
    let modules = dir.join("node_modules");
    let is_there = |program: &&str| modules.join(".bin").join(program).exists();
    if std::fs::read_to_string(&versions).is_ok_and(|found| found == wanted)
        && AGENT_PROGRAMS.iter().all(is_there)
    {
        return Ok(modules);
    }
    std::fs::create_dir_all(&dir).at(&dir)?;
    let mut npm = Command::new("npm");
    npm.args(["install", "--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--prefix"])
        .arg(&dir);
    command::run(npm.args(AGENTS).args(newer_node()?))?;
    std::fs::write(&versions, wanted).at(&versions)?;
    Ok(modules)
}

/// The package of a newer Node.js, if this machine's is too old.
fn newer_node() -> Result<Option<String>> {
    let version = command::stdout(Command::new("node").arg("--version"))?;
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    let major = version.strip_prefix('v').and_then(|v| v.split('.').next()?.parse().ok());
    let arch = if cfg!(target_arch = "aarch64") { "arm64" } else { "x64" };
    Ok(major.is_none_or(|major: u32| major < NODE).then(|| format!("node-linux-{arch}@{NODE}")))
}
