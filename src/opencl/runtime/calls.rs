//! Calls on an open device, made until the first failure.
//!
//! After a failure the device counts as lost. Queued work may still run and access its memory, so nothing known to the
//! driver is freed, and no more calls are made. Failing to create a replaceable object is an exception: a buffer that
//! does not fit, a program that does not compile.

use super::calling::Calling;
use super::device::Shared;
use super::failure::{Failure, Kind, Result, check};
use super::ffi::MemId;
use super::load;
use super::waiter::{Address, Call, Pieces, Unanswered};
use std::fmt::Display;
use std::io::Write;
use std::ptr::NonNull;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;

/// Maximum bytes of one read or write.
const PIECE: usize = 1 << 20;

/// Ends the process. Skips exit handlers once a driver is loaded: its handlers may wait for a lost device, or free what
/// its threads still use and crash after all work is done.
#[allow(unsafe_code)]
pub fn end(code: i32) -> ! {
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
    pub fn api(&self) -> Result<Calling> {
        if let Some(first) = self.lost.get() {
            return Err(first.clone());
        }
        match self.waiter.settle() {
            Ok(()) => Ok(Calling::new(&self.library.api)),
            Err(why) => Err(self.unanswered("an earlier call", &"it", why)),
        }
    }

    /// Returns the entry points for releasing an object; `None` if it must be leaked.
    pub fn to_release(&self) -> Option<Calling> {
        if self.lost.get().is_none() && self.waiter.is_left() {
            self.lose(Failure::new(Kind::Lost, "closed while a call is under way"));
        }
        self.lost.get().is_none().then(|| Calling::new(&self.library.api))
    }

    /// Marks the device as lost and returns `why`, for the caller.
    pub fn lose(&self, why: Failure) -> Failure {
        if self.lost.set(why.clone()).is_ok() {
            self.waiter.leak();
        }
        why
    }

    /// Checks the result of a call; any failure loses the device.
    pub fn check(&self, code: i32, call: &str, what: impl Display) -> Result<()> {
        check(code, call, what).map_err(|failure| self.lose(failure))
    }

    /// Checks the result of creating an object; the device survives if there is no room or it does not build.
    pub fn check_made(&self, code: i32, call: &str, what: impl Display) -> Result<()> {
        check(code, call, what).map_err(|failure| match failure.kind {
            Kind::Lost => self.lose(failure),
            _ => failure,
        })
    }

    fn unanswered(&self, call: &str, what: &dyn Display, why: Unanswered) -> Failure {
        match why {
            Unanswered::TooLong(waited) => {
                let seconds = waited.as_secs_f64();
                let message = format!("{call} of {what} has not returned for {seconds:.1} s");
                self.lose(Failure::new(Kind::Lost, message))
            }
            Unanswered::Stopped => Failure::new(Kind::Stopped, format!("{call} was interrupted")),
        }
    }

    /// Makes a call that waits for the device.
    pub fn wait(&self, call: Call, what: impl Display) -> Result<Option<Address>> {
        self.api()?;
        self.transfers.fetch_add(u64::from(call.bytes() > 0), Ordering::Relaxed);
        self.moved.fetch_add(call.bytes() as u64, Ordering::Relaxed);
        match self.waiter.ask(call) {
            Ok(answer) => self.check(answer.code, call.name(), what).map(|()| answer.start),
            Err(why) => Err(self.unanswered(call.name(), &what, why)),
        }
    }

    /// Staging memory of at least `len` bytes, not used by any call.
    fn passage(&self, len: usize) -> Result<MutexGuard<'_, Vec<u8>>> {
        let mut bytes = self.waiter.bytes();
        self.api()?;
        if bytes.len() < len {
            *bytes = vec![0; len];
        }
        Ok(bytes)
    }

    /// Waits for queued work and reads from `offset` of a buffer.
    pub fn read(&self, from: MemId, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let mut passage = self.passage(bytes.len().min(PIECE))?;
        for (i, piece) in bytes.chunks_mut(PIECE).enumerate() {
            let landed = &mut passage[..piece.len()];
            let to = Address(NonNull::from(&mut *landed).cast());
            let (at, len) = (offset + i * PIECE, piece.len());
            self.wait(Call::Read { from, offset: at, to, len }, format_args!("{len} bytes at {at}"))?;
            piece.copy_from_slice(landed);
        }
        Ok(())
    }

    /// Writes to `offset` of a buffer, after queued work.
    pub fn write(&self, to: MemId, offset: usize, bytes: &[u8]) -> Result<()> {
        let mut passage = self.passage(bytes.len().min(PIECE))?;
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            let sent = &mut passage[..piece.len()];
            sent.copy_from_slice(piece);
            let from = Address(NonNull::from(sent).cast());
            let (at, len) = (offset + i * PIECE, piece.len());
            self.wait(Call::Write { from, len, to, offset: at }, format_args!("{len} bytes at {at}"))?;
        }
        Ok(())
    }

    /// Reads strided pieces into `bytes`, one after the other. It is a single transfer if the driver supports that and
    /// they are small.
    pub fn read_pieces(&self, from: MemId, pieces: Pieces, bytes: &mut [u8]) -> Result<()> {
        if self.api()?.clEnqueueReadBufferRect.is_none() || bytes.len() > PIECE {
            let mut each = bytes.chunks_exact_mut(pieces.len).enumerate();
            return each.try_for_each(|(i, out)| self.read(from, pieces.start + i * pieces.pitch, out));
        }
        let mut passage = self.passage(bytes.len())?;
        let landed = &mut passage[..bytes.len()];
        let to = Address(NonNull::from(&mut *landed).cast());
        self.wait(Call::ReadPieces { from, pieces, to }, format_args!("{pieces:?}"))?;
        bytes.copy_from_slice(landed);
        Ok(())
    }

    /// Writes strided pieces from `bytes`; see [`Shared::read_pieces`].
    pub fn write_pieces(&self, to: MemId, pieces: Pieces, bytes: &[u8]) -> Result<()> {
        if self.api()?.clEnqueueWriteBufferRect.is_none() || bytes.len() > PIECE {
            let mut each = bytes.chunks_exact(pieces.len).enumerate();
            return each.try_for_each(|(i, bytes)| self.write(to, pieces.start + i * pieces.pitch, bytes));
        }
        let mut passage = self.passage(bytes.len())?;
        let sent = &mut passage[..bytes.len()];
        sent.copy_from_slice(bytes);
        let from = Address(NonNull::from(sent).cast());
        self.wait(Call::WritePieces { from, to, pieces }, format_args!("{pieces:?}")).map(drop)
    }
}
