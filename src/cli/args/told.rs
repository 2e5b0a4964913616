//! Flags that were given but have no effect in this run, or an unlikely one: a line for each. Also what nobody gave, but
//! should know of.

use super::device::BackendName;
use crate::dims::MAX_POSITION;
use crate::run::eviction::{Eviction, Policy, slack};
use clap::ArgMatches;
use clap::parser::ValueSource;
use files::say;
use numeric::topology;
use std::sync::{Mutex, PoisonError};

/// Flags without effect: where that is so, and why.
struct Idle {
    flags: &'static [&'static str],
    holds: fn(&ArgMatches) -> bool,
    why: &'static str,
}

const IDLE: &[Idle] = &[
    Idle {
        flags: &["cl-device", "gpu-attn", "wait-for-gpu", "zero-copy"],
        holds: |m| backend(m) == Some(BackendName::Cpu),
        why: "no effect on the CPU; add --backend opencl",
    },
    Idle {
        flags: &["switch-threshold", "switch-back", "prefill-on"],
        holds: |m| backend(m).is_some_and(|b| b != BackendName::Hybrid),
        why: "no effect without --backend hybrid",
    },
    Idle {
        flags: &["gpu-attn"],
        holds: |m| backend(m) == Some(BackendName::Hybrid),
        why: "no effect with --backend hybrid, whose GPU always attends",
    },
    Idle {
        flags: &["eviction-window", "protected-prefix", "memory-threshold-mb"],
        holds: |m| value(m, "eviction_policy") == Some(Policy::None),
        why: "no effect without an --eviction-policy",
    },
    Idle {
        flags: &["seed", "top-k", "top-p", "min-p", "typical", "xtc-probability"],
        holds: |m| value(m, "temperature") == Some(0f32),
        why: "no effect at --temperature 0",
    },
    Idle {
        flags: &["xtc-threshold"],
        holds: |m| value(m, "xtc_probability").unwrap_or(0f32) == 0.0,
        why: "no effect without --xtc-probability",
    },
    Idle {
        flags: &["dry-base", "dry-allowed-length", "dry-penalty-last-n", "dry-sequence-breaker"],
        holds: |m| value(m, "dry_multiplier") == Some(0f32),
        why: "no effect without --dry-multiplier",
    },
    Idle {
        flags: &["repetition-window"],
        holds: |m| {
            value(m, "repetition_penalty") == Some(1f32)
                && ["presence_penalty", "frequency_penalty"].iter().all(|id| value(m, id) == Some(0f32))
        },
        why: "no effect without a penalty",
    },
    Idle {
        flags: &["kv-type"],
        holds: |m| given(m, "cache-type-k") && given(m, "cache-type-v"),
        why: "no effect beside --cache-type-k and --cache-type-v",
    },
    Idle {
        flags: &["draft-model"],
        holds: |m| value(m, "draft") == Some(0usize),
        why: "no effect at --draft 0",
    },
    Idle {
        flags: &["draft-when"],
        holds: |m| !given(m, "draft-model"),
        why: "no effect without a --draft-model",
    },
];

static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps what is to be told of a command's flags until it is certain that there is no error in them: an error is one
/// line.
pub fn keep(command: &str, m: &ArgMatches) {
    *TOLD.lock().unwrap_or_else(PoisonError::into_inner) = told(command, m);
}

/// Tells it.
pub fn tell() {
    let lines = std::mem::take(&mut *TOLD.lock().unwrap_or_else(PoisonError::into_inner));
    lines.iter().for_each(|line| say!("{line}"));
}

/// What is told of the flags of a command, unless it shall be quiet.
fn told(command: &str, m: &ArgMatches) -> Vec<String> {
    if value(m, "quiet") == Some(true) {
        return Vec::new();
    }
    let idle = IDLE.iter().filter(|idle| (idle.holds)(m));
    let idle =
        idle.flat_map(|idle| idle.flags.iter().filter(|flag| given(m, flag)).map(|flag| (flag, idle.why)));
    let mut lines: Vec<String> = idle.map(|(flag, why)| format!("warning: --{flag}: {why}")).collect();
    if command == "generate" && given(m, "batch") && !given(m, "prompts") {
        lines.push("warning: --batch: no effect without --prompts".into());
    }
    if command == "logits" {
        let idle = ["draft", "draft-model"].into_iter().filter(|flag| given(m, flag));
        lines.extend(idle.map(|flag| format!("warning: --{flag}: no effect, as all tokens are given")));
    }
    if let Some(n) = value::<usize>(m, "max_seq_len").filter(|&n| n > MAX_POSITION && given(m, "max-seq-len"))
    {
        lines.push(format!(
            "warning: --max-seq-len {n}: the model was trained for {MAX_POSITION} tokens; a longer text is likely to \
             make no sense"
        ));
    }
    lines.extend(protected(command, m));
    let cores = topology::allowed_cores().len();
    if let Some(n) = value::<usize>(m, "threads").filter(|&n| cores > 0 && n > cores) {
        lines.push(format!("warning: --threads {n}: slower than {cores}, the cores that there are"));
    }
    lines
}

/// That first tokens stay though nobody asked for it.
fn protected(command: &str, m: &ArgMatches) -> Option<String> {
    let (policy, window) = (value::<Policy>(m, "eviction_policy")?, value::<usize>(m, "eviction_window")?);
    let slots = value::<usize>(m, "max_seq_len")?;
    let eviction = Eviction { policy, window, ..Eviction::NEVER };
    let first = eviction.prefix_of(window.min(slots.saturating_sub(slack(slots))));
    if first == 0 || given(m, "protected-prefix") {
        return None;
    }
    let (name, chat) =
        (policy.name(), if command == "chat" { ", and with them the system message" } else { "" });
    Some(format!(
        "--eviction-policy {name}: the first {first} tokens stay{chat}; --protected-prefix sets another \
         number, or 0"
    ))
}

fn backend(m: &ArgMatches) -> Option<BackendName> {
    value(m, "backend")
}

/// The value of an argument that the command has.
fn value<T: Copy + Send + Sync + 'static>(m: &ArgMatches, id: &str) -> Option<T> {
    m.try_get_one(id).ok().flatten().copied()
}

/// Whether a flag was typed.
fn given(m: &ArgMatches, flag: &str) -> bool {
    let id = flag.replace('-', "_");
    m.try_contains_id(&id).unwrap_or(false) && m.value_source(&id) == Some(ValueSource::CommandLine)
}
