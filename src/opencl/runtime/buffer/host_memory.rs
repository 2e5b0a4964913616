//! Page-locked host memory: non-blocking writes and reads of every pass, and memory to which kernels of a discrete
//! device write, lent to the reader of the results.

use super::{Access, Address, Buffer, LENT, MAPPED, Memory, Place};
use crate::device::Device;
use crate::failure::Result;
use crate::ffi::{self, EventId};
use crate::watchdog::Call;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::null;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// A buffer mapped for reading and writing until dropped.
struct PinnedMemory {
    buffer: Buffer,
    start: Address,
}

impl PinnedMemory {
    /// Allocates `len` bytes of host memory; the state says who may use the buffer.
    fn new(device: &Device, len: usize, (place, state): (Place, u8)) -> Result<Self> {
        let buffer = device.allocate_buffer(len, Access::ReadWrite, place)?;
        buffer.memory.state.store(state, Ordering::Relaxed);
        let start = buffer.memory.map(&(0..len), ffi::MAP_READ | ffi::MAP_WRITE)?;
        Ok(Self { buffer, start: Address(start) })
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.buffer.memory.shared.api_for_release().is_some() {
            // No one is left to report the error to.
            let _ = self.buffer.memory.unmap(self.start.0);
        }
    }
}

/// A buffer that is written often and without waiting: the driver reads from a host copy that stays alive.
pub struct StagingBuffer {
    buffer: Buffer,
    host: StagingCopy,
    pending_write: Option<EventId>,
}

/// Host copy. It is page-locked for a discrete device, so that the driver does not copy it again.
enum StagingCopy {
    Pageable(Box<[u8]>),
    Locked(ReadbackBuffer),
}

impl StagingCopy {
    fn bytes(&mut self) -> &mut [u8] {
        match self {
            StagingCopy::Pageable(bytes) => bytes,
            StagingCopy::Locked(landing) => landing.bytes(),
        }
    }
}

impl StagingBuffer {
    /// Allocates `len` bytes.
    pub fn new(device: &Device, len: usize, access: Access) -> Result<Self> {
        let buffer = device.allocate_buffer(len, access, Place::Device)?;
        let host = if device.info().unified_memory {
            StagingCopy::Pageable(vec![0; len].into())
        } else {
            StagingCopy::Locked(ReadbackBuffer::new(device, len)?)
        };
        Ok(Self { buffer, host, pending_write: None })
    }

    /// The buffer, for kernel arguments.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Queues writing `len` bytes, produced by `fill`, to the start of the buffer. Waits only for the previous such
    /// write.
    pub fn write(&mut self, len: usize, fill: impl FnOnce(&mut [u8])) -> Result<()> {
        self.wait_for_write()?;
        let sent = &mut self.host.bytes()[..len];
        fill(sent);
        let m = &self.buffer.memory;
        m.assert_writable();
        let mut event = EventId::NULL;
        // SAFETY: within the buffer, which is as long as `host`; `host` does not change until the event has completed.
        let code = unsafe {
            let api = m.shared.api_or_failure()?;
            let (write, from, len) = (api.clEnqueueWriteBuffer, sent.as_ptr().cast(), sent.len());
            write(m.shared.queue, m.id, ffi::FALSE, 0, len, from, 0, null(), &mut event)
        };
        // Even if the call failed, the driver may have accepted it.
        self.pending_write = Some(event);
        m.shared.check(code, "clEnqueueWriteBuffer", format_args!("{} staged bytes", sent.len()))
    }

    /// Waits for queued work, reads the first `len` bytes, and queues writing them as `change` leaves them.
    pub fn update_bytes(&mut self, len: usize, change: impl FnOnce(&mut [u8])) -> Result<()> {
        self.wait_for_write()?;
        match &mut self.host {
            StagingCopy::Pageable(bytes) => self.buffer.read(0, &mut bytes[..len])?,
            StagingCopy::Locked(landing) => _ = landing.fetch_range(&self.buffer, 0..len)?,
        }
        self.write(len, change)
    }

    fn wait_for_write(&mut self) -> Result<()> {
        let Some(event) = self.pending_write else { return Ok(()) };
        let shared = &self.buffer.memory.shared;
        shared.wait_for_call(Call::Event(event), "a staged write")?;
        self.pending_write = None;
        // SAFETY: our own event, released once.
        let code = unsafe { (shared.api_or_failure()?.clReleaseEvent)(event) };
        shared.check(code, "clReleaseEvent", "a staged write")
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        if self.buffer.memory.shared.api_for_release().is_some() {
            // No one is left to report the error to.
            let _ = self.wait_for_write();
        }
        if self.pending_write.is_some() {
            // The device may still read it.
            std::mem::forget(std::mem::replace(&mut self.host, StagingCopy::Pageable(Box::default())));
        }
    }
}

/// Page-locked host memory for reading from and writing to a discrete device without another copy by the driver.
pub struct ReadbackBuffer(PinnedMemory);

impl ReadbackBuffer {
    /// Allocates `len` bytes.
    pub fn new(device: &Device, len: usize) -> Result<Self> {
        PinnedMemory::new(device, len, (Place::HostVisible, MAPPED)).map(Self)
    }

    /// All bytes; no call that uses them may be in progress.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the memory is mapped for reading and writing while `self` exists, and `self` is borrowed mutably; no
        // kernel
        // uses this buffer, and `StagingBuffer` waits for its write before it asks again.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr(), self.0.buffer.len()) }
    }

    /// Waits for queued work and reads `bytes.len()` bytes of `from`, starting at `offset`.
    pub fn read(&mut self, from: &Buffer, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let most = self.0.buffer.len();
        for (i, piece) in bytes.chunks_mut(most).enumerate() {
            piece
                .copy_from_slice(self.fetch_range(from, offset + i * most..offset + i * most + piece.len())?);
        }
        Ok(())
    }

    /// Waits for queued work and reads a range of `from`, at most as long as this memory.
    pub fn fetch_range(&mut self, from: &Buffer, range: Range<usize>) -> Result<&[u8]> {
        from.memory.assert_holds(&range);
        from.memory.assert_readable();
        let (offset, len) = (range.start, range.len());
        assert!(len <= self.0.buffer.len(), "{len} bytes for {}", self.0.buffer.len());
        let call = Call::Read { from: from.memory.id, offset, to: self.0.start, len };
        from.memory.shared.wait_for_call(call, format_args!("{len} bytes at {offset}"))?;
        // SAFETY: `len` bytes are mapped for reading and writing while `self` exists; no kernel uses this buffer, and
        // the
        // call, which comes after all non-blocking ones, has returned. The next call needs `self` again.
        Ok(unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr(), len) })
    }
}

/// Floats in page-locked memory that stay mapped while kernels write to them. Whoever passes them to a kernel borrows
/// them until the device has finished.
pub struct HostFloats(PinnedMemory);

impl HostFloats {
    fn len(&self) -> usize {
        self.0.buffer.len() / size_of::<f32>()
    }
}

impl Deref for HostFloats {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: so many floats, aligned like any mapping, are mapped and initialised while `self` exists; a kernel
        // writes to
        // them only while someone borrows them mutably.
        unsafe { std::slice::from_raw_parts(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

impl DerefMut for HostFloats {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.start.0.as_ptr().cast(), self.len()) }
    }
}

/// Allocates lent memory and finds its buffers.
#[derive(Default)]
pub struct HostFloatsPool {
    lent: Vec<(usize, Weak<Memory>)>,
}

impl HostFloatsPool {
    /// Lends `len` floats, all 0, on a device that [writes to host memory](crate::DeviceInfo::writes_to_host).
    pub fn allocate_floats(&mut self, device: &Device, len: usize) -> Result<HostFloats> {
        let held = PinnedMemory::new(device, 4 * len, (Place::HostPinned, LENT))?;
        // SAFETY: the bytes are mapped for writing, and no kernel uses them yet.
        unsafe { held.start.0.as_ptr().write_bytes(0, 4 * len) };
        self.lent.retain(|(_, memory)| memory.strong_count() > 0);
        self.lent.push((held.start.0.as_ptr().addr(), Arc::downgrade(&held.buffer.memory)));
        Ok(HostFloats(held))
    }

    /// Buffer of a whole [`HostFloats`], for kernel arguments; `None` for other memory.
    pub fn find_buffer(&self, floats: &[f32]) -> Option<Buffer> {
        let found = self.lent.iter().filter(|(start, _)| *start == floats.as_ptr().addr());
        let mut memory = found.filter_map(|(_, memory)| memory.upgrade());
        memory.find(|memory| memory.len == size_of_val(floats)).map(|memory| Buffer { memory })
    }
}
