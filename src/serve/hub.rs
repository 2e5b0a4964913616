//! What all connections share: the model once it is loaded, who may ask, and who prepares prompts.

use super::access::Access;
use super::budget::Budget;
use super::refusal::Refusal;
use super::workers::{Length, Workers};
use crate::run::engine::Engine;
use crate::run::generate::scheduler::Scheduler;
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
/// How long a request waits for them.
const GRAMMAR_PATIENCE: Duration = Duration::from_secs(30);

/// A loaded model.
pub struct Served {
    pub engine: Engine,
    pub scheduler: Scheduler,
    /// Bytes for requests and answers under way.
    pub budget: Arc<Budget>,
    /// What a request that says nothing gets.
    pub defaults: GenerateOptions,
    /// Whether `--seed` was given; else each request draws its own.
    pub seeded: bool,
    /// The model's name in answers.
    pub name: String,
    /// What a chat's template gets where a request does not say otherwise.
    pub variables: Variables,
    /// Names the weights, the program and what else decides about an answer.
    pub fingerprint: String,
}

/// Whether `/slots` is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Slots {
    Hidden,
    Shown,
}

/// What all connections share.
pub struct Hub {
    served: OnceLock<Arc<Served>>,
    /// Who may ask.
    pub access: Access,
    /// The model's name in answers.
    pub model: String,
    pub slots: Slots,
    /// How long a client may take: to send the head of a request or its body, between requests, and to read on.
    pub patience: Duration,
    /// When it started, in seconds since 1970.
    pub created: u64,
    draining: AtomicBool,
    over: AtomicBool,
    /// Wakes connections when all is over.
    pub ending: Notify,
    workers: Workers,
    /// Places on threads of their own.
    grammars: Arc<Semaphore>,
}

impl Hub {
    /// Without a model yet. Starts the threads that prepare prompts.
    pub fn new(model: &str, access: Access, slots: Slots, patience: Duration) -> Result<Self> {
        Ok(Self {
            served: OnceLock::new(),
            access,
            model: model.to_owned(),
            slots,
            patience,
            created: now(),
            draining: AtomicBool::new(false),
            over: AtomicBool::new(false),
            ending: Notify::new(),
            workers: Workers::start(request_threads())?,
            grammars: Arc::new(Semaphore::new(GRAMMARS)),
        })
    }

    /// The model is loaded.
    pub fn open(&self, served: Arc<Served>) {
        let _ = self.served.set(served);
    }

    /// The model, if new requests are taken.
    pub fn served(&self) -> std::result::Result<Arc<Served>, Refusal> {
        match self.served.get() {
            _ if self.draining.load(Ordering::Relaxed) => Err(Refusal::of_run(&Error::Interrupted)),
            None => Err(Refusal::new(503, "the model is being loaded; try again soon")),
            Some(served) => Ok(Arc::clone(served)),
        }
    }

    /// The model, also while the server shuts down.
    pub fn loaded(&self) -> Option<&Arc<Served>> {
        self.served.get()
    }

    /// Takes no new requests from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// All requests have their answers: connections end.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Does something that takes a while on another thread.
    pub async fn work<T: Send + 'static>(
        &self,
        length: Length,
        task: impl FnOnce() -> std::result::Result<T, Refusal> + Send + 'static,
    ) -> std::result::Result<T, Refusal> {
        let (done, waits) = oneshot::channel();
        let task = Box::new(move || {
            if !done.is_closed() {
                let _ = done.send(task());
            }
        });
        self.workers.put(length, task);
        let lost = || Refusal::new(500, "the thread that prepares prompts has ended");
        waits.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Does something that may take seconds on a thread of its own, so that it holds up nobody else.
    pub async fn work_apart<T: Send + 'static>(
        &self,
        task: impl FnOnce() -> std::result::Result<T, Refusal> + Send + 'static,
    ) -> std::result::Result<T, Refusal> {
        let busy = || Refusal::new(429, "as many grammars wait to be compiled as may; try again later");
        let place = tokio::time::timeout(GRAMMAR_PATIENCE, Arc::clone(&self.grammars).acquire_owned());
        let place = place.await.ok().and_then(std::result::Result::ok).ok_or_else(busy)?;
        let (done, waits) = oneshot::channel();
        let task = move || {
            let _place = place;
            if !done.is_closed() {
                let _ = done.send(task());
            }
        };
        let lost = || Refusal::new(503, "there is no memory for a thread; try again later");
        thread::Builder::new().name("grammar".into()).spawn(task).map_err(|_| lost())?;
        waits.await.unwrap_or_else(|_| Err(lost()))
    }
}

/// Seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A number that nobody has had.
pub fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A name for something, such as `chatcmpl-1f…`.
pub fn name(kind: &str) -> String {
    format!("{kind}{:016x}{:016x}", random(), random())
}
