//! State that all connections share: the model once it is loaded, who may ask, and the threads that prepare prompts.

use super::access::Access;
use super::error::{ApiError, ApiResult};
use super::memory::MemoryBudget;
use super::workers::{Task, TaskLength, Workers};
use crate::run::engine::Engine;
use crate::run::engine::scheduler::Scheduler;
use crate::run::options::GenerateOptions;
use crate::run::plan::request_threads;
use files::{Error, Result};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use text::chat::Variables;
use tokio::sync::{Notify, Semaphore, oneshot};

/// Grammars that are compiled at the same time; others wait.
const GRAMMARS: usize = 2;
/// Longest time that a request waits for them.
const GRAMMAR_PATIENCE: Duration = Duration::from_secs(30);

/// A model with what its requests share.
pub struct LoadedModel {
    pub engine: Engine,
    pub scheduler: Scheduler,
    /// Bytes for requests and answers under way.
    pub memory: Arc<MemoryBudget>,
    /// Options of a request that says nothing.
    pub defaults: GenerateOptions,
    /// Whether `--seed` was given; else each request draws its own.
    pub seeded: bool,
    /// The model's name in answers.
    pub name: String,
    /// Variables of a chat's template where a request does not say otherwise.
    pub variables: Variables,
    /// Names the weights, the program and what else decides about an answer.
    pub fingerprint: String,
}

/// Whether `/slots` is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SlotsEndpoint {
    Hidden,
    Shown,
}

/// State that all connections share.
pub struct ServerState {
    model: OnceLock<Arc<LoadedModel>>,
    pub access: Access,
    /// The model's name in answers.
    pub model_name: String,
    pub slots_endpoint: SlotsEndpoint,
    /// Longest time that a client may take: to send the head of a request or its body, between requests, and to read on.
    pub patience: Duration,
    /// Start, in seconds since 1970.
    pub created: u64,
    draining: AtomicBool,
    stopped: AtomicBool,
    /// Wakes connections when all is over.
    pub shutdown: Notify,
    workers: Workers,
    /// Places on threads of their own.
    grammars: Arc<Semaphore>,
}

impl ServerState {
    /// State without a model yet. Starts the threads that prepare prompts.
    pub fn new(
        model_name: &str,
        access: Access,
        slots_endpoint: SlotsEndpoint,
        patience: Duration,
    ) -> Result<Self> {
        Ok(Self {
            model: OnceLock::new(),
            access,
            model_name: model_name.to_owned(),
            slots_endpoint,
            patience,
            created: unix_time(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            shutdown: Notify::new(),
            workers: Workers::start(request_threads())?,
            grammars: Arc::new(Semaphore::new(GRAMMARS)),
        })
    }

    pub fn set_model(&self, model: Arc<LoadedModel>) {
        let _ = self.model.set(model);
    }

    /// The model, if new requests are taken.
    pub fn open_model(&self) -> ApiResult<Arc<LoadedModel>> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::from_engine(&Error::Interrupted));
        }
        self.loaded_model().map(Arc::clone)
    }

    /// The model, also while the server shuts down.
    pub fn loaded_model(&self) -> ApiResult<&Arc<LoadedModel>> {
        let loading = || ApiError::new(503, "the model is being loaded; try again soon");
        self.model.get().ok_or_else(loading)
    }

    /// Takes no new requests from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ends connections: all requests have their answers.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Does something that takes a while on a worker thread.
    pub async fn run_on_worker<T: Send + 'static>(
        &self,
        length: TaskLength,
        task: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (task, result) = with_result(task);
        self.workers.add_task(length, task);
        result.await.unwrap_or_else(lost_thread)
    }

    /// Does something that may take seconds on a thread of its own, so that it holds up nobody else.
    pub async fn run_on_own_thread<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let busy = || ApiError::new(429, "as many grammars wait to be compiled as may; try again later");
        let place = tokio::time::timeout(GRAMMAR_PATIENCE, Arc::clone(&self.grammars).acquire_owned());
        let place = place.await.ok().and_then(std::result::Result::ok).ok_or_else(busy)?;
        let (task, result) = with_result(task);
        let run = move || {
            task();
            drop(place);
        };
        let no_memory = |_| ApiError::new(503, "there is no memory for a thread; try again later");
        thread::Builder::new().name("grammar".into()).spawn(run).map_err(no_memory)?;
        result.await.unwrap_or_else(lost_thread)
    }
}

/// A task that sends its result, unless nobody waits for it any more.
fn with_result<T: Send + 'static>(
    task: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> (Task, oneshot::Receiver<ApiResult<T>>) {
    let (done, result) = oneshot::channel();
    let run = move || {
        if !done.is_closed() {
            let _ = done.send(task());
        }
    };
    (Box::new(run), result)
}

fn lost_thread<T>(_: oneshot::error::RecvError) -> ApiResult<T> {
    Err(ApiError::new(500, "the thread that prepares this request has ended"))
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

pub fn random_number() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A random id, such as `chatcmpl-1f…`.
pub fn random_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_number(), random_number())
}
