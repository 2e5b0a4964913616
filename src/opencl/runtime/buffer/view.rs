//! The CPU's views on host-visible buffers: for a while, or for good.

use super::{Access, Place};
use super::{Address, Buffer, FROZEN, MAPPED, UNMAPPED};
use crate::failure::Result;
use crate::ffi;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::atomic::Ordering;

/// What a view is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapFor {
    Reading,
    /// The bytes are anything until they are written, all of them.
    Writing,
    ReadingAndWriting,
}

impl Buffer {
    /// Waits for what is queued and gives the CPU `range` of a host-visible buffer; the device has it back
    /// when the view goes.
    pub fn map(&mut self, range: Range<usize>, purpose: MapFor) -> Result<Mapped<'_>> {
        self.clone().into_map(range, purpose)
    }

    /// [`Buffer::map`] with a view that owns the buffer.
    pub fn into_map<'a>(self, range: Range<usize>, purpose: MapFor) -> Result<Mapped<'a>> {
        let m = &self.memory;
        assert!(m.place == Place::HostVisible, "only a host-visible buffer can be mapped");
        m.assert_holds(&range);
        assert!(!range.is_empty(), "a view has at least one byte");
        assert!(m.enter(MAPPED), "a buffer is mapped twice");
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

    /// Gives the CPU a host-visible, read-only buffer for reading, for good: kernels go on reading it, and
    /// nobody writes it any more. For weights that CPU and device share.
    pub fn freeze(self) -> Result<SharedView> {
        let m = &self.memory;
        let fits = m.place == Place::HostVisible && m.access == Access::ReadOnly;
        assert!(fits, "only a host-visible, read-only buffer can be frozen");
        if m.frozen.get().is_none() {
            assert!(m.enter(FROZEN), "a buffer is frozen while it is mapped");
            let start = m
                .map(&(0..m.len), ffi::MAP_READ)
                .inspect_err(|_| m.state.store(UNMAPPED, Ordering::Relaxed))?;
            let first = m.frozen.set(Address(start)).is_ok();
            assert!(first, "only who took the buffer from UNMAPPED comes here");
        }
        Ok(SharedView { buffer: self })
    }
}

/// The CPU's view on a part of a buffer.
pub struct Mapped<'a> {
    buffer: Buffer,
    /// Address of the bytes for the CPU.
    start: Address,
    len: usize,
    purpose: MapFor,
    /// Until it is given back.
    mapped: bool,
    borrowed: PhantomData<&'a mut Buffer>,
}

impl Mapped<'_> {
    /// The bytes, for writing too.
    ///
    /// # Panics
    /// When the view is for reading only.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.purpose != MapFor::Reading, "a view for reading is written");
        // SAFETY: mapped for `len` bytes until `self` goes; `self` is borrowed mutably and the
        // device leaves the buffer alone (launches and writes assert it).
        unsafe { std::slice::from_raw_parts_mut(self.start.0.as_ptr(), self.len) }
    }

    /// Gives the bytes back to the device, which then sees what was written.
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
        // SAFETY: mapped for `len` bytes until `self` goes.
        unsafe { std::slice::from_raw_parts(self.start.0.as_ptr(), self.len) }
    }
}

impl Drop for Mapped<'_> {
    fn drop(&mut self) {
        if self.mapped && self.buffer.memory.shared.to_release().is_some() {
            // A device that fails here fails in the next call too, which reports it.
            let _ = self.give_back();
        }
    }
}

/// A frozen buffer as the CPU reads it.
#[derive(Clone)]
pub struct SharedView {
    buffer: Buffer,
}

impl SharedView {
    /// For the arguments of kernels.
    pub fn buffer(&self) -> &Buffer {
        &self.buffer
    }
}

impl Deref for SharedView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let start = self.buffer.memory.frozen.get().expect("set by `freeze`").0;
        // SAFETY: the whole buffer is mapped until the last owner goes; nobody writes a frozen buffer.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.buffer.len()) }
    }
}
