//! Compilation of an OpenCL device's kernels on a background thread while the CPU computes.

use super::{DeviceFactory, into_shared};
use crate::model::device::SharedDevice;
use crate::opencl;
use crate::run::options::{EngineOptions, Notice};
use files::{Error, Result};
use std::mem::take;
use std::sync::mpsc::{TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest wait at the end that is not reported.
const SILENT_WAIT: Duration = Duration::from_millis(300);

/// Threads that compile kernels. When dropped, each finishes the program that it is compiling, which is cached.
pub struct KernelCompiler {
    device: opencl::Device,
    notice: Notice,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Makes one device at a time: the next one finds the first one's programs in the cache.
    turn: Arc<Mutex<()>>,
}

impl KernelCompiler {
    pub fn new(device: opencl::Device, notice: Notice) -> Arc<Self> {
        Arc::new(Self { device, notice, threads: Mutex::default(), turn: Arc::default() })
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
        let turn = Arc::clone(&self.turn);
        let work = move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            // The receiver is gone if the sequence has ended.
            let _ = send.send(factory.opencl_device(&model, &o).map(into_shared));
        };
        let thread = thread::Builder::new().name("opencl".into()).spawn(work);
        let thread =
            thread.map_err(|e| Error::Device(format!("OpenCL: cannot start a thread to compile: {e}")))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
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
}

impl Drop for KernelCompiler {
    fn drop(&mut self) {
        let threads = take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner));
        let unfinished = || threads.iter().any(|thread| !thread.is_finished());
        if unfinished() {
            self.device.stop_builds();
        }
        let began = Instant::now();
        while unfinished() && began.elapsed() < SILENT_WAIT {
            thread::sleep(Duration::from_millis(5));
        }
        if unfinished() {
            self.notice.warn("OpenCL: still compiling one program, which is cached for the next start");
        }
        for thread in threads {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}
