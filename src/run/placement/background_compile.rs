//! An OpenCL device that a thread of its own makes ready while the CPU computes.

use super::{DeviceFactory, shared};
use crate::model::device::SharedDevice;
use crate::opencl;
use crate::run::options::{EngineOptions, Notice};
use files::{Error, Result};
use std::mem::take;
use std::sync::mpsc::{TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A longer wait at the end is said.
const SOON: Duration = Duration::from_millis(300);

/// The threads. When nobody needs their devices any more, each ends with the program that it compiles, which is kept.
pub struct KernelCompiler {
    device: opencl::Device,
    notice: Notice,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// One device is made at a time: the next finds the programs of the first.
    turn: Arc<Mutex<()>>,
}

impl KernelCompiler {
    pub fn new(device: opencl::Device, notice: Notice) -> Arc<Self> {
        Arc::new(Self { device, notice, threads: Mutex::default(), turn: Arc::default() })
    }

    /// Begins to make a device.
    ///
    /// # Errors
    ///
    /// `Device`: there can be no more threads.
    pub fn make(
        self: &Arc<Self>,
        factory: DeviceFactory,
        model: Arc<opencl::Model>,
        o: EngineOptions,
    ) -> Result<impl FnMut() -> Option<Result<SharedDevice>> + Send + use<>> {
        let (send, receive) = channel();
        let turn = Arc::clone(&self.turn);
        let work = move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            // The sequence may have ended.
            let _ = send.send(factory.opencl(&model, &o).map(shared));
        };
        let thread = thread::Builder::new().name("opencl".into()).spawn(work);
        let thread = thread.map_err(|e| Error::Device(format!("OpenCL: no thread to compile in: {e}")))?;
        self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        let workers = Arc::clone(self);
        Ok(move || match receive.try_recv() {
            Ok(made) => Some(made),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                // It has said why.
                let ended = workers.device.facts();
                Some(Err(Error::Device(format!("OpenCL: the thread for {} has ended", ended.name))))
            }
        })
    }
}

impl Drop for KernelCompiler {
    fn drop(&mut self) {
        let threads = take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner));
        let unfinished = || threads.iter().any(|thread| !thread.is_finished());
        if unfinished() {
            self.device.build_no_more();
        }
        let began = Instant::now();
        while unfinished() && began.elapsed() < SOON {
            thread::sleep(Duration::from_millis(5));
        }
        if unfinished() {
            self.notice.say("OpenCL: one program is still being compiled; it is kept for the next start");
        }
        for thread in threads {
            // A panic has been said.
            let _ = thread.join();
        }
    }
}
