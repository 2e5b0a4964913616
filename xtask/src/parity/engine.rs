//! Runs the program built for one model.

use crate::error::{AtPath, Error, Result};
use crate::{build, command};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program built for one model, and a place for its files.
pub struct Engine {
    program: PathBuf,
    /// Runs the program, which is of another kind of CPU than this machine's.
    emulator: Option<&'static str>,
    model: PathBuf,
    files: PathBuf,
}

/// Settings of a run.
#[derive(Default, Clone, Copy)]
pub struct Variant<'a> {
    pub flags: &'a [&'a str],
    pub scalar: bool,
    /// On an OpenCL device, with kernels of this name; a word on stderr is a failure: it tells that the CPU took over.
    pub opencl: Option<&'a str>,
}

impl<'a> Variant<'a> {
    pub fn with(flags: &'a [&'a str]) -> Variant<'a> {
        Variant { flags, ..Variant::default() }
    }
}

impl Engine {
    pub fn build(model: &Path, name: &str) -> Result<Engine> {
        Engine::with_program(&build::build_unoptimised(model)?, model, name)
    }

    /// A program for 64-bit Arm, run by `emulator`.
    pub fn emulated(self, emulator: &'static str) -> Engine {
        Engine { emulator: Some(emulator), ..self }
    }

    /// With a program that was built for a model.
    pub fn with_program(built: &Path, model: &Path, name: &str) -> Result<Engine> {
        let files = build::target_dir().join("parity").join(name);
        fs::create_dir_all(&files).at(&files)?;
        // The next model's build takes the name of this one's. A link: copies of all programs would fill gigabytes.
        let program = files.join("antigravity");
        remove_if_there(&program)?;
        fs::hard_link(built, &program).at(&program)?;
        Ok(Engine { program, emulator: None, model: model.into(), files })
    }

    /// This program with another file of its model.
    pub fn with_model(&self, model: &Path) -> Engine {
        let Engine { program, files, .. } = self;
        Engine {
            program: program.clone(),
            emulator: self.emulator,
            model: model.into(),
            files: files.clone(),
        }
    }

    /// Finds out whether its model is a directory, not a file.
    pub fn has_checkpoint(&self) -> bool {
        self.model.is_dir()
    }

    /// The command with the model's path, free of settings from this process's environment.
    pub fn command(&self, name: &str) -> Command {
        let mut command = match self.emulator {
            Some(emulator) => Command::new(emulator),
            None => Command::new(&self.program),
        };
        command.args(self.emulator.map(|_| &self.program));
        crate::command::remove_settings(&mut command);
        let (stack, bytes) = build::UNOPTIMISED_STACK;
        command.env(stack, bytes);
        command.arg(name).arg("-m").arg(&self.model);
        command
    }

    /// The bytes of `logits --out` for these token ids: little-endian f32 `[ids][vocab]`.
    pub fn logits(&self, ids: &[u32], vocab: usize, variant: Variant<'_>) -> Result<Vec<u8>> {
        let tokens = self.files.join("tokens.json");
        let out = self.files.join("logits.f32");
        fs::write(&tokens, format!("{ids:?}")).at(&tokens)?;
        // A file left by an earlier run must not pass for this one's.
        remove_if_there(&out)?;
        let mut command = self.command("logits");
        command.arg("--tokens").arg(&tokens).arg("--out").arg(&out).args(variant.flags);
        if variant.scalar {
            command.env("ANTIGRAVITY_SIMD", "scalar");
        }
        match variant.opencl {
            Some(kernels) => {
                // PoCL compiles in half the time what it does not optimise; `tests/opencl` has it optimise all.
                command
                    .env("ANTIGRAVITY_OPENCL_VARIANT", kernels)
                    .env("POCL_EXTRA_BUILD_FLAGS", "-cl-opt-disable");
                run_silently(command.env("ANTIGRAVITY_OPENCL_CACHE", self.files.join("opencl")))?;
            }
            None => drop(command::stdout(&mut command)?),
        }
        let bytes = fs::read(&out).map_err(|e| {
            let text = format!("`{}` did not write it: {e}", command::show(&command));
            Error::at(&out, text)
        })?;
        remove_if_there(&out)?;
        let wanted = 4 * ids.len() * vocab;
        if bytes.len() != wanted {
            let text =
                format!("`{}` wrote {} bytes instead of {wanted}", command::show(&command), bytes.len());
            return Err(Error::Failed(text));
        }
        Ok(bytes)
    }

    pub fn model(&self) -> &Path {
        &self.model
    }

    /// A file of this name in its place for files.
    pub fn file(&self, name: &str) -> PathBuf {
        self.files.join(name)
    }

    /// The ids of the text in a file, with the tokens that the model puts around a text.
    pub fn tokenize(&self, text: &Path) -> Result<Vec<u32>> {
        let printed =
            command::stdout(self.command("tokenize").arg("--file").arg(text).args(["--format", "json"]))?;
        let value: Value = serde_json::from_slice(&printed).unwrap_or_default();
        serde_json::from_value(value["ids"].clone()).map_err(|e| Error::at(text, format!("token ids: {e}")))
    }

    /// The output of `generate` with these flags, greedily.
    pub fn generate(&self, text: &str, flags: &[&str]) -> Result<Vec<u8>> {
        command::stdout(self.greedy().args(["--prompt", text]).args(flags))
    }

    /// [`Engine::generate`] without its end: a session keeps the beginning of a character, others print that it is one.
    pub fn generate_text(&self, text: &str, flags: &[&str]) -> Result<String> {
        Ok(whole_characters(&String::from_utf8_lossy(&self.generate(text, flags)?)).into())
    }

    /// The output of `generate` for each prompt, one beside the other.
    pub fn generate_batch(&self, prompts: &[&str], flags: &[&str]) -> Result<Vec<String>> {
        let file = self.file("prompts.jsonl");
        let lines: Vec<String> = prompts.iter().map(|prompt| json!(prompt).to_string()).collect();
        fs::write(&file, lines.join("\n")).at(&file)?;
        let mut run = self.greedy();
        run.args(["--batch", &prompts.len().to_string(), "--prompts"]).arg(&file).args(flags);
        let mut texts = vec![None; prompts.len()];
        for line in String::from_utf8_lossy(&command::stdout(&mut run)?).lines() {
            let answer: Value =
                serde_json::from_str(line).map_err(|e| Error::Failed(format!("{line}: {e}")))?;
            let index = answer["index"].as_u64().unwrap_or(u64::MAX) as usize;
            let which =
                texts.get_mut(index).ok_or_else(|| Error::Failed(format!("{line}: which prompt?")))?;
            *which = answer["text"].as_str().map(|text| whole_characters(text).to_string());
        }
        texts.into_iter().collect::<Option<_>>().ok_or_else(|| Error::Failed("a prompt has no answer".into()))
    }

    fn greedy(&self) -> Command {
        let mut command = self.command("generate");
        command.args(["--quiet", "--temperature", "0", "--repetition-penalty", "1"]);
        command
    }
}

/// Without a line's end, and without a character that is not whole.
fn whole_characters(text: &str) -> &str {
    text.trim_end_matches(['\n', char::REPLACEMENT_CHARACTER])
}

/// Runs a command that has nothing to say, but which head it uses where a file has two. PoCL's compiler counts its
/// warnings on stderr where its cache is empty.
fn run_silently(command: &mut Command) -> Result<()> {
    let out = command::output(command)?;
    let said = String::from_utf8_lossy(&out.stderr);
    let quiet =
        said.lines().all(|line| line.ends_with(" generated.") || line.ends_with("using lm_head.weight"));
    if out.status.success() && quiet {
        return Ok(());
    }
    Err(Error::Failed(format!("`{}`: {}: {said}", command::show(command), out.status)))
}

fn remove_if_there(file: &Path) -> Result<()> {
    match fs::remove_file(file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::at(file, e)),
        _ => Ok(()),
    }
}
