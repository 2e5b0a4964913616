//! Launches that are recorded once and then queued together, where the driver has `cl_khr_command_buffer`.
//!
//! The signatures are those of the specification's versions 0.9.0 (PoCL 3.1) to 1.0 (Intel's runtime).

use super::Kernel;
use crate::buffer::Memory;
use crate::device::{Device, Shared};
use crate::failure::{Failure, Kind, Result, check};
use crate::ffi::{CommandBufferId, CommandBuffers, QueueId};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Launches in the order in which they were made, each with the arguments that its kernel had then. It keeps their buffers
/// alive.
pub struct Recording {
    shared: Arc<Shared>,
    calls: CommandBuffers,
    id: CommandBufferId,
    buffers: Mutex<Vec<Arc<Memory>>>,
    /// Whether it was ever queued.
    launched: AtomicBool,
}

impl Device {
    /// Whether launches can be recorded.
    pub fn records(&self) -> bool {
        self.shared.command_buffers.is_some()
    }

    /// The same device, on which launches are recorded and not queued, until [`Device::recorded`]. Nothing else is to be
    /// asked of it.
    ///
    /// # Panics
    /// On a device that does not record.
    pub fn record(&self) -> Result<Self> {
        let shared = &self.shared;
        let calls = shared.command_buffers.expect("the caller has asked whether the device records");
        let (api, mut code) = (shared.api()?, 0);
        // SAFETY: one queue, no properties.
        let id = unsafe { (calls.create)(1, &shared.queue, null(), &mut code) };
        drop(api);
        made(code, "clCreateCommandBufferKHR", &shared.facts.name)?;
        let (buffers, launched) = Default::default();
        let recording = Recording { shared: Arc::clone(shared), calls, id, buffers, launched };
        Ok(Self { shared: Arc::clone(shared), recording: Some(Arc::new(recording)) })
    }

    /// What was recorded.
    ///
    /// # Panics
    /// On a device that launches are queued on.
    pub fn recorded(self) -> Result<Arc<Recording>> {
        let recording = self.recording.and_then(|recording| recording.downcast::<Recording>().ok());
        let recording = recording.expect("launches on it are recorded");
        let api = self.shared.api()?;
        // SAFETY: made by `record`, and alive.
        let code = unsafe { (recording.calls.finalize)(recording.id) };
        drop(api);
        made(code, "clFinalizeCommandBufferKHR", &self.shared.facts.name)?;
        Ok(recording)
    }

    /// Queues all launches of a recording, which must have ended when it is queued again.
    ///
    /// # Panics
    /// As [`Device::launch`].
    pub fn replay(&self, recording: &Recording) -> Result<()> {
        let shared = &self.shared;
        assert!(Arc::ptr_eq(shared, &recording.shared), "a recording of another device");
        assert!(recording.buffers().iter().all(|memory| memory.device_may_use()), "a buffer is mapped");
        let api = shared.api()?;
        // SAFETY: the queue that it was recorded for, no events; its kernels and buffers are alive.
        let code = unsafe {
            (recording.calls.enqueue)(0, null_mut::<QueueId>(), recording.id, 0, null(), null_mut())
        };
        drop(api);
        if !recording.launched.swap(true, Ordering::Relaxed) {
            shared.waiter.first_launch();
        }
        shared.check(code, "clEnqueueCommandBufferKHR", &shared.facts.name)?;
        self.launched()
    }
}

/// Takes the result of a call that only records. Nothing is queued yet, so the device stays.
fn made(code: i32, call: &str, device: &str) -> Result<()> {
    check(code, call, device).map_err(|failure| Failure { kind: Kind::Build, ..failure })
}

impl Recording {
    /// What launches on a device are added to, where they are not queued.
    pub(super) fn of(device: &Device) -> Option<&Self> {
        device.recording.as_ref()?.downcast_ref()
    }

    fn buffers(&self) -> MutexGuard<'_, Vec<Arc<Memory>>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a launch.
    ///
    /// # Safety
    /// `global` and, if it is not null, `local` must have `dims` entries.
    pub(super) unsafe fn add(
        &self,
        kernel: &Kernel,
        dims: usize,
        global: *const usize,
        local: *const usize,
    ) -> Result<()> {
        let api = self.shared.api()?;
        // SAFETY: by this function's contract; the launches of an in-order queue need no sync points.
        let code = unsafe {
            let (queue, id, dims) = (QueueId::NULL, kernel.id, dims as u32);
            let (none, point, command) = (null(), null_mut(), null_mut());
            (self.calls.launch)(
                self.id,
                queue,
                null(),
                id,
                dims,
                none,
                global,
                local,
                0,
                null(),
                point,
                command,
            )
        };
        drop(api);
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
        self.buffers().extend(kernel.buffers().cloned());
        made(code, "clCommandNDRangeKernelKHR", &self.shared.facts.name)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(_api) = self.shared.to_release() {
            // SAFETY: made by `Device::record`; what is queued keeps it alive by itself.
            unsafe { (self.calls.release)(self.id) };
        }
    }
}
