//! Calls on an open device, made until the first failure.
//!
//! After a failure the device counts as lost. Queued work may still run and access its memory, so nothing known to the
//! driver is freed, and no more calls are made. Failing to create a replaceable object is an exception: a buffer that
//! does not fit, a program that does not compile.

use super::device::Shared;
use super::failure::{Failure, FailureKind, Result, check_code};
use super::ffi::MemId;
use super::load;
use super::pending_calls::ApiGuard;
use super::watchdog::{Address, Call, CallError, StridedPieces};
use std::fmt::Display;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// Maximum bytes of one read or write.
const MAX_TRANSFER_BYTES: usize = 1 << 20;

/// Ends the process. Skips exit handlers once a driver is loaded: its handlers may wait for a lost device, or free what
/// its threads still use and crash after all work is done.
#[allow(unsafe_code)]
pub fn exit_process(code: i32) -> ! {
    if load::is_any_loaded() {
        // The reader of stdout may be gone.
        let _ = std::io::stdout().flush();
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(code) }
    }
    std::process::exit(code)
}

impl Shared {
    /// Returns the entry points, for one call.
    ///
    /// # Errors
    ///
    /// The first failure, if the device is lost.
    pub fn api_or_failure(&self) -> Result<ApiGuard> {
        if let Some(first) = self.lost.get() {
            return Err(first.clone());
        }
        match self.waiter.wait_for_abandoned() {
            Ok(()) => Ok(ApiGuard::new(&self.library.api)),
            Err(why) => Err(self.unanswered_failure("an earlier call", &"it", why)),
        }
    }

    /// Returns the entry points for releasing an object; `None` if it must be leaked.
    pub fn api_for_release(&self) -> Option<ApiGuard> {
        if self.lost.get().is_none() && self.waiter.has_abandoned_call() {
            self.mark_lost(Failure::new(FailureKind::Lost, "closed while a call is under way"));
        }
        self.lost.get().is_none().then(|| ApiGuard::new(&self.library.api))
    }

    /// Marks the device as lost and returns `why`, for the caller.
    pub fn mark_lost(&self, why: Failure) -> Failure {
        if self.lost.set(why.clone()).is_ok() {
            self.waiter.leak_thread();
        }
        why
    }

    /// Checks the result of a call; any failure loses the device.
    pub fn check(&self, code: i32, call: &str, what: impl Display) -> Result<()> {
        check_code(code, call, what).map_err(|failure| self.mark_lost(failure))
    }

    /// Checks the result of creating an object; the device survives if there is no room or it does not build.
    pub fn check_created(&self, code: i32, call: &str, what: impl Display) -> Result<()> {
        check_code(code, call, what).map_err(|failure| match failure.kind {
            FailureKind::Lost => self.mark_lost(failure),
            _ => failure,
        })
    }

    fn unanswered_failure(&self, call: &str, what: &dyn Display, why: CallError) -> Failure {
        match why {
            CallError::TimedOut(waited) => {
                let seconds = waited.as_secs_f64();
                let message = format!("{call} of {what} has not returned for {seconds:.1} s");
                self.mark_lost(Failure::new(FailureKind::Lost, message))
            }
            CallError::Stopped => Failure::new(FailureKind::Stopped, format!("{call} was interrupted")),
        }
    }

    /// Makes a call that waits for the device.
    pub fn wait_for_call(&self, call: Call, what: impl Display) -> Result<Option<Address>> {
        self.api_or_failure()?;
        self.transfers.fetch_add(u64::from(call.bytes() > 0), Ordering::Relaxed);
        self.moved.fetch_add(call.bytes() as u64, Ordering::Relaxed);
        match self.waiter.make_call(call) {
            Ok(answer) => self.check(answer.code, call.name(), what).map(|()| answer.start),
            Err(why) => Err(self.unanswered_failure(call.name(), &what, why)),
        }
    }

    /// Staging memory of at least `len` bytes, not used by any call.
    fn lock_staging(&self, len: usize) -> Result<MutexGuard<'_, Vec<u8>>> {
        let mut bytes = self.waiter.lock_staging();
        self.api_or_failure()?;
        if bytes.len() < len {
            *bytes = vec![0; len];
        }
        Ok(bytes)
    }

    /// Waits for queued work and reads from `offset` of a buffer.
    pub fn read(&self, from: MemId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let mut passage = self.lock_staging(bytes.len().min(MAX_TRANSFER_BYTES))?;
        for (i, piece) in bytes.chunks_mut(MAX_TRANSFER_BYTES).enumerate() {
            let arrived = &mut passage[..piece.len()];
            let to = Address(NonNull::from(&mut *arrived).cast());
            let (at, len) = (offset + i * MAX_TRANSFER_BYTES, piece.len());
            self.wait_for_call(
                Call::Read { from, offset: at, to, len },
                format_args!("{len} bytes at {at}"),
            )?;
            piece.copy_from_slice(arrived);
        }
        Ok(())
    }

    /// Writes to `offset` of a buffer, after queued work.
    pub fn write(&self, to: MemId, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut passage = self.lock_staging(bytes.len().min(MAX_TRANSFER_BYTES))?;
        for (i, piece) in bytes.chunks(MAX_TRANSFER_BYTES).enumerate() {
            let sent = &mut passage[..piece.len()];
            sent.copy_from_slice(piece);
            let from = Address(NonNull::from(sent).cast());
            let (at, len) = (offset + i * MAX_TRANSFER_BYTES, piece.len());
            self.wait_for_call(
                Call::Write { from, len, to, offset: at },
                format_args!("{len} bytes at {at}"),
            )?;
        }
        Ok(())
    }

    /// Reads strided pieces into `bytes`, one after the other. It is a single transfer if the driver supports that and
    /// they are small.
    pub fn read_pieces(&self, from: MemId, pieces: StridedPieces, bytes: &mut [u8]) -> Result<()> {
        let as_one = pieces.are_in_rows() && bytes.len() <= MAX_TRANSFER_BYTES;
        if self.api_or_failure()?.clEnqueueReadBufferRect.is_none() || !as_one {
            let mut each = bytes.chunks_exact_mut(pieces.len).enumerate();
            return each.try_for_each(|(i, out)| self.read(from, pieces.start + i * pieces.pitch, out));
        }
        let mut passage = self.lock_staging(bytes.len())?;
        let arrived = &mut passage[..bytes.len()];
        let to = Address(NonNull::from(&mut *arrived).cast());
        self.wait_for_call(Call::ReadPieces { from, pieces, to }, format_args!("{pieces:?}"))?;
        bytes.copy_from_slice(arrived);
        Ok(())
    }

    /// Writes strided pieces from `bytes`; see [`Shared::read_pieces`].
    pub fn write_pieces(&self, to: MemId, pieces: StridedPieces, bytes: &[u8]) -> Result<()> {
        let as_one = pieces.are_in_rows() && bytes.len() <= MAX_TRANSFER_BYTES;
        if self.api_or_failure()?.clEnqueueWriteBufferRect.is_none() || !as_one {
            let mut each = bytes.chunks_exact(pieces.len).enumerate();
            return each.try_for_each(|(i, bytes)| self.write(to, pieces.start + i * pieces.pitch, bytes));
        }
        let mut passage = self.lock_staging(bytes.len())?;
        let sent = &mut passage[..bytes.len()];
        sent.copy_from_slice(bytes);
        let from = Address(NonNull::from(sent).cast());
        self.wait_for_call(Call::WritePieces { from, to, pieces }, format_args!("{pieces:?}")).map(drop)
    }
}
