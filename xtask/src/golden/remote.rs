//! The golden set on a device, through the deployed program itself: what it generates there is compared
//! with the golden files and with what this machine generates; where it differs, the layer is found.

use super::comparison::{self, Outcome, Row};
use crate::args::Args;
use crate::deploy;
use crate::device::files::{Item, install};
use crate::device::shell;
use crate::device::{self, Device};
use crate::error::{Error, Result};
use crate::json::{self, Node};
use crate::{build, run, sh};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// The checkpoint there, for cases whose weights are not quantised. Named so that the program takes the
/// packed file for all others.
const CHECKPOINT: &str = "checkpoint.safetensors";
const TOKENS: &str = "golden-tokens.json";

/// One golden file.
struct Case {
    name: String,
    /// The flags of its settings, without the model.
    settings: Vec<String>,
    /// The flags that make a text of it.
    generate: Vec<String>,
    exact_weights: bool,
    prompt: Vec<u32>,
    expected: Outcome,
}

/// The program in its two places.
struct Both<'a> {
    device: &'a dyn Device,
    dir: String,
    model: PathBuf,
    program: PathBuf,
}

pub fn run(args: &Args) -> Result<()> {
    let device = device::select(args)?;
    let model = build::chosen_model(args)?;
    let cases = cases(&model)?;
    let mut more = Vec::new();
    if cases.iter().any(|c| c.exact_weights) {
        more.push(Item::new(model.join("model.safetensors"), CHECKPOINT));
    }
    let dir = deploy::deploy(&*device, &model, &more)?;
    let program = build::for_host(Some(&model))?;
    let both = Both { device: &*device, dir, model, program };
    let mut rows = Vec::new();
    let mut differences = Vec::new();
    for case in &cases {
        let began = Instant::now();
        let there = outcome(&case.name, &both.there(case, &case.generate, "generate")?.stdout)?;
        let seconds = began.elapsed().as_secs_f64();
        let here = outcome(&case.name, &both.here(case, &case.generate, "generate")?.stdout)?;
        let row = Row { name: case.name.clone(), there, here, expected: case.expected.clone(), seconds };
        eprintln!("{}: {} {}", device.name(), case.name, if row.passed() { "equal" } else { "DIFFERS" });
        if !row.passed() {
            let layer =
                both.first_difference(case).unwrap_or_else(|e| format!("its layer is not known: {e}"));
            differences.push(format!("{}: {}; {layer}", case.name, comparison::difference(&row)));
        }
        rows.push(row);
    }
    println!("{} ({})", device.name(), device.target());
    print!("{}", comparison::table(&rows));
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::Golden(format!("{}: {}", device.name(), differences.join("\n       "))))
}

impl Both<'_> {
    fn there(&self, case: &Case, flags: &[String], command: &str) -> Result<Output> {
        let mut args = vec![command.to_string()];
        args.extend(case.settings.iter().chain(flags).cloned());
        if case.exact_weights {
            args.extend(["--model-path".into(), format!("{}/{CHECKPOINT}", self.dir)]);
        }
        let answer = shell::capture_program(self.device, &run::program(self.device, &self.dir, args))?;
        if let Some(signal) = shell::signal_in(answer.code) {
            return Err(Error::Failed(format!("{}: {}: {signal}", self.device.name(), case.name)));
        }
        if answer.code != 0 {
            // Its own last line says why, in its own words.
            return Err(Error::Failed(answer.ok(self.device).err().map_or(String::new(), |e| e.to_string())));
        }
        Ok(Output { stdout: answer.stdout, stderr: answer.stderr })
    }

    fn here(&self, case: &Case, flags: &[String], command: &str) -> Result<Output> {
        let mut program = Command::new(&self.program);
        program.arg(command).args(&case.settings).args(flags).arg("--model-path").arg(&self.model);
        let out = sh::output(program.env_remove("ANTIGRAVITY_MODEL"))?;
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        if !out.status.success() {
            return Err(Error::Failed(format!("`{}`: {}", sh::show(&program), sh::last_lines(&stderr, 1))));
        }
        Ok(Output { stdout: String::from_utf8_lossy(&out.stdout).into_owned(), stderr })
    }

    /// The first layer whose residuals differ, over the prompt and the expected text.
    fn first_difference(&self, case: &Case) -> Result<String> {
        let file = build::target_dir().join("device").join(TOKENS);
        let tokens: Vec<u32> = case.prompt.iter().chain(&case.expected.ids).copied().collect();
        std::fs::write(&file, format!("{tokens:?}")).map_err(|e| Error::at(&file, e))?;
        install(self.device, &self.dir, &[Item::new(&file, TOKENS)])?;
        let flags = |tokens: &str| -> Vec<String> {
            ["--tokens", tokens, "--out", "/dev/null", "--trace-hash"].map(String::from).into()
        };
        let there = self.there(case, &flags(TOKENS), "logits")?.stderr;
        let here = self.here(case, &flags(&file.to_string_lossy()), "logits")?.stderr;
        Ok(comparison::first_layer(&there, &here))
    }
}

/// What a program printed.
struct Output {
    stdout: String,
    stderr: String,
}

/// The golden files of a model.
fn cases(model: &Path) -> Result<Vec<Case>> {
    let dir = sh::root().join("tests/golden").join(model.file_name().unwrap_or_default());
    let entries = std::fs::read_dir(&dir);
    let entries =
        entries.map_err(|e| Error::at(&dir, format!("{e}; there are no goldens for this model")))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    files.iter().map(|file| case(file)).collect()
}

fn case(file: &Path) -> Result<Case> {
    let value = json::read(file)?;
    let node = Node { file, value: &value };
    let number = |field: &str, default: f64| value[field].as_f64().unwrap_or(default).to_string();
    let weights = node.text("weights")?;
    let words = |list: &[(&str, String)]| list.iter().flat_map(|(f, v)| [f.to_string(), v.clone()]).collect();
    let mut generate: Vec<String> = words(&[
        ("--prompt", node.text("prompt")?.into()),
        ("--num-tokens", number("tokens", 32.0)),
        ("--temperature", number("temperature", 0.0)),
        ("--repetition-penalty", number("repetition_penalty", 1.0)),
        ("--seed", number("seed", 0.0)),
        ("--format", "jsonl".into()),
    ]);
    generate.push("--quiet".into());
    let expected = node.get("expected")?;
    Ok(Case {
        name: file.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        settings: words(&[
            ("--weight-type", weights.into()),
            ("--cache-type-k", node.text("k")?.into()),
            ("--cache-type-v", node.text("v")?.into()),
        ]),
        generate,
        exact_weights: weights == "f32",
        prompt: ids(expected.get("prompt")?)?,
        expected: Outcome { ids: ids(expected.get("ids")?)?, digest: expected.text("digest")?.into() },
    })
}

fn ids(node: Node<'_>) -> Result<Vec<u32>> {
    serde_json::from_value(node.value.clone()).map_err(|e| Error::at(node.file, format!("token ids: {e}")))
}

/// Reads the JSON lines of `generate`.
fn outcome(case: &str, lines: &str) -> Result<Outcome> {
    let mut found = Outcome::default();
    for line in lines.lines() {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        match value["t"].as_str() {
            Some("token") => found.ids.extend(value["id"].as_u64().and_then(|id| u32::try_from(id).ok())),
            Some("stats") => found.digest = value["logits"].as_str().unwrap_or_default().into(),
            _ => {
                let line = sh::one_line(line);
                return Err(Error::Failed(format!("{case}: this is no line of `generate`: {line}")));
            }
        }
    }
    if found.digest.is_empty() {
        return Err(Error::Failed(format!("{case}: `generate` ended without its last line")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_generate_are_read() {
        let lines = "{\"t\":\"token\",\"id\":36,\"text\":\"a\"}\n{\"t\":\"token\",\"id\":null,\"text\":\"b\"}\n\
            {\"t\":\"stats\",\"logits\":\"1b72\"}\n";
        assert_eq!(outcome("x", lines).unwrap(), Outcome { ids: vec![36], digest: "1b72".into() });
        for hostile in ["", "{\"t\":\"token\",\"id\":36}\n", "\u{1b}[2J\n", "[[[[", "{\"t\":\"stats\"}\n"] {
            let e = outcome("x", hostile).unwrap_err().to_string();
            assert!(e.starts_with("x: ") && !e.contains('\u{1b}'), "{e}");
        }
    }

    #[test]
    fn golden_files_become_flags() {
        let all = cases(&sh::root().join("models/story")).unwrap();
        assert!(all.len() >= 7);
        let sampled = all.iter().find(|c| c.name == "sampled").unwrap();
        assert!(sampled.generate.windows(2).any(|w| w == ["--temperature", "0.8"]));
        assert!(sampled.generate.windows(2).any(|w| w == ["--seed", "42"]));
        assert!(all.iter().all(|c| !c.prompt.is_empty() && !c.expected.ids.is_empty()));
        assert_eq!(all.iter().filter(|c| c.exact_weights).count(), 1);
    }
}
