//! State shared by all connections: the model, access rules, and worker threads.

use super::access::AccessRules;
use super::error::{ApiError, ApiResult};
use super::memory::MemoryBudget;
use crate::run::embed::Pooling;
use crate::run::engine::Engine;
use crate::run::generate::scheduler::Scheduler;
use crate::run::options::GenerateOptions;
use crate::run::plan::request_threads;
use files::Error;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use text::chat::TemplateKwargs;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::timeout;

/// Maximum number of grammars compiled at the same time.
pub const MAX_GRAMMAR_TASKS: usize = 2;
/// Maximum time that a request waits for them.
const GRAMMAR_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a short task's input, in bytes.
const SHORT_BYTES: usize = 64 << 10;

/// Expected time of a task. One thread is reserved for short ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskLength {
    Short,
    Long,
    /// Seconds: compiles a grammar.
    Grammar,
}

impl TaskLength {
    /// Length of a task with `bytes` bytes of input.
    pub fn of_bytes(bytes: usize) -> Self {
        if bytes <= SHORT_BYTES { TaskLength::Short } else { TaskLength::Long }
    }
}

/// The loaded model and everything that its requests share.
pub struct ServerModel {
    pub engine: Engine,
    pub scheduler: Scheduler,
    /// Budget for requests and responses in progress.
    pub memory: Arc<MemoryBudget>,
    /// Default options of a request.
    pub defaults: GenerateOptions,
    /// Pooling of embeddings; `None` takes the one that the model's files name.
    pub pooling: Option<Pooling>,
    /// Set with `--seed`; otherwise each request gets a random seed.
    pub has_fixed_seed: bool,
    /// Model name in responses.
    pub name: String,
    /// Default variables of the chat template.
    pub template_kwargs: TemplateKwargs,
    /// `system_fingerprint`.
    pub fingerprint: String,
}

/// Availability of `/slots`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SlotsEndpoint {
    Hidden,
    Shown,
}

/// State shared by all connections.
pub struct ServerState {
    model: OnceLock<Arc<ServerModel>>,
    pub access: AccessRules,
    /// Model name in responses.
    pub model_name: String,
    pub slots_endpoint: SlotsEndpoint,
    /// Timeout for a client to send the head or the body of a request, between requests, and to read on.
    pub patience: Duration,
    /// Start time as a Unix timestamp.
    pub start_time: u64,
    draining: AtomicBool,
    stopped: AtomicBool,
    /// Wakes idle connections to close them.
    pub shutdown: Notify,
    long_tasks: Arc<Semaphore>,
    grammar_tasks: Arc<Semaphore>,
}

impl ServerState {
    /// State while the model loads.
    pub fn new(
        model_name: &str,
        access: AccessRules,
        slots_endpoint: SlotsEndpoint,
        patience: Duration,
    ) -> Self {
        Self {
            model: OnceLock::new(),
            access,
            model_name: model_name.to_owned(),
            slots_endpoint,
            patience,
            start_time: unix_time(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            shutdown: Notify::new(),
            long_tasks: Arc::new(Semaphore::new(request_threads() - 1)),
            grammar_tasks: Arc::new(Semaphore::new(MAX_GRAMMAR_TASKS)),
        }
    }

    pub fn set_model(&self, model: Arc<ServerModel>) {
        let _ = self.model.set(model);
    }

    /// The model, if the server accepts new requests.
    pub fn open_model(&self) -> ApiResult<Arc<ServerModel>> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::from_engine(&Error::Interrupted));
        }
        self.loaded_model().map(Arc::clone)
    }

    /// The model, also while the server shuts down.
    pub fn loaded_model(&self) -> ApiResult<&Arc<ServerModel>> {
        let loading = || ApiError::new(503, "the model is being loaded; try again soon");
        self.model.get().ok_or_else(loading)
    }

    /// Refuses new requests from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Closes connections; all requests have been answered.
    pub fn end_connections(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Runs a task on a worker thread, unless its caller has been dropped by then.
    pub async fn run_on_worker<T: Send + 'static>(
        &self,
        length: TaskLength,
        task: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (permits, wait) = match length {
            TaskLength::Short => (None, Duration::MAX),
            TaskLength::Long => (Some(&self.long_tasks), Duration::MAX),
            TaskLength::Grammar => (Some(&self.grammar_tasks), GRAMMAR_TIMEOUT),
        };
        let mut permit = None;
        if let Some(permits) = permits {
            let busy =
                |_| ApiError::new(429, "too many grammars are waiting to be compiled; try again later");
            permit = timeout(wait, Arc::clone(permits).acquire_owned()).await.map_err(busy)?.ok();
        }
        let (done, result) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let _permit = permit;
            if !done.is_closed() {
                let _ = done.send(task());
            }
        });
        let lost = |_| Err(ApiError::new(500, "worker thread stopped unexpectedly"));
        result.await.unwrap_or_else(lost)
    }
}

/// Current Unix timestamp.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    #[test]
    fn large_requests_do_not_hold_up_small_ones() {
        let access = AccessRules::new(Vec::new(), "localhost", &[], &[]).expect("no flags");
        let state = Arc::new(ServerState::new("x", access, SlotsEndpoint::Hidden, Duration::ZERO));
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime =
            runtime.enable_time().max_blocking_threads(request_threads()).build().expect("a runtime");
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        runtime.block_on(async {
            let long = || {
                let (state, held) = (Arc::clone(&state), Arc::clone(&held));
                let wait = move || Ok(held.lock().map(|held| held.recv().is_err()).is_ok());
                tokio::spawn(async move { state.run_on_worker(TaskLength::Long, wait).await })
            };
            let long: Vec<_> = (0..9).map(|_| long()).collect();
            for _ in 0..9 {
                tokio::task::yield_now().await;
                let short = state.run_on_worker(TaskLength::of_bytes(SHORT_BYTES), || Ok("short"));
                assert_eq!(timeout(Duration::from_secs(60), short).await, Ok(Ok("short")));
            }
            drop(release);
            for long in long {
                assert_eq!(long.await.expect("no panic"), Ok(true));
            }
        });
    }
}
