//! The models that `eval` loads: one per weight type and backend among its settings.

use super::settings::Settings;
use crate::model::weights::{OpenModel, WeightType};
use crate::run::engine::Engine;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::plan::{Opened, Plan};
use crate::run::session::Session;
use files::Result;
use std::time::Duration;
use text::tokenizer::Tokenizer;

/// Key of an engine: settings with different keys need different engines.
type Key = (WeightType, BackendKind);

pub fn key(o: &EngineOptions) -> Key {
    (o.weight_type, o.backend)
}

/// The opened model files, each with the first of the settings that need it.
pub struct Models(Vec<(EngineOptions, OpenModel)>);

impl Models {
    /// Opens the models of all settings. `flags` is the model opened with the command line's flags.
    pub fn open<'s>(flags: OpenModel, settings: impl Iterator<Item = &'s Settings>) -> Result<Self> {
        let path = flags.path.clone();
        let mut flags = Some(flags);
        let mut models: Vec<(EngineOptions, OpenModel)> = Vec::new();
        for o in settings.map(Settings::options) {
            if models.iter().all(|(first, _)| key(first) != key(o)) {
                let model = match flags.take_if(|m| m.weight_type == o.weight_type) {
                    Some(model) => model,
                    None => path.open(o.weight_type)?,
                };
                models.push((o.clone(), model));
            }
        }
        Ok(Self(models))
    }

    /// The memory plan of these settings, with this many slots.
    pub fn plan(&self, settings: &Settings, slots: usize) -> Result<Plan> {
        let o = settings.options();
        let found = self.0.iter().find(|(first, _)| key(first) == key(o));
        let (_, model) = found.expect("invariant: opened for these settings");
        Plan::of(model, &EngineOptions { max_seq_len: slots, ..o.clone() })
    }
}

/// The loaded models.
pub struct Engines(Vec<(Key, Engine)>);

impl Engines {
    /// Loads the models for sequences of at most `longest` tokens.
    pub fn load(models: Models, longest: usize) -> Result<Self> {
        let load = |(options, model): (EngineOptions, OpenModel)| {
            let plan = Plan::of(&model, &EngineOptions { max_seq_len: longest, ..options.clone() })?;
            let opened = Opened { plan, model, took: Duration::ZERO }.settled();
            Ok((key(&options), Engine::load_opened(opened, &|_, _| {})?))
        };
        models.0.into_iter().map(load).collect::<Result<_>>().map(Self)
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        self.0[0].1.tokenizer()
    }

    /// An empty sequence with these options.
    pub fn session(&self, o: &EngineOptions) -> Result<Session> {
        let (_, engine) = self.0.iter().find(|(k, _)| *k == key(o)).unwrap_or(&self.0[0]);
        engine.session_of(&EngineOptions { threads: engine.options().threads, ..o.clone() })
    }
}
