//! A model of experts that memory does not hold: in a control group with half of the model's size, the program lives and
//! writes the text that it writes with enough memory. The experts that it used most stay in memory if asked for.

use super::Outcome;
use super::report::Tally;
use crate::error::{AtPath, Error, Result};
use crate::parity::engine::Engine;
use crate::{build, command, json, size, synth};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

const PROMPT: &[&str] =
    &["-p", "Once upon a time there was", "-n", "64", "--temp", "0", "--ignore-eos", "--threads", "2"];

/// Bytes of experts that a token reads: of four in each of twelve layers three matrices, 18 bytes for 32 values.
const READ: u64 = 12 * 4 * 3 * (256 * 512 / 32 * 18);

/// MiB of experts to keep in memory, of 324.
const KEPT: u64 = 64;

pub fn run() -> Outcome {
    let place = build::target_dir().join("larger");
    fs::create_dir_all(&place).at(&place)?;
    // Twelve layers of 128 experts, of which a token reads four: 3 % of 340 MB.
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 12, "intermediate_size": 512,
        "moe_intermediate_size": 512, "num_experts": 128, "num_experts_per_tok": 4, "norm_topk_prob": true,
        "vocab_size": 2048, "max_position_embeddings": 4096, "bos_token_id": 2046, "eos_token_id": 2047,
    });
    json::write(&place.join("config.json"), &config)?;
    let file = synth::write(&place, Some("q4_0"), &place, 1)?;
    let engine = Engine::build(&place, "larger")?.with_model(&file);
    let packed = place.join("model.packed.safetensors");
    command::run(engine.command("pack").arg("--out").arg(&packed))?;
    let engine = engine.with_model(&packed);
    let mut outcome = compare_texts(&engine, &packed)?;
    outcome.count(
        "the plan says what a token reads of experts",
        check_plan(&mut engine.command("plan"), "expert_bytes_per_token", READ),
    );
    outcome.count("the most used experts stay in memory", check_keeping(&engine, &place.join("state")));
    fs::remove_dir_all(&place).at(&place)?;
    Ok(outcome)
}

/// Fails unless the plan has this number in a field.
fn check_plan(plan: &mut Command, field: &str, wanted: u64) -> Result<()> {
    let plan = command::stdout(plan.args(["--format", "jsonl"]))?;
    let plan: Value = serde_json::from_slice(&plan).map_err(|e| Error::Failed(format!("plan: {e}")))?;
    match plan[field].as_u64() {
        Some(bytes) if bytes == wanted => Ok(()),
        found => Err(Error::Failed(format!("{field} {found:?}, not {wanted}"))),
    }
}

/// Output of a run with `--keep-experts`, and the bytes that it had locked once the model was loaded.
struct KeepingRun {
    text: Vec<u8>,
    said: String,
    locked: u64,
}

impl KeepingRun {
    fn watch(command: &mut Command) -> Result<Self> {
        let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.map_err(|e| command::cannot_start(command, e))?;
        let (mut said, mut locked) = (String::new(), 0);
        for line in BufReader::new(child.stderr.take().expect("invariant: it is piped")).lines() {
            let line = line.map_err(|e| Error::Failed(format!("stderr: {e}")))?;
            if line.contains("stay in memory") {
                let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
                let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
                let kib = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
                locked = kib.unwrap_or(0) << 10;
            }
            said += &(line + "\n");
        }
        let done = child.wait_with_output().map_err(|e| command::cannot_start(command, e))?;
        if done.status.success() {
            Ok(Self { text: done.stdout, said, locked })
        } else {
            Err(Error::Failed(said))
        }
    }

    /// Fails unless it said `words`, locked nothing, and wrote `text`.
    fn expect(&self, words: &str, text: &[u8]) -> Result<()> {
        if self.said.contains(words) && self.locked == 0 && self.text == text {
            return Ok(());
        }
        Err(Error::Failed(format!(
            "no \"{words}\", {} bytes locked, or another text: {}",
            self.locked, self.said
        )))
    }
}

fn check_keeping(engine: &Engine, state: &Path) -> Result<()> {
    let kept = KEPT.to_string();
    let with_flag = |name: &str| {
        let mut command = engine.command(name);
        command.args(["--keep-experts", &kept]).env("XDG_STATE_HOME", state);
        command
    };
    let generate = || {
        let mut command = with_flag("generate");
        command.args(PROMPT);
        command
    };
    let check_planned = |wanted| check_plan(&mut with_flag("plan"), "kept_expert_bytes", wanted);
    check_planned(0)?;
    let first = KeepingRun::watch(&mut generate())?;
    first.expect("the first one that counts", &first.text)?;
    let file = state.join("antigravity/larger-native.experts");
    let once = read_counts(&file)?;
    check_planned(KEPT << 20)?;
    let second = KeepingRun::watch(&mut generate())?;
    // Pages that two experts share are counted for both.
    let is_near = ((KEPT * 7 / 8) << 20..=KEPT << 20).contains(&second.locked);
    if !is_near || second.text != first.text {
        return Err(Error::Failed(format!(
            "{} bytes locked, or another text: {}",
            second.locked, second.said
        )));
    }
    // The same tokens chose the same experts.
    if once.iter().sum::<u64>() < 64 * 11 * 4
        || read_counts(&file)? != once.iter().map(|n| 2 * n).collect::<Vec<_>>()
    {
        return Err(Error::Failed("the uses of experts were not counted".into()));
    }
    KeepingRun::watch(&mut limit_locked(&generate()))?.expect("raise it with ulimit -l", &first.text)?;
    fs::write(&file, "no counts").at(&file)?;
    KeepingRun::watch(&mut generate())?.expect("is damaged", &first.text)?;
    if read_counts(&file)? != once {
        return Err(Error::Failed("the damaged file was not replaced".into()));
    }
    Ok(())
}

/// Reads the counts of the experts of twelve layers, which follow the file's first line.
fn read_counts(file: &Path) -> Result<Vec<u64>> {
    let bytes = fs::read(file).at(file)?;
    let start = bytes.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let counts = bytes[start..].as_chunks().0.iter().map(|count| u64::from_le_bytes(*count));
    Ok(counts.take(12 * 128).collect())
}

/// The command, allowed to lock 64 KiB: root too, without the right to lock more.
fn limit_locked(command: &Command) -> Command {
    let mut shell = if fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0) {
        let mut setpriv = Command::new("setpriv");
        setpriv.args(["--bounding-set", "-ipc_lock", "sh"]);
        setpriv
    } else {
        Command::new("sh")
    };
    shell.args(["-c", "ulimit -l 64 && exec \"$0\" \"$@\""]);
    append_command(shell, command)
}

/// Adds a command and its environment to a shell's arguments.
fn append_command(mut shell: Command, command: &Command) -> Command {
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    shell
}

fn compare_texts(engine: &Engine, model: &Path) -> Outcome {
    let bytes = fs::metadata(model).at(model)?.len();
    let Some(group) = MemoryGroup::create(bytes / 2) else {
        // Some machines let nobody make one.
        eprintln!("******** NOT TRIED: no control group with a limit of memory can be made; run it as root");
        return Ok(Tally::default());
    };
    // Pages that are in memory already do not count for the group that reads them next.
    let from = format!("if={}", model.display());
    command::run(Command::new("dd").args([&from, "iflag=nocache", "count=0", "status=none"]))?;
    let generate = || {
        let mut command = engine.command("generate");
        command.args(PROMPT);
        command
    };
    let began = Instant::now();
    let limited = command::stdout(&mut group.enter(&generate()))?;
    let (limited_time, hits) = (began.elapsed(), group.count_hits());
    let began = Instant::now();
    let free = command::stdout(&mut generate())?;
    let times = [limited_time, began.elapsed()].map(|time| time.as_secs_f64());
    let sizes = [bytes / 2, bytes].map(size::megabytes);
    eprintln!(
        "{} of memory for a model of {}: {:.1} s, {hits} times at the limit; without a limit {:.1} s",
        sizes[0], sizes[1], times[0], times[1]
    );
    if limited != free || free.is_empty() {
        return Err(Error::Failed("the text in little memory is another one, or empty".into()));
    }
    if hits == 0 {
        return Err(Error::Failed("the limit was never reached: the test shows nothing".into()));
    }
    Ok(Tally::ONE)
}

/// A control group of this process's own with a limit of memory; it is removed with the value.
struct MemoryGroup {
    dir: PathBuf,
    /// File with the number of times that the limit was reached: the whole file, or a line `max`.
    hits: &'static str,
}

impl MemoryGroup {
    /// Creates one with a limit of `bytes`; `None` if the system does not allow it.
    fn create(bytes: u64) -> Option<Self> {
        let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
        let path_of = |is_wanted: fn(&str) -> bool| {
            groups.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                is_wanted(controllers).then(|| path.trim_matches('/'))
            })
        };
        let first = path_of(|controllers| controllers.split(',').any(|c| c == "memory"));
        let second = path_of(str::is_empty);
        let places = [
            first.map(|path| {
                (format!("/sys/fs/cgroup/memory/{path}"), "memory.limit_in_bytes", "memory.failcnt")
            }),
            second.map(|path| (format!("/sys/fs/cgroup/{path}"), "memory.max", "memory.events")),
        ];
        places.into_iter().flatten().find_map(|(parent, limit, hits)| {
            let dir = Path::new(&parent).join(format!("antigravity-{}", std::process::id()));
            fs::create_dir(&dir).ok()?;
            let group = Self { dir, hits };
            // Not created: a folder without the controller has no such file.
            let file = fs::OpenOptions::new().write(true).open(group.dir.join(limit));
            std::io::Write::write_all(&mut file.ok()?, bytes.to_string().as_bytes()).ok()?;
            Some(group)
        })
    }

    /// The command, run inside the group.
    fn enter(&self, command: &Command) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(self.dir.join("cgroup.procs"));
        append_command(shell, command)
    }

    fn count_hits(&self) -> u64 {
        let text = fs::read_to_string(self.dir.join(self.hits)).unwrap_or_default();
        let number = text.lines().find_map(|line| line.strip_prefix("max ")).unwrap_or(&text);
        number.trim().parse().unwrap_or(0)
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}
