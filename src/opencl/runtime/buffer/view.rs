//! CPU views of host-visible buffers, temporary or permanent.

use super::{Access, Place};
use super::{Address, Buffer, FROZEN, MAPPED, UNMAPPED};
use crate::failure::Result;
use crate::ffi;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::atomic::Ordering;

/// Purpose of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapFor {
    Reading,
    /// The bytes are undefined until written, and all must be written.
    Writing,
    ReadingAndWriting,
}

impl Buffer {
    /// Waits for queued work and lends `range` of a host-visible buffer to the CPU, until the view is dropped.
    pub fn map(&mut self, range: Range<usize>, purpose: MapFor) -> Result<Mapped<'_>> {
        self.clone().into_map(range, purpose)
    }

    /// [`Buffer::map`] with a view that owns the buffer.
    pub fn into_map<'a>(self, range: Range<usize>, purpose: MapFor) -> Result<Mapped<'a>> {
        let m = &self.memory;
        assert!(m.place == Place::HostVisible, "only a host-visible buffer can be mapped");
        m.assert_holds(&range);
        assert!(!range.is_empty(), "a view has at least one byte");
        assert!(m.try_set_state(MAPPED), "a buffer is mapped twice");
        let flags = match purpose {
            MapFor::Reading => ffi::MAP_READ,
            MapFor::Writing => ffi::MAP_WRITE,
            MapFor::ReadingAndWriting => ffi::MAP_READ | ffi::MAP_WRITE,
        };
        let start = match m.map(&range, flags) {
            Ok(start) => start,
            Err(failure) => {
                m.state.store(UNMAPPED, Ordering::Relaxed);
                return Err(failure);
            }
        };
        let start = Address(start);
        Ok(Mapped { buffer: self, start, len: range.len(), purpose, mapped: true, borrowed: PhantomData })
    }

    /// Maps a host-visible, read-only buffer permanently for reading. Kernels keep reading it, and no one writes it any
    /// more. Used for weights shared by CPU and device.
    pub fn map_read_only(self) -> Result<SharedView> {
        let m = &self.memory;
        let fits = m.place == Place::HostVisible && m.access == Access::ReadOnly;
        assert!(fits, "only a host-visible, read-only buffer can be frozen");
        if m.frozen.get().is_none() {
            assert!(m.try_set_state(FROZEN), "a buffer is frozen while it is mapped");
            let start = m
                .map(&(0..m.len), ffi::MAP_READ)
                .inspect_err(|_| m.state.store(UNMAPPED, Ordering::Relaxed))?;
            let first = m.frozen.set(Address(start)).is_ok();
            assert!(first, "only who took the buffer from UNMAPPED comes here");
        }
        Ok(SharedView { buffer: self })
    }
}

/// CPU view of part of a buffer.
pub struct Mapped<'a> {
    buffer: Buffer,
    /// Address for the CPU.
    start: Address,
    len: usize,
    purpose: MapFor,
    /// True until unmapped.
    mapped: bool,
    borrowed: PhantomData<&'a mut Buffer>,
}

impl Mapped<'_> {
    /// The bytes, for reading and writing.
    ///
    /// # Panics
    /// If the view is for reading only.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.purpose != MapFor::Reading, "a view for reading is written");
        // SAFETY: `len` bytes are mapped while `self` exists; `self` is borrowed mutably, and the device leaves the
        // buffer alone (launches and writes assert that).
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr(), self.len) }
    }

    /// Returns the bytes to the device, which then sees what was written.
    pub fn unmap(mut self) -> Result<()> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<()> {
        self.mapped = false;
        let m = &self.buffer.memory;
        let result = m.unmap(self.start.0);
        m.state.store(UNMAPPED, Ordering::Relaxed);
        result
    }
}

impl Deref for Mapped<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped while `self` exists.
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr(), self.len) }
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        if self.mapped && self.buffer.memory.shared.api_for_release().is_some() {
            // If the device fails here, the next call fails too and reports it.
            let _ = self.give_back();
        }
    }
}

/// CPU view of a frozen buffer.
#[derive(Clone)]
pub struct SharedView {
    buffer: Buffer,
}

impl SharedView {
    /// The buffer, for kernel arguments.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl Deref for SharedView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.buffer.memory.frozen.get().expect("set by `freeze`").0;
        // SAFETY: the whole buffer stays mapped until the last owner is dropped; no one writes a frozen buffer.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.buffer.len()) }
    }
}
