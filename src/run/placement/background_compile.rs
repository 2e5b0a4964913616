//! Compilation of an OpenCL device's programs on a background thread while the CPU computes.

use super::{DeviceFactory, into_shared};
use crate::model::device::SharedDevice;
use crate::opencl::{self, device::BuildStats};
use crate::run::options::EngineOptions;
use files::{Error, Result};
use std::fs::{File, TryLockError};
use std::mem::take;
use std::sync::mpsc::{TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Interval at which a thread looks whether another process has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The lock of the program cache: one process at a time compiles a device's programs in the background.
#[derive(Default)]
pub enum CacheLock {
    /// Nothing can be stored.
    #[default]
    Unavailable,
    /// Another process holds it.
    OfAnother,
    /// Held as long as any process has this file open.
    Own(File),
}

/// Programs that are not compiled when their device is no longer waited for.
pub struct UnfinishedPrograms {
    pub lock: CacheLock,
    pub stats: BuildStats,
}

/// Threads that compile programs. When dropped, each finishes the program that it is compiling, which is cached.
pub struct KernelCompiler {
    device: opencl::Device,
    threads: Mutex<Vec<JoinHandle<()>>>,
    lock: Arc<Mutex<CacheLock>>,
    /// Makes one device at a time: the next one finds the first one's programs in the cache.
    turn: Arc<Mutex<()>>,
}

impl KernelCompiler {
    pub fn new(device: opencl::Device) -> Arc<Self> {
        Arc::new(Self { device, threads: Mutex::default(), lock: Arc::default(), turn: Arc::default() })
    }

    /// Starts making a device. The returned function polls for it.
    ///
    /// # Errors
    ///
    /// `Device`: no thread can be started.
    pub fn start_compiling(
        self: &Arc<Self>,
        factory: DeviceFactory,
        model: Arc<opencl::Model>,
        o: EngineOptions,
    ) -> Result<impl FnMut() -> Option<Result<SharedDevice>> + Send + use<>> {
        let (send, receive) = channel();
        let (turn, lock) = (Arc::clone(&self.turn), Arc::clone(&self.lock));
        try_acquire(&self.device, &lock);
        let work = move || {
            let _turn = locked(&turn);
            // Some drivers crash if two processes compile the same program at once; and what the other process has
            // compiled is then in the cache.
            try_acquire(model.device(), &lock);
            while matches!(*locked(&lock), CacheLock::OfAnother) && !model.device().has_stopped_builds() {
                thread::sleep(POLL_INTERVAL);
                try_acquire(model.device(), &lock);
            }
            // The receiver is gone if the sequence has ended.
            let _ = send.send(factory.opencl_device(&model, &o).map(into_shared));
            take(&mut *locked(&lock));
        };
        let thread = thread::Builder::new().name("opencl".into()).spawn(work);
        let thread =
            thread.map_err(|e| Error::Device(format!("OpenCL: cannot start a thread to compile: {e}")))?;
        locked(&self.threads).push(thread);
        let workers = Arc::clone(self);
        Ok(move || match receive.try_recv() {
            Ok(made) => Some(made),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                // The thread's panic message has said why.
                let ended = workers.device.info();
                Some(Err(Error::Device(format!(
                    "OpenCL: the thread that compiled for {} has died",
                    ended.name
                ))))
            }
        })
    }

    /// Leaves the threads to themselves, as the process is about to end; `None` if they have ended.
    pub fn leave_unfinished(&self) -> Option<UnfinishedPrograms> {
        let threads = take(&mut *locked(&self.threads));
        if threads.iter().all(JoinHandle::is_finished) {
            return None;
        }
        self.device.stop_builds();
        Some(UnfinishedPrograms { lock: take(&mut *locked(&self.lock)), stats: self.device.build_stats() })
    }
}

impl Drop for KernelCompiler {
    fn drop(&mut self) {
        let threads = take(&mut *locked(&self.threads));
        if threads.iter().any(|thread| !thread.is_finished()) {
            self.device.stop_builds();
        }
        for thread in threads {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

/// Takes the lock of the program cache, unless this process has it.
fn try_acquire(device: &opencl::Device, lock: &Mutex<CacheLock>) {
    let mut lock = locked(lock);
    if matches!(*lock, CacheLock::Own(_)) {
        return;
    }
    let file = opencl::Cache::for_user().open_lock(device.info());
    *lock = match file.map(|file| (file.try_lock(), file)) {
        Some((Ok(()), file)) => CacheLock::Own(file),
        Some((Err(TryLockError::WouldBlock), _)) => CacheLock::OfAnother,
        Some((Err(TryLockError::Error(_)), _)) | None => CacheLock::Unavailable,
    };
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
