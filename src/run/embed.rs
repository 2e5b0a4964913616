//! Embeddings: a text as one vector of length 1, pooled from the final states of its tokens.
//!
//! Texts that fit into one pass together are computed in one, longer ones part by part; each gets the bits that it
//! would get alone. The CPU computes them, with a cache in f32 for the time of a pass.

use crate::dims::{ARCH, DIM};
use crate::model::cpu::{self, CpuDevice};
use crate::model::device::{CancelToken, Device, KvCache, Logits, Ring, Run};
use crate::model::weights::OpenModel;
use crate::run::engine::Engine;
use crate::run::options::{EngineOptions, long_prompt_error};
use crate::run::plan::format_mib;
use crate::run::system::Memory;
use files::model_dir::POOLING_FILE;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use serde_json::{Map, Value};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use text::tokenizer::files::read_settings;

/// Way in which the final states of a text's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The first token's, which BERT calls CLS.
    Cls,
    /// The last token's.
    Last,
}

impl FromStr for Pooling {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        match name {
            "mean" => Ok(Pooling::Mean),
            "cls" => Ok(Pooling::Cls),
            "last" => Ok(Pooling::Last),
            _ => Err("use mean, cls or last".into()),
        }
    }
}

impl Pooling {
    /// The pooling that a model's files name: `pooling_type` in GGUF, else the file of sentence-transformers; `None` if
    /// they name none.
    ///
    /// # Errors
    ///
    /// `Model`: it is another one, or the file is damaged.
    pub fn of_model(model: &OpenModel) -> Result<Option<Self>> {
        let Some(gguf) = model.gguf() else {
            let folder = model.path.text_folder()?;
            let Some(fields) = read_settings(&folder, POOLING_FILE)? else { return Ok(None) };
            let unknown =
                || Error::model(&folder.path(POOLING_FILE), "names no pooling that this program has");
            return Self::of_fields(&fields).map(Some).ok_or_else(unknown);
        };
        let key = format!("{}.pooling_type", ARCH.gguf_name());
        // The numbers of llama.cpp.
        match gguf.metadata().get_u64(&key).map_err(|why| Error::model(gguf.path(), why))? {
            None | Some(0) => Ok(None),
            Some(1) => Ok(Some(Pooling::Mean)),
            Some(2) => Ok(Some(Pooling::Cls)),
            Some(3) => Ok(Some(Pooling::Last)),
            Some(other) => Err(Error::model(gguf.path(), format!("{key} is {other}; supported: 1 to 3"))),
        }
    }

    /// The only pooling that the fields of sentence-transformers turn on.
    fn of_fields(fields: &Map<String, Value>) -> Option<Self> {
        let on = |name: &str| fields.get(name) == Some(&Value::Bool(true));
        let all = [
            ("pooling_mode_mean_tokens", Pooling::Mean),
            ("pooling_mode_cls_token", Pooling::Cls),
            ("pooling_mode_lasttoken", Pooling::Last),
        ];
        let mut chosen = all.into_iter().filter(|(name, _)| on(name));
        let only = chosen.next()?.1;
        let others =
            fields.iter().filter(|(name, value)| name.starts_with("pooling_mode_") && **value == true);
        (others.count() == 1).then_some(only)
    }
}

/// Options of embeddings.
#[derive(Debug, Clone, Copy, Default)]
pub struct EmbedOptions {
    /// `None` takes the one that the model's files name.
    pub pooling: Option<Pooling>,
    /// Number of values kept of a vector, for models that are trained for it; `None` keeps all.
    pub dimensions: Option<usize>,
}

impl Engine {
    /// Computes one vector of length 1 for each text, given as token ids.
    ///
    /// ```
    /// use antigravity::embed::{EmbedOptions, Pooling};
    /// use antigravity::{Engine, EngineOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let texts = [engine.encode("Once upon a time")?, engine.encode("A dog")?];
    /// let options = EmbedOptions { pooling: Some(Pooling::Mean), dimensions: Some(64) };
    /// let vectors = engine.embed(&texts, &options, None)?;
    /// assert_eq!((vectors.len(), vectors[0].len()), (2, 64));
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Usage`: a text is empty or longer than the context, or an option is missing or out of range. `Memory`.
    /// `Interrupted` by `cancel`.
    pub fn embed(
        &self,
        texts: &[Vec<u32>],
        options: &EmbedOptions,
        cancel: Option<&CancelToken>,
    ) -> Result<Vec<Vec<f32>>> {
        let pooling = match options.pooling {
            Some(pooling) => pooling,
            None => self.model_pooling()?.ok_or_else(|| {
                Error::Usage(
                    "`EmbedOptions::pooling`: the model's files name none; give mean, cls or last".into(),
                )
            })?,
        };
        let dimensions = options.dimensions.unwrap_or(DIM);
        if !(1..=DIM).contains(&dimensions) {
            let why = format!("`EmbedOptions::dimensions` {dimensions}: use a number from 1 to {DIM}");
            return Err(Error::Usage(why));
        }
        let most = self.options().max_seq_len;
        for (i, text) in texts.iter().enumerate() {
            match text.len() {
                0 => return Err(Error::Usage(format!("text {i} is empty; leave it out"))),
                need if need > most => return Err(long_prompt_error(&need.to_string(), most)),
                _ => {}
            }
        }
        let mut embedder = self.embedder.lock().unwrap_or_else(PoisonError::into_inner);
        let embedder = match &mut *embedder {
            Some(made) => made,
            empty => empty.insert(Embedder::new(self)?),
        };
        let pooled = embedder.pool_texts(texts, pooling, cancel)?;
        Ok(pooled.into_iter().map(|state| state.into_vector(dimensions)).collect())
    }
}

/// A place for an engine's [`Embedder`], made when it is first needed.
pub type EmbedderSlot = Mutex<Option<Embedder>>;

/// The device that computes final states.
pub struct Embedder {
    device: CpuDevice,
    /// Final states of a pass: `[token][DIM]`.
    states: Vec<f32>,
}

impl Embedder {
    fn new(engine: &Engine) -> Result<Self> {
        let o = EngineOptions { kv_types: KvTypes::same(KvType::F32), batch: 1, ..engine.options().clone() };
        check_memory(&o)?;
        let device = engine.cpu_device(&o)?;
        Ok(Self { states: vec![0.0; device.max_tokens() * DIM], device })
    }

    /// Computes the final states of all texts and pools them.
    fn pool_texts(
        &mut self,
        texts: &[Vec<u32>],
        pooling: Pooling,
        cancel: Option<&CancelToken>,
    ) -> Result<Vec<PooledState>> {
        let (most, mut pooled, mut rest) = (self.device.max_tokens(), Vec::with_capacity(texts.len()), texts);
        while !rest.is_empty() {
            let mut room = most;
            let fits = |text: &&Vec<u32>| {
                let left = room.checked_sub(text.len());
                room = left.unwrap_or(0);
                left.is_some()
            };
            let together = rest.iter().take_while(fits).count().max(1);
            let (batch, others) = rest.split_at(together);
            let mut caches =
                batch.iter().map(|text| self.device.new_cache(text.len())).collect::<Result<Vec<_>>>()?;
            let mut states: Vec<_> = batch.iter().map(|_| PooledState::new(pooling)).collect();
            for first in (0..batch[0].len()).step_by(most) {
                self.compute_pass(batch, first, (&mut caches, &mut states), cancel)?;
            }
            pooled.append(&mut states);
            rest = others;
        }
        Ok(pooled)
    }

    /// Computes one pass: all of several texts, or the tokens of one from `first` on.
    fn compute_pass(
        &mut self,
        texts: &[Vec<u32>],
        first: usize,
        (caches, pooled): (&mut [Box<dyn KvCache>], &mut [PooledState]),
        cancel: Option<&CancelToken>,
    ) -> Result<()> {
        let most = self.device.max_tokens();
        let part = |text: &Vec<u32>| first..text.len().min(first + most);
        let (mut runs, mut states) = (Vec::with_capacity(texts.len()), &mut self.states[..]);
        for (text, cache) in texts.iter().zip(caches) {
            let (hidden, others) = states.split_at_mut(part(text).len() * DIM);
            states = others;
            let run = Run::new(&mut **cache, &text[part(text)], first, Logits::None);
            runs.push(Run { hidden, known_len: text.len(), ..run });
        }
        self.device.forward(&mut runs, cancel)?;
        for (run, pooled) in runs.iter().zip(pooled) {
            run.hidden.chunks_exact(DIM).for_each(|state| pooled.add_token(state));
        }
        Ok(())
    }
}

/// Refuses what the machine has no memory for: a cache of one text, the buffers of a pass, and its states.
fn check_memory(o: &EngineOptions) -> Result<()> {
    let cache: u64 = Ring::new(o.prefill_chunk).cache_bytes(o.kv_types, o.max_seq_len).iter().sum();
    let pass = cpu::scratch_bytes(o.max_seq_len, o.prefill_chunk) + o.prefill_chunk * DIM * size_of::<f32>();
    let need = cache.saturating_add(pass as u64);
    match Memory::for_planning()?.usable_bytes() {
        Some(have) if need > have => Err(Error::Memory(format!(
            "embeddings need {} more and {} are available; lower `EngineOptions::max_seq_len`",
            format_mib(need),
            format_mib(have)
        ))),
        _ => Ok(()),
    }
}

/// The pooled final states of a text so far.
struct PooledState {
    pooling: Pooling,
    /// Sum of the states for the mean, else one of them: `[DIM]`.
    state: Vec<f32>,
    tokens: usize,
}

impl PooledState {
    fn new(pooling: Pooling) -> Self {
        Self { pooling, state: vec![0.0; DIM], tokens: 0 }
    }

    /// Adds the next token's final state.
    fn add_token(&mut self, state: &[f32]) {
        match self.pooling {
            Pooling::Mean => self.state.iter_mut().zip(state).for_each(|(sum, x)| *sum += x),
            Pooling::Cls if self.tokens > 0 => {}
            Pooling::Cls | Pooling::Last => self.state.copy_from_slice(state),
        }
        self.tokens += 1;
    }

    /// The first values as a vector of length 1: the length takes care of the mean's divisor.
    fn into_vector(self, dimensions: usize) -> Vec<f32> {
        let mut vector = self.state;
        vector.truncate(dimensions);
        let squares: f64 = vector.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let length = squares.sqrt().max(f64::MIN_POSITIVE);
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        vector
    }
}
