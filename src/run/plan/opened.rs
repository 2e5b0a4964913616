//! Opens a model and plans its memory before it is loaded.

use super::Plan;
use crate::dims::{LEARNED_POSITIONS, MAX_POSITION, TIED};
use crate::model::weights::OpenModel;
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::placement::is_known_to_be_the_cpu;
use files::{Error, Result};
use std::time::{Duration, Instant};
use text::tokenizer::Tokenizer;

/// An opened model with its plan, ready to be loaded.
pub struct OpenedModel {
    pub plan: Plan,
    pub model: OpenModel,
    /// The tokenizer, if it was needed before the weights.
    pub tokenizer: Option<Tokenizer>,
    /// Time taken to open and plan.
    pub took: Duration,
}

impl OpenedModel {
    /// Opens the model and resolves the backend `auto`.
    ///
    /// # Errors
    ///
    /// `Model`: a file is missing or damaged. Errors of [`Plan::for_model`].
    pub fn new(options: &EngineOptions) -> Result<Self> {
        let began = Instant::now();
        let model = options.open_model()?;
        if TIED && model.checkpoint.packed().is_none() && model.checkpoint.has_own_head() {
            options.notice.warn(&format!(
                "{}: lm_head.weight is not the embedding that the config ties it to; using lm_head.weight",
                model.checkpoint.path().display()
            ));
        }
        let plan = Plan::for_model(&model, &within_positions(options)?)?;
        Ok(Self { plan, model, tokenizer: None, took: began.elapsed() }.resolve_auto())
    }

    /// Changes the backend `auto` to the CPU if there is no device, too little memory for both, or the CPU is known to
    /// be faster at everything; reports this in one line.
    pub fn resolve_auto(mut self) -> Self {
        let plan = &mut self.plan;
        if plan.options.backend == BackendKind::Auto {
            let is_known =
                || is_known_to_be_the_cpu(&plan.options, &self.model.checkpoint.source_fingerprint());
            let why = match (plan.device, plan.check()) {
                (None, _) => Some("no OpenCL device (see antigravity doctor)".into()),
                _ if is_known() => None,
                (_, Err(Error::Memory(why))) => Some(why),
                _ => return self,
            };
            if let Some(why) = why {
                plan.options.notice.warn(&format!("auto: {why}; using the CPU"));
            }
            plan.options.backend = BackendKind::Cpu;
            plan.device = None;
        }
        self
    }
}

/// Limits the slots to the number of positions, if these are learned.
fn within_positions(options: &EngineOptions) -> Result<EngineOptions> {
    let mut options = options.clone();
    if LEARNED_POSITIONS {
        if options.eviction.policy != Policy::None {
            return Err(Error::Usage(format!(
                "`Eviction::policy`: eviction cannot extend the {MAX_POSITION} positions that this model has learned; \
                 use none"
            )));
        }
        options.max_seq_len = options.max_seq_len.min(MAX_POSITION);
    }
    Ok(options)
}
