//! Checks that plans fit, and advice on options if they do not.

use super::{DeviceMemory, Plan, longest_where, mib};
use crate::model::weights::WeightType;
use crate::run::system::Process;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};

/// Name of a command's number of slots in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Context {
    /// The whole context, for commands that generate.
    MaxSeqLen,
    /// A chunk of an evaluated text.
    Chunk,
    /// The longest row of a benchmark.
    Row,
}

impl Context {
    fn asked(self, slots: usize) -> String {
        match self {
            Context::MaxSeqLen => format!("`EngineOptions::max_seq_len` {slots}"),
            Context::Chunk => format!("`Context::Chunk` {slots}"),
            Context::Row => format!("a row of {slots} tokens (`Context::Row`)"),
        }
    }

    fn advised(self, slots: usize) -> String {
        match self {
            Context::Row => format!("rows of {slots} tokens or less"),
            _ => format!("{} or less", self.asked(slots)),
        }
    }
}

/// Tokens of a prefill pass that takes little memory and still uses each weight many times.
const SMALL_CHUNK: usize = 32;

impl Plan {
    /// Checks that the plan fits. If the system does not tell its memory, every plan passes.
    pub fn check(&self) -> Result<()> {
        self.check_for(Context::MaxSeqLen)
    }

    /// [`Plan::check`] with a command's name for the context.
    pub fn check_for(&self, context: Context) -> Result<()> {
        self.check_device(context)?;
        self.check_process(context)?;
        let (need, Some(have)) = (self.need(), self.memory.usable()) else { return Ok(()) };
        if need <= have {
            return Ok(());
        }
        let (model, asked) = (self.options.model.display(), context.asked(self.options.max_seq_len));
        Err(Error::Memory(format!(
            "{model}: needs {} of memory with {asked}, but {} are available; {}",
            mib(need),
            mib(have),
            self.remedy(have, context)
        )))
    }

    /// Checks the limits of the process.
    fn check_process(&self, context: Context) -> Result<()> {
        let Process { address_space, data } = self.memory.process;
        let written = |slots| self.to_map(slots).0;
        let mapped = |slots| self.to_map(slots).1;
        self.check_limit("ulimit -d", data, &written, context)?;
        self.check_limit("ulimit -v", address_space, &mapped, context)
    }

    fn check_limit(
        &self,
        limit: &str,
        left: Option<u64>,
        need: &dyn Fn(usize) -> u64,
        context: Context,
    ) -> Result<()> {
        let (slots, Some(left)) = (self.options.max_seq_len, left) else { return Ok(()) };
        if need(slots) <= left {
            return Ok(());
        }
        let remedy = match longest_where(|slots| need(slots) <= left) {
            Some(n) => format!(", or use {}", context.advised(n)),
            None => String::new(),
        };
        Err(Error::Memory(format!(
            "{}: needs {} of address space with {}, stacks of threads included, but {limit} leaves {}; raise it{remedy}",
            self.options.model.display(),
            mib(need(slots)),
            context.asked(slots),
            mib(left)
        )))
    }

    /// Checks a device's own memory.
    fn check_device(&self, context: Context) -> Result<()> {
        let (Some(DeviceMemory::Own(have)), need) = (self.device, self.on_device()) else { return Ok(()) };
        if need <= have {
            return Ok(());
        }
        let (model, asked) = (self.options.model.display(), context.asked(self.options.max_seq_len));
        Err(Error::Memory(format!(
            "{model}: needs {} of the device's memory with {asked}, but it has {}; use a shorter context or `EngineOptions::backend` cpu",
            mib(need),
            mib(have)
        )))
    }

    /// Advice: the largest context that fits, or settings with which one would.
    fn remedy(&self, have: u64, context: Context) -> String {
        let asked = self.options.max_seq_len;
        if let Some(n) = self.longest(have) {
            let (smaller, flags) = self.with_smaller_cache();
            let more = smaller
                .longest(have)
                .map(|most| most.min(asked))
                .filter(|&most| !flags.is_empty() && most > n);
            let more = more.map_or(String::new(), |most| format!(", {flags} with {}", context.advised(most)));
            return format!("use {}{more}, or close other programs", context.advised(n));
        }
        let (mut smaller, mut flags) = self.with_smaller_cache();
        if smaller.longest(have).is_none() && smaller.options.prefill_chunk > SMALL_CHUNK {
            smaller.options.prefill_chunk = SMALL_CHUNK;
            flags = joined(&flags, &format!("`EngineOptions::prefill_chunk` {SMALL_CHUNK}"));
        }
        match smaller.longest(have) {
            Some(n) => format!("use {flags} with {}", context.advised(n.min(asked))),
            None if self.options.weight_type == WeightType::F32 => {
                "no context fits: use `EngineOptions::weight_type` q4_0, best after antigravity pack".into()
            }
            None => "no context fits: close other programs or use a smaller model".into(),
        }
    }

    /// The plan with the smallest cache type, and the option for it, if it is smaller than now.
    fn with_smaller_cache(&self) -> (Plan, String) {
        let mut smaller = self.clone();
        smaller.options.kv_types = KvTypes::both(KvType::Q4);
        let changed = smaller.options.kv_types != self.options.kv_types;
        (smaller, if changed { "`EngineOptions::kv_types` q4".into() } else { String::new() })
    }
}

fn joined(flags: &str, flag: &str) -> String {
    if flags.is_empty() { flag.into() } else { format!("{flags} {flag}") }
}

/// Checks that sequences of one model, one per plan, fit together. Returns the bytes that all need.
pub fn check_sharing(plans: &[Plan], context: Context, remedy: &str) -> Result<u64> {
    plans.iter().try_for_each(|p| p.check_for(context))?;
    let Some(largest) = plans.iter().max_by_key(|p| p.need()) else { return Ok(0) };
    let all = plans.iter().fold(largest.need(), |sum, p| sum.saturating_add(p.session()));
    let need = all.saturating_sub(largest.session());
    match largest.memory.usable() {
        Some(have) if need > have => Err(Error::Memory(format!(
            "{}: needs {} of memory for the caches of all rows, but {} are available; {remedy}",
            largest.options.model.display(),
            mib(need),
            mib(have)
        ))),
        _ => Ok(need),
    }
}

/// Checks that models with the same context, one per plan, fit together.
pub fn check_apart(plans: &[Plan], context: Context) -> Result<()> {
    if let [one] = plans {
        return one.check_for(context);
    }
    let need = |slots: usize| plans.iter().fold(0u64, |sum, p| sum.saturating_add(p.need_for(slots)));
    let Some((first, have)) = plans.first().and_then(|p| Some((p, p.memory.usable()?))) else {
        return Ok(());
    };
    let slots = first.options.max_seq_len;
    if need(slots) <= have {
        return Ok(());
    }
    let remedy = match longest_where(|slots| need(slots) <= have) {
        Some(n) => format!("use {}", context.advised(n)),
        None => "no context fits: measure them one by one".into(),
    };
    let (asked, need) = (context.asked(slots), mib(need(slots)));
    Err(Error::Memory(format!(
        "{}: needs {need} of memory with {asked} for {} settings at once, but {} are available; {remedy}",
        first.options.model.display(),
        plans.len(),
        mib(have)
    )))
}
