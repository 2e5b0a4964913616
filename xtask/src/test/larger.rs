//! A model of experts that memory does not hold: in a control group with half of the model's size, the program lives and
//! writes the text that it writes with enough memory.

use super::Outcome;
use super::report::Tally;
use crate::error::{AtPath, Error, Result};
use crate::parity::engine::Engine;
use crate::{build, command, json, size, synth};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const PROMPT: &[&str] =
    &["-p", "Once upon a time there was", "-n", "64", "--temp", "0", "--ignore-eos", "--threads", "2"];

/// Bytes of experts that a token reads: of four in each of twelve layers three matrices, 18 bytes for 32 values.
const READ: u64 = 12 * 4 * 3 * (256 * 512 / 32 * 18);

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
    outcome.count("the plan says what a token reads of experts", check_plan(&engine));
    fs::remove_dir_all(&place).at(&place)?;
    Ok(outcome)
}

fn check_plan(engine: &Engine) -> Result<()> {
    let plan = command::stdout(engine.command("plan").args(["--format", "jsonl"]))?;
    let plan: Value = serde_json::from_slice(&plan).map_err(|e| Error::Failed(format!("plan: {e}")))?;
    match plan["expert_bytes_per_token"].as_u64() {
        Some(READ) => Ok(()),
        found => Err(Error::Failed(format!("{found:?} bytes, not {READ}"))),
    }
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
        shell.arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        shell
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
