//! State that all connections share: the model once it is loaded, who may ask, and the work that takes a while.

use super::access::Access;
use super::error::{ApiError, ApiResult};
use super::memory::MemoryBudget;
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

/// Grammars that are compiled at the same time; others wait.
pub const GRAMMARS: usize = 2;
/// Longest time that a request waits for them.
const GRAMMAR_PATIENCE: Duration = Duration::from_secs(30);
/// Work on more bytes may take long.
const SHORT_BYTES: usize = 64 << 10;

/// Time that a task may take. One thread is always left to short ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskLength {
    Short,
    Long,
    /// Seconds, for a grammar.
    Grammar,
}

impl TaskLength {
    /// Length of the work on so many bytes.
    pub fn of_bytes(bytes: usize) -> Self {
        if bytes <= SHORT_BYTES { TaskLength::Short } else { TaskLength::Long }
    }
}

/// A model with what its requests share.
pub struct ServerModel {
    pub engine: Engine,
    pub scheduler: Scheduler,
    /// Bytes for requests and answers under way.
    pub memory: Arc<MemoryBudget>,
    /// Options of a request that says nothing.
    pub defaults: GenerateOptions,
    /// Set where `--seed` was given; else each request draws its own.
    pub seeded: bool,
    /// The model's name in answers.
    pub name: String,
    /// Variables of a chat's template where a request does not say otherwise.
    pub variables: TemplateKwargs,
    /// Names the weights, the program and what else decides about an answer.
    pub fingerprint: String,
}

/// Answer of `/slots`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SlotsEndpoint {
    Hidden,
    Shown,
}

/// State that all connections share.
pub struct ServerState {
    model: OnceLock<Arc<ServerModel>>,
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
    /// Places for long tasks, and for grammars.
    long_tasks: Arc<Semaphore>,
    grammars: Arc<Semaphore>,
}

impl ServerState {
    /// State without a model yet.
    pub fn new(model_name: &str, access: Access, slots_endpoint: SlotsEndpoint, patience: Duration) -> Self {
        Self {
            model: OnceLock::new(),
            access,
            model_name: model_name.to_owned(),
            slots_endpoint,
            patience,
            created: unix_time(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            shutdown: Notify::new(),
            long_tasks: Arc::new(Semaphore::new(request_threads() - 1)),
            grammars: Arc::new(Semaphore::new(GRAMMARS)),
        }
    }

    pub fn set_model(&self, model: Arc<ServerModel>) {
        let _ = self.model.set(model);
    }

    /// The model, if new requests are taken.
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

    /// Takes no new requests from now on.
    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Ends connections: all requests have their answers.
    pub fn end_connections(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Does something that takes a while on another thread, unless nobody waits for it any more.
    pub async fn run_on_worker<T: Send + 'static>(
        &self,
        length: TaskLength,
        task: impl FnOnce() -> ApiResult<T> + Send + 'static,
    ) -> ApiResult<T> {
        let (places, patience) = match length {
            TaskLength::Short => (None, Duration::MAX),
            TaskLength::Long => (Some(&self.long_tasks), Duration::MAX),
            TaskLength::Grammar => (Some(&self.grammars), GRAMMAR_PATIENCE),
        };
        let mut place = None;
        if let Some(places) = places {
            let busy = |_| ApiError::new(429, "as many grammars wait to be compiled as may; try again later");
            place = timeout(patience, Arc::clone(places).acquire_owned()).await.map_err(busy)?.ok();
        }
        let (done, result) = oneshot::channel();
        tokio::task::spawn_blocking(move || {
            let _place = place;
            if !done.is_closed() {
                let _ = done.send(task());
            }
        });
        let lost = |_| Err(ApiError::new(500, "the thread that prepares this request has ended"));
        result.await.unwrap_or_else(lost)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, mpsc};

    #[test]
    fn long_tasks_do_not_hold_up_short_ones() {
        let access = Access::new(Vec::new(), "localhost", &[], &[]).expect("no flags");
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
