//! The models that `eval` loads: one per weight type and backend among its settings.

use super::settings::EvalSettings;
use crate::cli::load::load_with_progress;
use crate::cli::terminal::Verbosity;
use crate::model::weights::{OpenModel, WeightType};
use crate::run::engine::Engine;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::plan::{OpenedModel, Plan};
use crate::run::session::Session;
use files::Result;
use std::time::Duration;
use text::tokenizer::Tokenizer;

/// Key of an engine: settings with different keys need different engines.
type EngineKey = (WeightType, BackendKind);

pub fn engine_key(o: &EngineOptions) -> EngineKey {
    (o.weight_type, o.backend)
}

/// The opened model files, each with the first of the settings that need it.
pub struct EvalModels(Vec<(EngineOptions, OpenModel)>);

impl EvalModels {
    /// Opens the models of all settings. `flags` is the model opened with the command line's flags.
    pub fn open_all<'s>(flags: OpenModel, settings: impl Iterator<Item = &'s EvalSettings>) -> Result<Self> {
        let mut flags = Some(flags);
        let mut models: Vec<(EngineOptions, OpenModel)> = Vec::new();
        for o in settings.map(EvalSettings::options) {
            if models.iter().all(|(first, _)| engine_key(first) != engine_key(o)) {
                let model = match flags.take_if(|m| m.weight_type == o.weight_type) {
                    Some(model) => model,
                    None => o.open_model()?,
                };
                models.push((o.clone(), model));
            }
        }
        Ok(Self(models))
    }

    /// The memory plan of these settings, with this many slots.
    pub fn plan_memory(&self, settings: &EvalSettings, slots: usize) -> Result<Plan> {
        let o = settings.options();
        let found = self.0.iter().find(|(first, _)| engine_key(first) == engine_key(o));
        let (_, model) = found.expect("invariant: opened for these settings");
        Plan::for_model(model, &EngineOptions { max_seq_len: slots, ..o.clone() })
    }
}

/// The loaded models.
pub struct EvalEngines(Vec<(EngineKey, Engine)>);

impl EvalEngines {
    /// Loads the models for sequences of at most `longest` tokens.
    pub fn load_all(models: EvalModels, longest: usize, verbosity: Verbosity) -> Result<Self> {
        let load = |(options, model): (EngineOptions, OpenModel)| {
            let plan = Plan::for_model(&model, &EngineOptions { max_seq_len: longest, ..options.clone() })?;
            let opened = OpenedModel { plan, model, tokenizer: None, took: Duration::ZERO }.resolve_auto();
            Ok((engine_key(&options), load_with_progress(opened, verbosity)?))
        };
        models.0.into_iter().map(load).collect::<Result<_>>().map(Self)
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        self.0[0].1.tokenizer()
    }

    /// An empty sequence with these options.
    pub fn open_session(&self, o: &EngineOptions) -> Result<Session> {
        let (_, engine) = self.0.iter().find(|(k, _)| *k == engine_key(o)).unwrap_or(&self.0[0]);
        engine.session_with(&EngineOptions { threads: engine.options().threads, ..o.clone() })
    }
}
