//! `plan`: shows the memory plan without loading the model.

use super::columns::{Align, columns};
use crate::cli::args::{Format, GenerateArgs};
use crate::cli::flags::name_flags_in;
use crate::cli::prompts;
use crate::cli::terminal::put;
use crate::dims;
use crate::model::weights::ModelPath;
use crate::run::options::EngineOptions;
use crate::run::plan::{Form, Kind, Plan, mib};
#[cfg(feature = "serve")]
use crate::serve;
use clap::Args;
use files::error::{LINE, one_line};
use files::{Error, Result, bundle, say};
use serde_json::{Value, json};

/// Flags of `plan`: those of the run to plan for.
#[derive(Args, Clone)]
#[command(mut_arg("format", |arg| arg.help("Text, or one JSON object").hide_possible_values(true)))]
#[cfg_attr(feature = "serve", command(mut_arg("max_seq_len", |arg| {
    arg.default_value_if("slots", clap::builder::ArgPredicate::IsPresent, serve::CONTEXT)
})))]
pub struct PlanArgs {
    #[command(flatten)]
    run: GenerateArgs,
    /// Plan for `serve` with N slots: memory with no slot filled, and with all filled
    #[cfg(feature = "serve")]
    #[arg(long, conflicts_with_all = ["batch", "prompts"], value_name = "N", help_heading = "Server")]
    slots: Option<usize>,
    /// Memory of the server's prefix cache
    #[cfg(feature = "serve")]
    #[arg(long, requires = "slots", default_value_t = serve::CACHE_MIB, value_name = "MIB", help_heading = "Server")]
    cache_mib: u64,
}

impl PlanArgs {
    fn settings(&self) -> Result<EngineOptions> {
        let model = &self.run.model;
        #[cfg(feature = "serve")]
        if let Some(slots) = self.slots {
            return serve::settings(model, slots, self.cache_mib);
        }
        Ok(EngineOptions { batch: prompts::together(&self.run)?, ..model.resolve()? })
    }

    /// Memory of a server with no slot filled. If not all slots can be full, lets them share the available memory.
    #[cfg_attr(not(feature = "serve"), expect(unused_variables, reason = "there is no server"))]
    fn empty(&self, plan: &mut Plan) -> Option<u64> {
        #[cfg(feature = "serve")]
        if self.slots.is_some() {
            plan.add_requests();
            plan.share_rows();
            return Some(plan.empty());
        }
        None
    }
}

/// Prints the plan. If it does not fit, then fails as a run would.
pub fn run(args: &PlanArgs) -> Result<()> {
    let options = args.settings()?;
    let mut plan = match ModelPath::new(&options.model).and_then(|path| path.open(options.weight_type)) {
        Ok(model) => {
            model.check_config()?;
            Plan::of(&model, &options)?
        }
        Err(e @ Error::Model(_))
            if args.run.model.given_path().is_none() && bundle::start(&options.model).is_none() =>
        {
            say!("{}", name_flags_in(e));
            say!("planning for a packed file of {}", dims::MODEL);
            Plan::assumed(&options)?
        }
        Err(other) => return Err(other),
    };
    args.run.warnings.print();
    let empty = args.empty(&mut plan);
    match args.run.completion.output.format {
        Format::Text => put(&text(&plan, empty))?,
        Format::Jsonl => put(&format!("{:#}\n", json(&plan, empty)))?,
    }
    plan.check()
}

fn form(plan: &Plan) -> &'static str {
    match plan.form {
        Form::Packed => "packed file",
        Form::Checkpoint => "checkpoint",
        Form::Assumed => "no file yet",
    }
}

fn text(plan: &Plan, empty: Option<u64>) -> String {
    let mut lines: Vec<Vec<String>> = plan
        .items()
        .into_iter()
        .map(|i| vec![i.what, i.bytes.to_string(), mib(i.bytes), i.kind.name().into()])
        .collect();
    let mut total = |what: &str, bytes: Option<u64>, note: String| {
        let known = bytes.map_or(["?".into(), "?".into()], |b| [b.to_string(), mib(b)]);
        let [bytes, mib] = known;
        lines.push(vec![what.into(), bytes, mib, note]);
    };
    let memory = plan.memory;
    if let Some(bytes) = empty {
        total("need, no slot filled", Some(bytes), "own + mapped".into());
    }
    let full = if empty.is_some() { "need, all filled" } else { "need" };
    total(full, Some(plan.need()), "own + mapped".into());
    total("peak resident", Some(plan.peak()), "upper bound".into());
    total("available", memory.usable(), memory_source(plan));
    let sides = [Align::Left, Align::Right, Align::Right, Align::Left];
    let longest = match memory.usable().map(|m| plan.longest(m)) {
        None => "unknown: this system does not report its memory".to_string(),
        Some(None) => "none: the model does not fit".into(),
        Some(Some(n)) => n.to_string(),
    };
    format!(
        "{} ({}, {})\n\n{}\nlargest --max-seq-len that fits: {longest}\n{}{}",
        one_line(&plan.options.model.to_string_lossy(), LINE - 40),
        dims::MODEL,
        form(plan),
        columns(&sides, &lines),
        sharing(plan),
        draft(plan)
    )
}

/// A line about server slots that cannot all be full.
fn sharing(plan: &Plan) -> String {
    let shared =
        |bytes| format!("slots share {} of KV cache; requests wait in order when it is full\n", mib(bytes));
    plan.shared_rows().map(shared).unwrap_or_default()
}

/// A line about the draft model, which runs in another process.
fn draft(plan: &Plan) -> String {
    let Some(draft) = plan.options.draft_model.as_ref().filter(|_| plan.options.draft > 0) else {
        return String::new();
    };
    let program = one_line(&draft.program.to_string_lossy(), LINE / 2);
    format!("the draft model runs in another process; for its plan run `{program} plan`\n")
}

/// The limit that leaves less memory: the container's or the machine's.
fn memory_source(plan: &Plan) -> String {
    let m = plan.memory;
    match (m.available, m.limit_left) {
        (a, Some(left)) if a.is_none_or(|a| left < a) => {
            format!("left of the container's {}", m.limit.map_or("limit".into(), mib))
        }
        (Some(_), _) if m.total.is_none() => "as stated".into(),
        (Some(_), _) => "to the machine".into(),
        _ => "not reported by this system".into(),
    }
}

fn json(plan: &Plan, empty: Option<u64>) -> Value {
    let o = &plan.options;
    let items: Vec<Value> = plan
        .items()
        .into_iter()
        .map(|i| {
            let mapped = !matches!(i.kind, Kind::Own | Kind::Reserved);
            let (dropped, reserved) = (i.kind == Kind::Dropped, i.kind == Kind::Reserved);
            json!({"what": i.what, "bytes": i.bytes, "mapped": mapped, "may_be_dropped": dropped, "reserved": reserved})
        })
        .collect();
    json!({
        "model": dims::MODEL,
        "path": o.model.to_string_lossy(),
        "form": form(plan),
        "weight_type": o.weight_type.to_string(),
        "kv_type": o.kv_types.to_string(),
        "max_seq_len": o.max_seq_len,
        "threads": o.threads,
        "batch": o.sequences(),
        "draft_model": o.draft_model.as_ref().map(|draft| draft.program.to_string_lossy()),
        "items": items,
        "empty_bytes": empty,
        "shared_rows_bytes": plan.shared_rows(),
        "need_bytes": plan.need(),
        "peak_bytes": plan.peak(),
        "memory": {
            "total_bytes": plan.memory.total,
            "available_bytes": plan.memory.available,
            "limit_bytes": plan.memory.limit,
            "limit_left_bytes": plan.memory.limit_left,
        },
        "fits": plan.check().is_ok(),
        "largest_max_seq_len": plan.memory.usable().map(|m| plan.longest(m).unwrap_or(0)),
    })
}
