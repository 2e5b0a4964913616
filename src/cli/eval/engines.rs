//! The models that `eval` loads: one for each weight type and backend among its settings.

use super::settings::Settings;
use crate::model::weights::WeightType;
use crate::run::engine::Engine;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::session::Session;
use files::Result;
use text::tokenizer::Tokenizer;

/// Settings with different keys need different engines.
type Key = (WeightType, BackendKind);

pub(super) fn key(o: &EngineOptions) -> Key {
    (o.weight_type, o.backend)
}

/// The loaded models.
pub(super) struct Engines(Vec<(Key, Engine)>);

impl Engines {
    /// Those of all settings, for sequences of at most `longest` tokens.
    pub fn load<'s>(settings: impl Iterator<Item = &'s Settings>, longest: usize) -> Result<Self> {
        let mut engines: Vec<(Key, Engine)> = Vec::new();
        for o in settings.map(Settings::options) {
            if engines.iter().all(|(k, _)| *k != key(o)) {
                let engine = Engine::load(EngineOptions { max_seq_len: longest, ..o.clone() })?;
                engines.push((key(o), engine));
            }
        }
        Ok(Self(engines))
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
