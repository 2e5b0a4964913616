//! What the CPU sees of host-visible buffers where stale views are to be found out.

use super::Address;
use super::view::MapFor;
use std::alloc::Layout;
use std::ops::Range;
use std::ptr::NonNull;

/// Set to 1 (or 0), the CPU's views are (not) copies that are poisoned when unmapped.
pub const SHADOW_VARIABLE: &str = "ANTIGRAVITY_OPENCL_SHADOW";
/// What a stale view reads.
pub const POISON: u8 = 0xAA;

/// Whether views are shadows in this process.
pub(super) fn wanted() -> bool {
    std::env::var(SHADOW_VARIABLE).map_or(cfg!(debug_assertions), |v| v == "1")
}

/// What the CPU sees of a host-visible buffer instead of it, at the same offsets.
pub(super) struct Shadow {
    bytes: Address,
    layout: Layout,
}

impl Shadow {
    pub fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(len, 4096).expect("below the device's largest size");
        // SAFETY: of at least one byte.
        let start = unsafe { std::alloc::alloc(layout) };
        let Some(start) = NonNull::new(start) else { std::alloc::handle_alloc_error(layout) };
        // SAFETY: just allocated, `len` bytes.
        unsafe { start.write_bytes(POISON, len) };
        Self { bytes: Address(start), layout }
    }

    fn at(&self, range: &Range<usize>) -> NonNull<u8> {
        // SAFETY: within the allocation, which is as long as the buffer.
        unsafe { self.bytes.0.add(range.start) }
    }

    /// Shows what was mapped at `start`; what is only written stays poison until then.
    pub fn load(&self, start: NonNull<u8>, range: &Range<usize>, purpose: MapFor) -> NonNull<u8> {
        let view = self.at(range);
        if purpose != MapFor::Writing {
            // SAFETY: both are `range.len()` bytes, of different allocations.
            unsafe { view.copy_from_nonoverlapping(start, range.len()) };
        }
        view
    }

    /// Takes what was written to where it was mapped, and poisons the view.
    pub fn store(&self, start: NonNull<u8>, range: &Range<usize>, purpose: MapFor) {
        let view = self.at(range);
        // SAFETY: both are `range.len()` bytes, of different allocations; the view's user has gone.
        unsafe {
            if purpose != MapFor::Reading {
                start.copy_from_nonoverlapping(view, range.len());
            }
            view.write_bytes(POISON, range.len());
        }
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { std::alloc::dealloc(self.bytes.0.as_ptr(), self.layout) };
    }
}
