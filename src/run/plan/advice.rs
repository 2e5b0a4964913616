//! Checks that plans fit, and advice on options if they do not.

use super::{DeviceMemory, Plan, WeightsForm, format_mib, longest_where};
use crate::dims::HAS_EXPERTS;
use crate::model::weights::WeightType;
use crate::run::system::ProcessLimits;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};

/// Name of a command's number of slots in messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContextName {
    /// The whole context, for commands that generate.
    MaxSeqLen,
    /// A chunk of an evaluated text.
    Chunk,
    /// The longest row of a benchmark.
    Row,
}

impl ContextName {
    pub(super) fn describe(self, slots: usize) -> String {
        match self {
            ContextName::MaxSeqLen => format!("`EngineOptions::max_seq_len` {slots}"),
            ContextName::Chunk => format!("`Context::Chunk` {slots}"),
            ContextName::Row => format!("a row of {slots} tokens (`Context::Row`)"),
        }
    }

    fn describe_limit(self, slots: usize) -> String {
        match self {
            ContextName::Row => format!("rows of {slots} tokens or less"),
            _ => format!("{} or less", self.describe(slots)),
        }
    }
}

/// Shortest context that a default is shortened to; with less, a conversation has hardly begun before it is full.
#[cfg(feature = "chat")]
const MIN_CONTEXT: usize = 256;

/// Tokens of a prefill pass that takes little memory and still uses each weight many times.
const SMALL_CHUNK: usize = 32;

impl Plan {
    /// Checks that the plan fits. If the system does not tell its memory, every plan passes.
    pub fn check(&self) -> Result<()> {
        self.check_for(ContextName::MaxSeqLen)
    }

    /// [`Plan::check`] with a command's name for the context.
    pub fn check_for(&self, context: ContextName) -> Result<()> {
        self.check_device(context)?;
        self.check_stages(context)?;
        self.check_process(context)?;
        let (need, Some(have)) = (self.needed_bytes(), self.memory.usable_bytes()) else { return Ok(()) };
        if need <= have {
            return Ok(());
        }
        let (model, asked) = (self.options.model.display(), context.describe(self.options.max_seq_len));
        Err(Error::Memory(format!(
            "{model}: needs {} of memory with {asked}, but {} are available; {}",
            format_mib(need),
            format_mib(have),
            self.suggest_remedy(have, context)
        )))
    }

    /// If the plan does not fit, shortens its context to the longest with which it does, unless that is very short.
    #[cfg(feature = "chat")]
    pub fn shorten_context(&mut self) {
        let asked = self.options.max_seq_len;
        let fits = |slots: usize| {
            let mut shorter = self.clone();
            shorter.options.max_seq_len = slots;
            slots <= asked && shorter.check().is_ok()
        };
        if !fits(asked)
            && let Some(slots) = longest_where(fits).filter(|&slots| slots >= MIN_CONTEXT)
        {
            self.options.max_seq_len = slots;
        }
    }

    /// Checks the limits of the process.
    fn check_process(&self, context: ContextName) -> Result<()> {
        let ProcessLimits { address_space, data } = self.memory.process;
        let written = |slots| self.address_space_needed(slots).0;
        let mapped = |slots| self.address_space_needed(slots).1;
        self.check_limit("ulimit -d", data, &written, context)?;
        self.check_limit("ulimit -v", address_space, &mapped, context)
    }

    fn check_limit(
        &self,
        limit: &str,
        left: Option<u64>,
        need: &dyn Fn(usize) -> u64,
        context: ContextName,
    ) -> Result<()> {
        let (slots, Some(left)) = (self.options.max_seq_len, left) else { return Ok(()) };
        if need(slots) <= left {
            return Ok(());
        }
        let remedy = match longest_where(|slots| need(slots) <= left) {
            Some(n) => format!(", or use {}", context.describe_limit(n)),
            None => String::new(),
        };
        Err(Error::Memory(format!(
            "{}: needs {} of address space with {}, thread stacks included, but {limit} leaves {}; raise it{remedy}",
            self.options.model.display(),
            format_mib(need(slots)),
            context.describe(slots),
            format_mib(left)
        )))
    }

    /// Checks a device's own memory.
    fn check_device(&self, context: ContextName) -> Result<()> {
        if !self.options.split_stages().is_empty() {
            return Ok(()); // each has its own limit
        }
        let (Some(DeviceMemory::Own(have)), need) = (self.device, self.device_bytes()) else { return Ok(()) };
        if need <= have {
            return Ok(());
        }
        let (model, asked) = (self.options.model.display(), context.describe(self.options.max_seq_len));
        Err(Error::Memory(format!(
            "{model}: needs {} of the device's memory with {asked}, but it has {}; use a shorter context or `EngineOptions::backend` cpu",
            format_mib(need),
            format_mib(have)
        )))
    }

    /// Advice: the largest context that fits, or settings with which one would.
    fn suggest_remedy(&self, have: u64, context: ContextName) -> String {
        let asked = self.options.max_seq_len;
        if let Some(n) = self.longest_context(have) {
            let (smaller, flags) = self.with_smaller_cache();
            let more = smaller
                .longest_context(have)
                .map(|most| most.min(asked))
                .filter(|&most| !flags.is_empty() && most > n);
            let more =
                more.map_or(String::new(), |most| format!(", {flags} with {}", context.describe_limit(most)));
            return format!("use {}{more}, or close other programs", context.describe_limit(n));
        }
        let (mut smaller, mut flags) = self.with_smaller_cache();
        if smaller.longest_context(have).is_none() && smaller.options.prefill_chunk > SMALL_CHUNK {
            smaller.options.prefill_chunk = SMALL_CHUNK;
            flags = join_options(&flags, &format!("`EngineOptions::prefill_chunk` {SMALL_CHUNK}"));
        }
        match smaller.longest_context(have) {
            Some(n) => format!("use {flags} with {}", context.describe_limit(n.min(asked))),
            None if self.kept_experts > 0 => "no context fits: use a smaller `EngineOptions::keep_experts`".into(),
            None if self.options.weight_type == WeightType::F32 => {
                "no context fits: use `EngineOptions::weight_type` q4_0, best after antigravity pack".into()
            }
            None if HAS_EXPERTS && self.form == WeightsForm::Checkpoint => {
                "no context fits: use antigravity pack, whose files are mapped and need no memory for experts that \
                 a token leaves out"
                    .into()
            }
            None => "no context fits: close other programs or use a smaller model".into(),
        }
    }

    /// The plan with the smallest cache type, and the option for it, if it is smaller than now.
    fn with_smaller_cache(&self) -> (Plan, String) {
        let mut smaller = self.clone();
        smaller.options.kv_types = KvTypes::same(KvType::Q4);
        let changed = smaller.options.kv_types != self.options.kv_types;
        (smaller, if changed { "`EngineOptions::kv_types` q4".into() } else { String::new() })
    }
}

fn join_options(flags: &str, flag: &str) -> String {
    if flags.is_empty() { flag.into() } else { format!("{flags} {flag}") }
}

/// Checks that sequences of one model, one per plan, fit together. Returns the bytes that all need.
pub fn check_sequences_fit(plans: &[Plan], context: ContextName, remedy: &str) -> Result<u64> {
    plans.iter().try_for_each(|p| p.check_for(context))?;
    let Some(largest) = plans.iter().max_by_key(|p| p.needed_bytes()) else { return Ok(0) };
    let all = plans.iter().fold(largest.needed_bytes(), |sum, p| sum.saturating_add(p.session_bytes()));
    let need = all.saturating_sub(largest.session_bytes());
    match largest.memory.usable_bytes() {
        Some(have) if need > have => Err(Error::Memory(format!(
            "{}: needs {} of memory for the caches of all rows, but {} are available; {remedy}",
            largest.options.model.display(),
            format_mib(need),
            format_mib(have)
        ))),
        _ => Ok(need),
    }
}

/// Checks that models with the same context, one per plan, fit together.
pub fn check_models_fit(plans: &[Plan], context: ContextName) -> Result<()> {
    if let [one] = plans {
        return one.check_for(context);
    }
    let need = |slots: usize| plans.iter().fold(0u64, |sum, p| sum.saturating_add(p.needed_bytes_for(slots)));
    let Some((first, have)) = plans.first().and_then(|p| Some((p, p.memory.usable_bytes()?))) else {
        return Ok(());
    };
    let slots = first.options.max_seq_len;
    if need(slots) <= have {
        return Ok(());
    }
    let remedy = match longest_where(|slots| need(slots) <= have) {
        Some(n) => format!("use {}", context.describe_limit(n)),
        None => "no context fits: measure them one by one".into(),
    };
    let (asked, need) = (context.describe(slots), format_mib(need(slots)));
    Err(Error::Memory(format!(
        "{}: needs {need} of memory with {asked} for {} settings at once, but {} are available; {remedy}",
        first.options.model.display(),
        plans.len(),
        format_mib(have)
    )))
}
