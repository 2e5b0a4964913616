//! Warnings about flags that have no effect in this run, or an effect that is hardly wanted.

use super::model::DEFAULT_CONTEXT;
use crate::dims::{HAS_MTP, MAX_POSITION};
use crate::run::eviction::{Eviction, Policy, slots_to_free};
use crate::run::options::BackendKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use files::print_stderr;
use numeric::topology;

/// Condition under which flags have no effect.
type Condition = fn(&ArgMatches) -> bool;

/// Flags that have no effect under a condition, and the warning.
const UNUSED_FLAGS: &[(&[&str], Condition, &str)] = &[
    (
        &["cl-device", "gpu-attn", "wait-for-gpu", "zero-copy"],
        |m| backend_value(m) == Some(BackendKind::Cpu) && !is_split(m),
        "no effect on the CPU; add --backend opencl",
    ),
    (
        &["switch-threshold", "switch-back", "prefill-on"],
        |m| backend_value(m).is_some_and(|b| b != BackendKind::Hybrid),
        "no effect without --backend hybrid",
    ),
    (
        &["gpu-attn"],
        |m| backend_value(m) == Some(BackendKind::Hybrid),
        "no effect with --backend hybrid: its GPU always computes attention",
    ),
    (
        &["keep-experts"],
        |m| backend_value(m) == Some(BackendKind::OpenCl) && !is_split(m),
        "no effect on an OpenCL device, which has a copy of the experts",
    ),
    (
        &["eviction-window", "protected-prefix", "memory-threshold-mb"],
        |m| arg_value(m, "eviction_policy") == Some(Policy::None),
        "no effect without an --eviction-policy",
    ),
    (
        &["seed", "top-k", "top-p", "min-p", "typical", "xtc-probability"],
        |m| arg_value(m, "temperature") == Some(0f32),
        "no effect at --temperature 0",
    ),
    (
        &["xtc-threshold"],
        |m| arg_value(m, "xtc_probability").unwrap_or(0f32) == 0.0,
        "no effect without --xtc-probability",
    ),
    (
        &["dry-base", "dry-allowed-length", "dry-penalty-last-n", "dry-sequence-breaker"],
        |m| arg_value(m, "dry_multiplier") == Some(0f32),
        "no effect without --dry-multiplier",
    ),
    (
        &["repetition-window"],
        |m| {
            arg_value(m, "repetition_penalty") == Some(1f32)
                && ["presence_penalty", "frequency_penalty"].iter().all(|id| arg_value(m, id) == Some(0f32))
        },
        "no effect without a penalty",
    ),
    (
        &["kv-type"],
        |m| is_given(m, "cache-type-k") && is_given(m, "cache-type-v"),
        "no effect: --cache-type-k and --cache-type-v replace it",
    ),
    (&["draft-model"], |m| arg_value(m, "draft") == Some(0usize), "no effect at --draft 0"),
    (&["draft-when"], |m| !is_given(m, "draft-model") && !HAS_MTP, "no effect without a --draft-model"),
    (&["draft", "draft-model"], |m| has_flag(m, "trace_hash"), "no effect: all tokens are given"),
];

/// Warnings about a command's flags, collected during parsing and printed only if no flag is wrong, because an error
/// is one line.
#[derive(Clone, Default)]
pub struct FlagWarnings(Vec<String>);

impl FlagWarnings {
    /// Adds a warning about a flag.
    pub fn add_warning(&mut self, flag: &str, why: &str) {
        self.0.push(format!("warning: {flag}: {why}"));
    }

    /// Prints the warnings, one per line.
    pub fn print_all(&self) {
        self.0.iter().for_each(|line| print_stderr!("{line}"));
    }
}

/// Has no flags of its own and reads all flags of its command. It must be the command's first field, because clap
/// removes the values of each field from the matches.
impl Args for FlagWarnings {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for FlagWarnings {
    fn from_arg_matches(m: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self(if arg_value(m, "quiet") == Some(true) { Vec::new() } else { collect_warnings(m) }))
    }

    fn update_from_arg_matches(&mut self, m: &ArgMatches) -> Result<(), clap::Error> {
        Self::from_arg_matches(m).map(|new| *self = new)
    }
}

/// One line per warning.
fn collect_warnings(m: &ArgMatches) -> Vec<String> {
    let mut lines = Vec::new();
    for (flags, _, why) in UNUSED_FLAGS.iter().filter(|(_, applies, _)| applies(m)) {
        let given = flags.iter().filter(|flag| is_given(m, flag));
        lines.extend(given.map(|flag| format!("warning: --{flag}: {why}")));
    }
    if let Some(n) = arg_value::<usize>(m, "max_seq_len").filter(|&n| n > MAX_POSITION) {
        lines.push(format!(
            "warning: --max-seq-len {n}: the model was trained for {MAX_POSITION} tokens; longer texts are likely to be \
             incoherent"
        ));
    }
    lines.extend(protected_tokens(m));
    let cores = topology::allowed_cores().len();
    if let Some(n) = arg_value::<usize>(m, "threads").filter(|&n| cores > 0 && n > cores) {
        lines.push(format!(
            "warning: --threads {n} exceeds the {cores} available cores; expect it to be slower"
        ));
    }
    lines
}

/// A line about the first tokens, which some policies protect by default.
fn protected_tokens(m: &ArgMatches) -> Option<String> {
    let (policy, window) =
        (arg_value::<Policy>(m, "eviction_policy")?, arg_value::<usize>(m, "eviction_window")?);
    let slots = arg_value::<usize>(m, "max_seq_len").unwrap_or(DEFAULT_CONTEXT);
    let eviction = Eviction { policy, window, ..Eviction::NEVER };
    let first = eviction.prefix_len(window.min(slots.saturating_sub(slots_to_free(slots))));
    if first == 0 || is_given(m, "protected-prefix") {
        return None;
    }
    let chat = if has_flag(m, "single_turn") { ", nor is the system prompt" } else { "" };
    let name = policy.name();
    Some(format!(
        "--eviction-policy {name}: the first {first} tokens are never evicted{chat}; --protected-prefix changes the number"
    ))
}

/// True if several devices compute the layers, or a device was asked for by its number of them.
fn is_split(m: &ArgMatches) -> bool {
    ["split", "gpu-layers", "cpu-moe"].iter().any(|flag| is_given(m, flag))
}

fn backend_value(m: &ArgMatches) -> Option<BackendKind> {
    arg_value(m, "backend")
}

/// True if the command has this flag.
fn has_flag(m: &ArgMatches, id: &str) -> bool {
    // Its default counts. (`try_contains_id` knows the command's arguments in debug builds only.)
    m.ids().any(|known| known == id)
}

/// The value of an argument; `None` if the command has no such argument.
fn arg_value<T: Copy + Send + Sync + 'static>(m: &ArgMatches, id: &str) -> Option<T> {
    m.try_get_one(id).ok().flatten().copied()
}

/// True if the flag is on the command line.
fn is_given(m: &ArgMatches, flag: &str) -> bool {
    let id = flag.replace('-', "_");
    m.try_contains_id(&id).unwrap_or(false) && m.value_source(&id) == Some(ValueSource::CommandLine)
}
