//! Device memory, and the CPU's views of it.
//!
//! A buffer in host-visible memory belongs to the CPU while it is mapped, and to the device otherwise. A [`Mapped`]
//! view borrows its buffer, so no slice outlives the unmapping, and launches refuse mapped buffers. On phones a stale
//! pointer reads old data; most other machines hide that mistake, so the tests use a driver that maps copies and fills
//! them with 0xAA when they are unmapped.

mod host_memory;
mod view;

pub use host_memory::{HostFloats, HostFloatsPool, ReadbackBuffer, StagingBuffer};
pub use view::{MapFor, Mapped, SharedView};

use super::device::{Device, Shared};
use super::device_info::DeviceInfo;
use super::failure::{Failure, FailureKind, Result};
use super::ffi::{self, MemId};
pub use super::watchdog::StridedPieces;
use super::watchdog::{Address, Call};
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::{NonNull, null, null_mut};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

/// Access of kernels to a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// Kind of memory that holds a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Fastest memory for the device.
    Device,
    /// Device memory as part of one shared buffer, if a kernel for this device needs to reach all of it; see `arena`.
    SharedBuffer,
    /// Memory that the CPU can map, without a copy if memory is unified.
    HostVisible,
    /// Host memory to which kernels of a discrete device write without a copy (cl_nv_create_buffer); see
    /// [`DeviceInfo::writes_to_host`].
    HostPinned,
}

impl Place {
    /// True if it is device memory; mappable memory of a discrete device is not.
    fn is_device_memory(self, facts: &DeviceInfo) -> bool {
        !matches!(self, Place::HostVisible | Place::HostPinned) || facts.unified_memory
    }
}

/// Bytes in device memory. Clones share them; dropping the last one, kernel arguments included, frees them.
#[derive(Clone)]
pub struct Buffer {
    pub(super) memory: Arc<Memory>,
}

/// States of a buffer.
const UNMAPPED: u8 = 0;
const MAPPED: u8 = 1;
/// Permanently mapped for reading.
const FROZEN: u8 = 2;
/// Permanently mapped while kernels write to it.
const LENT: u8 = 3;

pub(super) struct Memory {
    pub shared: Arc<Shared>,
    pub id: MemId,
    len: usize,
    access: Access,
    place: Place,
    state: AtomicU8,
    /// Address of the mapping, once frozen.
    frozen: OnceLock<Address>,
    /// Parent buffer and offset, for a part.
    parent: Option<(Buffer, usize)>,
}

impl Device {
    /// Allocates uninitialised bytes.
    ///
    /// # Errors
    /// [`FailureKind::Memory`] above [`DeviceInfo::max_alloc`](super::DeviceInfo::max_alloc), or if there is no room.
    pub fn allocate_buffer(&self, len: usize, access: Access, place: Place) -> Result<Buffer> {
        let shared = &self.shared;
        let most = shared.facts.max_alloc;
        assert!(len > 0, "a buffer has at least one byte");
        if len as u64 > most {
            let message = format!("a buffer of {len} bytes exceeds the device's maximum of {most}");
            return Err(Failure::new(FailureKind::Memory, message));
        }
        let kind = match access {
            Access::ReadOnly => ffi::MEM_READ_ONLY,
            Access::ReadWrite => ffi::MEM_READ_WRITE,
        };
        let host_visible = place == Place::HostVisible;
        let flags = kind | if host_visible { ffi::MEM_ALLOC_HOST_PTR } else { 0 };
        let mut code = 0;
        // SAFETY: no memory of ours is passed.
        let id = unsafe {
            let (api, none) = (shared.api_or_failure()?, null_mut());
            match (place, shared.create_on_host) {
                (Place::HostPinned, Some(create)) => {
                    let on_host = ffi::MEM_LOCATION_HOST_NV | ffi::MEM_PINNED_NV;
                    create(shared.context, flags, on_host, len, none, &mut code)
                }
                _ => (api.clCreateBuffer)(shared.context, flags, len, none, &mut code),
            }
        };
        shared.check_created(code, "clCreateBuffer", format_args!("{len} bytes"))?;
        if place.is_device_memory(&shared.facts) {
            shared.allocated.fetch_add(len as u64, Ordering::Relaxed);
        }
        Ok(Buffer::from_id(shared, id, (len, access, place), None))
    }

    /// A read-only buffer in the device's memory that holds `bytes`.
    pub fn upload_buffer(&self, bytes: &[u8]) -> Result<Buffer> {
        let buffer = self.allocate_buffer(bytes.len(), Access::ReadOnly, Place::Device)?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }
}

impl Memory {
    /// True if kernels may use it now: not if the CPU has a view of memory that kernels may write.
    pub fn device_may_use(&self) -> bool {
        match self.state.load(Ordering::Relaxed) {
            UNMAPPED | LENT => true,
            FROZEN => self.access == Access::ReadOnly,
            _ => false,
        }
    }

    /// Moves an unmapped buffer to another state; returns false if it was not unmapped.
    fn try_set_state(&self, state: u8) -> bool {
        self.state.compare_exchange(UNMAPPED, state, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    fn assert_writable(&self) {
        assert!(
            self.state.load(Ordering::Relaxed) == UNMAPPED,
            "a buffer is written while the CPU has it mapped"
        );
    }

    fn assert_readable(&self) {
        let mapped = matches!(self.state.load(Ordering::Relaxed), MAPPED | LENT);
        assert!(!mapped, "a buffer is read while the CPU has it mapped");
    }

    fn assert_holds(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.len,
            "{range:?} of a buffer of {} bytes",
            self.len
        );
    }

    /// Checks that pieces of `bytes` bytes in total lie within the buffer; returns false if they are empty.
    fn check_pieces(&self, pieces: StridedPieces, bytes: usize) -> bool {
        let StridedPieces { start, len, count, pitch } = pieces;
        assert!(pieces.bytes() == bytes && len <= pitch, "{pieces:?} for {bytes} bytes");
        self.assert_holds(&(start..start + count.saturating_sub(1) * pitch + len));
        bytes > 0
    }

    /// Waits for queued work and maps `range`.
    fn map(&self, range: &Range<usize>, flags: u64) -> Result<NonNull<u8>> {
        let (offset, len) = (range.start, range.len());
        let call = Call::Map { buffer: self.id, flags, offset, len };
        let start = self.shared.wait_for_call(call, format_args!("{range:?} of {} bytes", self.len));
        let start = start.inspect_err(|failure| {
            if failure.kind == FailureKind::Stopped {
                // It may be mapped later, and no one would unmap it.
                self.shared.mark_lost(Failure::new(FailureKind::Lost, "a mapping was interrupted"));
            }
        })?;
        let none = || Failure::new(FailureKind::Lost, "clEnqueueMapBuffer gave no address and no error");
        start.map(|start| start.0).ok_or_else(none)
    }

    fn unmap(&self, start: NonNull<u8>) -> Result<()> {
        // SAFETY: `start` was returned by mapping this buffer, and no one uses it any more.
        let code = unsafe {
            let api = self.shared.api_or_failure()?;
            let unmap = api.clEnqueueUnmapMemObject;
            unmap(self.shared.queue, self.id, start.as_ptr().cast(), 0, null(), null_mut())
        };
        self.shared.check(code, "clEnqueueUnmapMemObject", format_args!("{} bytes", self.len))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let (Some(start), Some(_)) = (self.frozen.get(), self.shared.api_for_release()) {
            // No one is left to report the error to.
            let _ = self.unmap(start.0);
        }
        if self.parent.is_none() && self.place.is_device_memory(&self.shared.facts) {
            self.shared.allocated.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
        if let Some(api) = self.shared.api_for_release() {
            // SAFETY: made by `Device::allocate_buffer`; what is queued keeps the driver's object alive by itself.
            unsafe { (api.clReleaseMemObject)(self.id) };
        }
    }
}

// All methods panic if a range exceeds the buffer, because that is a bug.
impl Buffer {
    /// Wraps an unmapped object of the driver; `whole` is its parent and the offset in it.
    fn from_id(
        shared: &Arc<Shared>,
        id: MemId,
        (len, access, place): (usize, Access, Place),
        whole: Option<(Buffer, usize)>,
    ) -> Self {
        let (state, frozen) = (AtomicU8::new(UNMAPPED), OnceLock::new());
        let memory = Memory { shared: shared.clone(), id, len, access, place, state, frozen, parent: whole };
        Self { memory: Arc::new(memory) }
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Returns a part as a buffer of its own that keeps this one alive. Kernels may use both.
    ///
    /// # Errors
    /// [`FailureKind::InvalidCall`] if `range.start` is not a multiple of
    /// [`DeviceInfo::base_align`](super::DeviceInfo::base_align), [`FailureKind::Unsupported`] if the driver supports
    /// only OpenCL
    /// 1.0.
    pub fn sub_buffer(&self, range: Range<usize>) -> Result<Buffer> {
        let m = &self.memory;
        m.assert_holds(&range);
        assert!(!range.is_empty(), "parts have bytes");
        let api = m.shared.api_or_failure()?;
        let Some(create) = api.clCreateSubBuffer else {
            return Err(Failure::new(
                FailureKind::Unsupported,
                "this driver has no sub-buffers (clCreateSubBuffer)",
            ));
        };
        let region = [range.start, range.len()];
        let mut code = 0;
        // SAFETY: the region is an origin and a size within the buffer; flags 0 inherit those of the parent.
        let id =
            unsafe { create(m.id, 0, ffi::BUFFER_CREATE_TYPE_REGION, region.as_ptr().cast(), &mut code) };
        m.shared.check_created(code, "clCreateSubBuffer", format_args!("{range:?} of {} bytes", m.len))?;
        let whole = Some((self.clone(), range.start));
        Ok(Buffer::from_id(&m.shared, id, (range.len(), m.access, m.place), whole))
    }

    /// Returns an image with texels of one or four 32-bit words of this buffer, which it keeps alive. Only for kernels.
    ///
    /// # Errors
    /// [`FailureKind::Unsupported`] if the device has no images, or none of this size.
    pub fn create_image(&self, words: usize) -> Result<Buffer> {
        let m = &self.memory;
        let (api, width) = (m.shared.api_or_failure()?, m.len / (4 * words));
        let create = api.clCreateImage.filter(|_| width <= m.shared.facts.image_texels);
        let Some(create) = create else {
            let message = format!("this device has no image of {width} texels");
            return Err(Failure::new(FailureKind::Unsupported, message));
        };
        let channels = if words == 4 { ffi::CHANNELS_RGBA } else { ffi::CHANNEL_R };
        let description = ffi::ImageDescription {
            kind: ffi::IMAGE_OF_BUFFER,
            width,
            height: 0,
            depth: 0,
            array_size: 0,
            row_pitch: 0,
            slice_pitch: 0,
            levels: 0,
            samples: 0,
            memory: m.id,
        };
        let format = [channels, ffi::UNSIGNED_INT32];
        let (context, mut code) = (m.shared.context, 0);
        // SAFETY: both descriptions are valid, and the texels are within the buffer, which stays alive.
        let id = unsafe { create(context, ffi::MEM_READ_ONLY, &format, &description, null_mut(), &mut code) };
        m.shared.check_created(code, "clCreateImage", format_args!("{width} texels"))?;
        Ok(Buffer::from_id(&m.shared, id, (m.len, Access::ReadOnly, m.place), Some((self.clone(), 0))))
    }

    /// Parent buffer and offset; `None` if this is not a part.
    pub fn parent_and_offset(&self) -> Option<(&Buffer, usize)> {
        self.memory.parent.as_ref().map(|(whole, at)| (whole, *at))
    }

    /// Always false: a buffer has at least one byte.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Writes after queued work, and waits until `bytes` have been read.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let m = &self.memory;
        m.assert_holds(&(offset..offset + bytes.len()));
        m.assert_writable();
        m.shared.write(m.id, offset, bytes)
    }

    /// Waits for queued work and reads.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let m = &self.memory;
        m.assert_holds(&(offset..offset + bytes.len()));
        m.assert_readable();
        m.shared.read(m.id, offset, bytes)
    }

    /// Waits for queued work and reads strided pieces into `bytes`, one after the other.
    pub fn read_pieces(&self, pieces: StridedPieces, bytes: &mut [u8]) -> Result<()> {
        let m = &self.memory;
        m.assert_readable();
        if m.check_pieces(pieces, bytes.len()) { m.shared.read_pieces(m.id, pieces, bytes) } else { Ok(()) }
    }

    /// Writes strided pieces after queued work, and waits until `bytes` have been read.
    pub fn write_pieces(&self, pieces: StridedPieces, bytes: &[u8]) -> Result<()> {
        let m = &self.memory;
        m.assert_writable();
        if m.check_pieces(pieces, bytes.len()) { m.shared.write_pieces(m.id, pieces, bytes) } else { Ok(()) }
    }

    pub fn copy_to(&self, range: Range<usize>, to: &Buffer, offset: usize) -> Result<()> {
        let (m, t) = (&self.memory, &to.memory);
        m.assert_holds(&range);
        m.assert_readable();
        t.assert_holds(&(offset..offset + range.len()));
        t.assert_writable();
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: within both buffers.
        let code = unsafe {
            let api = m.shared.api_or_failure()?;
            let (copy, start, len) = (api.clEnqueueCopyBuffer, range.start, range.len());
            copy(m.shared.queue, m.id, t.id, start, offset, len, 0, null(), null_mut())
        };
        m.shared.check(
            code,
            "clEnqueueCopyBuffer",
            format_args!("{range:?} of {} bytes to {offset} of {}", m.len, t.len),
        )
    }

    /// Queues setting every byte of `range` to `byte`.
    pub fn fill(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let m = &self.memory;
        m.assert_holds(&range);
        m.assert_writable();
        if range.is_empty() {
            return Ok(());
        }
        let api = m.shared.api_or_failure()?;
        let Some(fill) = api.clEnqueueFillBuffer else {
            drop(api);
            return self.fill_by_writing(range, byte);
        };
        let pattern: *const c_void = (&raw const byte).cast();
        // SAFETY: within the buffer; the call copies the one-byte pattern.
        let code = unsafe {
            fill(m.shared.queue, m.id, pattern, 1, range.start, range.len(), 0, null(), null_mut())
        };
        m.shared.check(code, "clEnqueueFillBuffer", format_args!("{range:?} of {} bytes", m.len))
    }

    /// Implements [`Buffer::fill`] for drivers of OpenCL 1.1.
    fn fill_by_writing(&self, range: Range<usize>, byte: u8) -> Result<()> {
        let piece = vec![byte; range.len().min(1 << 20)];
        let starts = range.clone().step_by(piece.len());
        starts.into_iter().try_for_each(|at| self.write(at, &piece[..piece.len().min(range.end - at)]))
    }
}

/// Views floats as bytes, as buffers store them. Host and device of all OpenCL platforms in use are little-endian.
pub fn bytes_of(x: &[f32]) -> &[u8] {
    // SAFETY: same memory and length; every byte of a float is initialised, and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// Views floats as writable bytes.
pub fn bytes_of_mut(x: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above; any four bytes are a valid float.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(x)) }
}
