//! `plan`: shows the memory plan without loading the model.

use super::columns::{Align, align_columns};
use crate::cli::args::{Format, GenerateArgs};
use crate::cli::flags::name_flags_in;
use crate::cli::prompts;
use crate::cli::terminal::write_stdout;
use crate::dims;
use crate::run::options::EngineOptions;
use crate::run::plan::{MemoryKind, Plan, WeightsForm, format_mib};
#[cfg(feature = "serve")]
use crate::serve;
use clap::Args;
use files::error::{MAX_LINE_BYTES, one_line};
use files::{Error, Result, bundle, print_stderr};
use serde_json::{Value, json};

/// Flags of `plan`: those of the run to plan for.
#[derive(Args, Clone)]
#[command(mut_arg("format", |arg| arg.help("Text, or one JSON object").hide_possible_values(true)))]
pub struct PlanArgs {
    #[command(flatten)]
    run: GenerateArgs,
    /// Plan for `serve` with N slots: memory with no slot filled, and with all filled
    #[cfg(feature = "serve")]
    #[arg(long, conflicts_with_all = ["batch", "prompts"], value_name = "N", help_heading = "Server")]
    slots: Option<usize>,
    /// Memory of the server's prefix cache
    #[cfg(feature = "serve")]
    #[arg(long, requires = "slots", default_value_t = serve::DEFAULT_CACHE_MIB, value_name = "MIB", help_heading = "Server")]
    cache_mib: u64,
}

impl PlanArgs {
    fn resolve_options(&self) -> Result<EngineOptions> {
        let model = &self.run.model;
        #[cfg(feature = "serve")]
        if let Some(slots) = self.slots {
            return serve::engine_options(model, slots, self.cache_mib);
        }
        Ok(EngineOptions { batch: prompts::count_sequences(&self.run)?, ..model.resolve_options()? })
    }

    /// Memory of a server with no slot filled. If not all slots can be full, lets them share the available memory.
    #[cfg_attr(not(feature = "serve"), expect(unused_variables, reason = "there is no server"))]
    fn empty_server_bytes(&self, plan: &mut Plan) -> Option<u64> {
        #[cfg(feature = "serve")]
        if self.slots.is_some() {
            serve::plan_server(&self.run.model, plan);
            return Some(plan.idle_bytes());
        }
        None
    }
}

/// Prints the plan. If it does not fit, then fails as a run would.
pub fn run(args: &PlanArgs) -> Result<()> {
    let options = args.resolve_options()?;
    let mut plan = match options.open_model() {
        Ok(model) => {
            model.check_config()?;
            Plan::for_model(&model, &options)?
        }
        Err(e @ Error::Model(_))
            if args.run.model.given_path().is_none() && bundle::find_mark(&options.model).is_none() =>
        {
            print_stderr!("{}", name_flags_in(e));
            print_stderr!("planning for a packed file of {}", dims::MODEL);
            Plan::estimate(&options)?
        }
        Err(other) => return Err(other),
    };
    args.run.warnings.print_all();
    let empty = args.empty_server_bytes(&mut plan);
    match args.run.completion.output.format {
        Format::Text => write_stdout(&plan_text(&plan, empty))?,
        Format::Jsonl => write_stdout(&format!("{:#}\n", plan_json(&plan, empty)))?,
    }
    plan.check()
}

fn form_name(plan: &Plan) -> &'static str {
    match plan.form {
        WeightsForm::Packed => "packed file",
        WeightsForm::Checkpoint => "checkpoint",
        WeightsForm::Assumed => "no file yet",
    }
}

/// The first line: fits, or by how much it does not.
fn give_verdict(plan: &Plan) -> String {
    let need = plan.needed_bytes();
    let needs = format!("needs {}", format_mib(need));
    match (plan.memory.usable_bytes(), plan.check()) {
        (None, Ok(())) => format!("{needs}; this system does not report its memory"),
        (Some(have), Ok(())) => format!("fits: {} of {}", needs.trim_end_matches(" MiB"), format_mib(have)),
        (Some(have), Err(_)) if need > have => {
            let [more, have] = [need - have, have].map(format_mib);
            format!("does not fit: {needs}, {more} more than the {have} that are available")
        }
        _ => "does not fit: a limit of this process, or the device's own memory, is too small".into(),
    }
}

fn plan_text(plan: &Plan, empty: Option<u64>) -> String {
    let mut lines: Vec<Vec<String>> = plan
        .plan_items()
        .into_iter()
        .map(|i| vec![i.purpose, i.bytes.to_string(), format_mib(i.bytes), i.kind.name().into()])
        .collect();
    let mut total = |what: &str, bytes: Option<u64>, note: String| {
        let known = bytes.map_or(["?".into(), "?".into()], |b| [b.to_string(), format_mib(b)]);
        let [bytes, mib] = known;
        lines.push(vec![what.into(), bytes, mib, note]);
    };
    let memory = plan.memory;
    if let Some(bytes) = empty {
        total("need, no slot filled", Some(bytes), "own + mapped".into());
    }
    let full = if empty.is_some() { "need, all filled" } else { "need" };
    total(full, Some(plan.needed_bytes()), "own + mapped".into());
    total("peak resident", Some(plan.peak_bytes()), "upper bound".into());
    total("available", memory.usable_bytes(), memory_source(plan));
    let sides = [Align::Left, Align::Right, Align::Right, Align::Left];
    let longest = match memory.usable_bytes().map(|m| plan.longest_context(m)) {
        None => "unknown: this system does not report its memory".to_string(),
        Some(None) => "none: the model does not fit".into(),
        Some(Some(n)) => n.to_string(),
    };
    format!(
        "{}\n\n{} ({}, {})\n\n{}\nlargest --max-seq-len that fits: {longest}\n{}{}{}",
        give_verdict(plan),
        one_line(&plan.options.model.to_string_lossy(), MAX_LINE_BYTES - 40),
        dims::MODEL,
        form_name(plan),
        align_columns(&sides, &lines),
        experts_line(plan),
        sharing_line(plan),
        draft_line(plan)
    )
}

/// A line about experts that stay in the file, which a token reads from there if memory has no room for them.
fn experts_line(plan: &Plan) -> String {
    let ((read, all), kept) = (plan.expert_bytes(), plan.kept_expert_bytes());
    let [of_token, of_all, of_kept] = [read, all, kept].map(format_mib);
    let kept = match plan.options.keep_experts {
        0 => String::new(),
        _ if kept == 0 => "; none are kept: no earlier run has counted their uses".into(),
        _ => format!("; up to {of_kept} of those used most are kept in memory"),
    };
    match all {
        0 => String::new(),
        _ => format!(
            "a token reads {of_token} of {of_all} of experts; what is not in memory is read from the file{kept}\n"
        ),
    }
}

/// A line about server slots that cannot all be full.
fn sharing_line(plan: &Plan) -> String {
    let shared = |bytes| {
        format!("slots share {} of KV cache; requests wait in order when it is full\n", format_mib(bytes))
    };
    plan.shared_rows().map(shared).unwrap_or_default()
}

/// A line about the draft model, which runs in another process.
fn draft_line(plan: &Plan) -> String {
    let o = &plan.options;
    let drafts = o.draft > 0 && o.assistant_folder().is_none();
    let Some(draft) = o.draft_model.as_ref().filter(|_| drafts) else { return String::new() };
    let program = one_line(&draft.to_string_lossy(), MAX_LINE_BYTES / 2);
    format!("the draft model runs in another process; for its plan run `{program} plan`\n")
}

/// The limit that leaves less memory: the container's or the machine's.
fn memory_source(plan: &Plan) -> String {
    let m = plan.memory;
    match (m.available, m.limit_left) {
        (a, Some(left)) if a.is_none_or(|a| left < a) => {
            format!("left of the container's {}", m.limit.map_or("limit".into(), format_mib))
        }
        (Some(_), _) if m.total.is_none() => "as stated".into(),
        (Some(_), _) => "to the machine".into(),
        _ => "not reported by this system".into(),
    }
}

fn plan_json(plan: &Plan, empty: Option<u64>) -> Value {
    let o = &plan.options;
    let items: Vec<Value> = plan
        .plan_items()
        .into_iter()
        .map(|i| {
            let mapped = !matches!(i.kind, MemoryKind::Own | MemoryKind::AddressSpace);
            let (dropped, reserved) = (i.kind == MemoryKind::Reclaimable, i.kind == MemoryKind::AddressSpace);
            json!({"what": i.purpose, "bytes": i.bytes, "mapped": mapped, "may_be_dropped": dropped, "reserved": reserved})
        })
        .collect();
    json!({
        "model": dims::MODEL,
        "path": o.model.to_string_lossy(),
        "form": form_name(plan),
        "weight_type": o.weight_type.to_string(),
        "kv_type": o.kv_types.to_string(),
        "max_seq_len": o.max_seq_len,
        "threads": o.threads,
        "batch": o.sequence_count(),
        "draft_model": o.draft_model.as_ref().map(|program| program.to_string_lossy()),
        "items": items,
        "expert_bytes_per_token": plan.expert_bytes().0,
        "kept_expert_bytes": plan.kept_expert_bytes(),
        "empty_bytes": empty,
        "shared_rows_bytes": plan.shared_rows(),
        "need_bytes": plan.needed_bytes(),
        "peak_bytes": plan.peak_bytes(),
        "memory": {
            "total_bytes": plan.memory.total,
            "available_bytes": plan.memory.available,
            "limit_bytes": plan.memory.limit,
            "limit_left_bytes": plan.memory.limit_left,
        },
        "fits": plan.check().is_ok(),
        "largest_max_seq_len": plan.memory.usable_bytes().map(|m| plan.longest_context(m).unwrap_or(0)),
    })
}
