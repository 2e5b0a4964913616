//! Page-locked host memory: non-blocking writes and reads of every pass, and memory to which kernels of a discrete device
//! write, lent to the reader of the results.

use super::{Access, Address, Buffer, LENT, MAPPED, Memory, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi::{self, EventId};
use crate::waiter::Call;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::null;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A buffer mapped for reading and writing until dropped.
struct Held {
    buffer: Buffer,
    start: Address,
}

impl Held {
    /// Allocates `len` bytes of host memory; the state says who may use the buffer.
    fn new(device: &Device, len: usize, (place, state): (Place, u8)) -> Result<Self> {
        let buffer = device.buffer(len, Access::ReadWrite, place)?;
        buffer.memory.state.store(state, Ordering::Relaxed);
        let start = buffer.memory.map(&(0..len), ffi::MAP_READ | ffi::MAP_WRITE)?;
        Ok(Self { buffer, start: Address(start) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.buffer.memory.shared.to_release().is_some() {
            // No one is left to report the error to.
            let _ = self.buffer.memory.unmap(self.start.0);
        }
    }
}

/// A buffer that is written often and without waiting: the driver reads from a host copy that stays alive.
pub struct Staged {
    buffer: Buffer,
    host: Outgoing,
    sent: Option<EventId>,
}

/// Host copy. It is page-locked for a discrete device, so that the driver does not copy it again.
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
    /// Allocates `len` bytes.
    pub fn new(device: &Device, len: usize, access: Access) -> Result<Self> {
        let buffer = device.buffer(len, access, Place::Device)?;
        let host = if device.facts().unified_memory {
            Outgoing::Pageable(vec![0; len].into())
        } else {
            Outgoing::Locked(Landing::new(device, len)?)
        };
        Ok(Self { buffer, host, sent: None })
    }

    /// The buffer, for kernel arguments.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Queues writing `len` bytes, produced by `fill`, to the start of the buffer. Waits only for the previous such
    /// write.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.wait()?;
        let sent = &mut self.host.bytes()[..len];
        fill(sent);
        let m = &self.buffer.memory;
        m.assert_writable();
        let mut event = EventId::NULL;
        // SAFETY: within the buffer, which is as long as `host`; `host` does not change until the event has completed.
        let code = unsafe {
            let api = m.shared.api()?;
            let (write, from, len) = (api.clEnqueueWriteBuffer, sent.as_ptr().cast(), sent.len());
            write(m.shared.queue, m.id, ffi::FALSE, 0, len, from, 0, null(), &mut event)
        };
        // Even if the call failed, the driver may have accepted it.
        self.sent = Some(event);
        m.shared.check(code, "clEnqueueWriteBuffer", format_args!("{} staged bytes", sent.len()))
    }

    fn wait(&mut self) -> Result<()> {
        let Some(event) = self.sent else { return Ok(()) };
        let shared = &self.buffer.memory.shared;
        shared.wait(Call::Event(event), "a staged write")?;
        self.sent = None;
        // SAFETY: our own event, released once.
        let code = unsafe { (shared.api()?.clReleaseEvent)(event) };
        shared.check(code, "clReleaseEvent", "a staged write")
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if self.buffer.memory.shared.to_release().is_some() {
            // No one is left to report the error to.
            let _ = self.wait();
        }
        if self.sent.is_some() {
            // The device may still read it.
            std::mem::forget(std::mem::replace(&mut self.host, Outgoing::Pageable(Box::default())));
        }
    }
}

/// Page-locked host memory for reading from and writing to a discrete device without another copy by the driver.
pub struct Landing(Held);

impl Landing {
    /// Allocates `len` bytes.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        Held::new(device, len, (Place::HostVisible, MAPPED)).map(Self)
    }

    /// All bytes; no call that uses them may be in progress.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory is mapped for reading and writing while `self` exists, and `self` is borrowed mutably; no
        // kernel
        // uses this buffer, and `Staged` waits for its write before it asks again.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr(), self.0.buffer.len()) }
    }

    /// Waits for queued work and reads `bytes.len()` bytes of `from`, starting at `offset`.
    pub fn read(&mut self, from: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let most = self.0.buffer.len();
        for (i, piece) in bytes.chunks_mut(most).enumerate() {
            piece.copy_from_slice(self.fetch(from, offset + i * most..offset + i * most + piece.len())?);
        }
        Ok(())
    }

    /// Waits for queued work and reads a range of `from`, at most as long as this memory.
    pub fn fetch(&mut self, from: &Buffer, range: Range<usize>) -> Result<&[u8]> {
        from.memory.assert_holds(&range);
        from.memory.assert_readable();
        let (offset, len) = (range.start, range.len());
        assert!(len <= self.0.buffer.len(), "{len} bytes for {}", self.0.buffer.len());
        let call = Call::Read { from: from.memory.id, offset, to: self.0.start, len };
        from.memory.shared.wait(call, format_args!("{len} bytes at {offset}"))?;
        // SAFETY: `len` bytes are mapped for reading and writing while `self` exists; no kernel uses this buffer, and
        // the
        // call, which comes after all non-blocking ones, has returned. The next call needs `self` again.
        Ok(unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr(), len) })
    }
}

/// Floats in page-locked memory that stay mapped while kernels write to them. Whoever passes them to a kernel borrows
/// them until the device has finished.
pub struct Lent(Held);

impl Lent {
    fn len(&self) -> usize {
        self.0.buffer.len() / size_of::<f32>()
    }
}

impl Deref for Lent {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: so many floats, aligned like any mapping, are mapped and initialised while `self` exists; a kernel
        // writes to
        // them only while someone borrows them mutably.
        unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

/// Allocates lent memory and finds its buffers.
#[derive(Default)]
pub struct Lender {
    lent: Vec<(usize, Weak<Memory>)>,
}

impl Lender {
    /// Lends `len` floats, all 0, on a device that [writes to host memory](crate::Facts::writes_to_host).
    pub fn lend(&mut self, device: &Device, len: usize) -> Result<Lent> {
        let held = Held::new(device, 4 * len, (Place::OnHost, LENT))?;
        // SAFETY: the bytes are mapped for writing, and no kernel uses them yet.
        unsafe { held.start.0.as_ptr().write_bytes(0, 4 * len) };
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        self.lent.push((held.start.0.as_ptr().addr(), Arc::downgrade(&held.buffer.memory)));
        Ok(Lent(held))
    }

    /// Buffer of a whole [`Lent`], for kernel arguments; `None` for other memory.
    pub fn buffer_of(&self, floats: &[f32]) -> Option<Buffer> {
        let found = self.lent.iter().filter(|(start, _)| *start == floats.as_ptr().addr());
        let mut memory = found.filter_map(|(_, memory)| memory.upgrade());
        memory.find(|memory| memory.len == size_of_val(floats)).map(|memory| Buffer { memory })
    }
}
