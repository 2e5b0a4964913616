//! Transfers that happen in every pass: in without waiting, out through page-locked memory.

use super::held::Held;
use super::{Access, Buffer, MAPPED, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi::{self, EventId};
use crate::waiter::Call;
use std::ops::Range;
use std::ptr::null;

/// A buffer that is often written without waiting for the device: it is sent from a copy that it keeps.
pub struct Staged {
    buffer: Buffer,
    host: Outgoing,
    sent: Option<EventId>,
}

/// What is sent. Where the device has memory of its own, it is page-locked, so that the driver need not copy it again.
enum Outgoing {
    Pageable(Box<[u8]>),
    Locked(Landing),
}

impl Outgoing {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            Outgoing::Pageable(bytes) => bytes,
            Outgoing::Locked(landing) => landing.bytes(),
        }
    }
}

impl Staged {
    /// A buffer of `len` bytes.
    pub fn new(device: &Device, len: usize, access: Access) -> Result<Self> {
        let buffer = device.buffer(len, access, Place::Device)?;
        let host = if device.facts().unified_memory {
            Outgoing::Pageable(vec![0; len].into())
        } else {
            Outgoing::Locked(Landing::new(device, len)?)
        };
        Ok(Self { buffer, host, sent: None })
    }

    /// For the arguments of kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Queues writing what `fill` leaves in `len` bytes to the start of the buffer. Waits only for the last such write to
    /// be done.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.wait()?;
        let sent = &mut self.host.bytes()[..len];
        fill(sent);
        let m = &self.buffer.memory;
        m.assert_writable();
        let mut event = EventId::NULL;
        // SAFETY: within the buffer, which is as long as `host`; that stays as it is until the event is there.
        let code = unsafe {
            let api = m.shared.api()?;
            (api.clEnqueueWriteBuffer)(
                m.shared.queue,
                m.id,
                ffi::FALSE,
                0,
                sent.len(),
                sent.as_ptr().cast(),
                0,
                null(),
                &mut event,
            )
        };
        // Whatever the code, the driver may have taken it.
        self.sent = Some(event);
        m.shared.check(code, "clEnqueueWriteBuffer", format_args!("{} staged bytes", sent.len()))
    }

    fn wait(&mut self) -> Result<()> {
        let Some(event) = self.sent else { return Ok(()) };
        let shared = &self.buffer.memory.shared;
        shared.wait(Call::Event(event), "a staged write")?;
        self.sent = None;
        // SAFETY: an event of ours, released once.
        let code = unsafe { (shared.api()?.clReleaseEvent)(event) };
        shared.check(code, "clReleaseEvent", "a staged write")
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.buffer.memory.shared.to_release().is_some() {
            // Nobody is left to be told.
            let _ = self.wait();
        }
        if self.sent.is_some() {
            // The device may read it still.
            std::mem::forget(std::mem::replace(&mut self.host, Outgoing::Pageable(Box::default())));
        }
    }
}

/// Page-locked memory of the host, through which a device of its own memory is read and written without another
/// copy by the driver.
pub struct Landing(Held);

impl Landing {
    /// For up to `len` bytes.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        Held::new(device, len, (Place::HostVisible, MAPPED)).map(Self)
    }

    /// All of it. No call may be under way that it is given to.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes are mapped for reading and writing for as long as `self`, which is borrowed; no kernel has
        // this buffer, and `Staged` waits for its write before it asks again.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr(), self.0.buffer.len()) }
    }

    /// Waits for what is queued and reads `bytes.len()` bytes of `from` that begin at `offset`.
    pub fn read(&mut self, from: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let most = self.0.buffer.len();
        for (i, piece) in bytes.chunks_mut(most).enumerate() {
            piece.copy_from_slice(self.fetch(from, offset + i * most..offset + i * most + piece.len())?);
        }
        Ok(())
    }

    /// Waits for what is queued and brings a range of `from`, no longer than this.
    pub fn fetch(&mut self, from: &Buffer, range: Range<usize>) -> Result<&[u8]> {
        from.memory.assert_holds(&range);
        from.memory.assert_readable();
        let (offset, len) = (range.start, range.len());
        assert!(len <= self.0.buffer.len(), "{len} bytes for {}", self.0.buffer.len());
        let call = Call::Read { from: from.memory.id, offset, to: self.0.start, len };
        from.memory.shared.wait(call, format_args!("{len} bytes at {offset}"))?;
        // SAFETY: `len` bytes are mapped for reading and writing for as long as `self`; no kernel has this buffer, and
        // the call, which comes after those that nobody waited for, has returned. The next one needs `self` again.
        Ok(unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr(), len) })
    }
}
