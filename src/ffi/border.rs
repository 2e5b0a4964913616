//! The border to C: statuses, the last error, texts and buffers of the caller.
//!
//! The header says about every pointer of a caller: it is NULL, or it points to as many elements as its length says,
//! and nobody else writes them during the call. The SAFETY comments call this *the rule of pointers*.

use crate::cli::flags::name_flags_in;
use files::catch_panic::{PanicContext, catch_panic};
use files::{Error, Result};
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::slice;

thread_local! {
    /// The message of this thread's last failed call.
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the API and returns its status.
pub fn run_guarded(call: impl FnOnce() -> Result<()>) -> i32 {
    let context = PanicContext {
        place: "antigravity".into(),
        panic_message: "internal error",
        timeout_message: "",
        remedy: "please report it",
    };
    match catch_panic(&context, call).and_then(|done| done) {
        Ok(()) => 0,
        Err(e) => {
            let e = name_flags_in(e);
            // Messages have no control characters.
            let message = CString::new(e.to_string()).unwrap_or_default();
            let _ = LAST_ERROR.try_with(|last| last.replace(message));
            e.exit_code()
        }
    }
}

/// The message of this thread's last failed call, valid until its next one.
pub fn last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"the thread is ending".as_ptr())
}

/// An array of the caller; `None` for NULL.
///
/// # Errors
///
/// `Usage`: it is NULL with a length, not aligned, or longer than memory.
///
/// # Safety
///
/// The rule of pointers.
pub unsafe fn read_array<'a, T>(name: &str, data: *const T, length: usize) -> Result<Option<&'a [T]>> {
    if data.is_null() {
        return match length {
            0 => Ok(None),
            _ => Err(Error::Usage(format!("`{name}` is NULL, but its length is {length}"))),
        };
    }
    if !data.is_aligned() || length.checked_mul(size_of::<T>()).is_none_or(|n| n > isize::MAX as usize) {
        return Err(Error::Usage(format!("`{name}` is not an array of {length} elements")));
    }
    // SAFETY: not null, aligned and not too long, checked above; readable and unchanged by the rule of pointers.
    Ok(Some(unsafe { slice::from_raw_parts(data, length) }))
}

/// A text of the caller; `None` for NULL.
///
/// # Errors
///
/// `Usage`: errors of [`read_array`]; it is not UTF-8.
///
/// # Safety
///
/// The rule of pointers.
pub unsafe fn read_text<'a>(name: &str, data: *const c_char, length: usize) -> Result<Option<&'a str>> {
    // SAFETY: passed on to the caller.
    let Some(bytes) = (unsafe { read_array(name, data.cast::<u8>(), length) })? else { return Ok(None) };
    let text = std::str::from_utf8(bytes);
    text.map(Some)
        .map_err(|e| Error::Usage(format!("`{name}` is not UTF-8 from byte {} on", e.valid_up_to())))
}

/// Writes a result; `out` must not be NULL.
///
/// # Errors
///
/// `Usage`: it is NULL or not aligned.
///
/// # Safety
///
/// The rule of pointers.
pub unsafe fn write_out<T>(name: &str, out: *mut T, value: T) -> Result<()> {
    check_out(name, out)?;
    // SAFETY: not null and aligned, checked above; writable by the rule of pointers.
    unsafe { out.write(value) };
    Ok(())
}

/// Checks a place for a result before anything is done.
///
/// # Errors
///
/// Errors of [`write_out`].
pub fn check_out<T>(name: &str, out: *mut T) -> Result<()> {
    if out.is_null() || !out.is_aligned() {
        return Err(Error::Usage(format!("`{name}` is NULL or not aligned; give a place for the result")));
    }
    Ok(())
}

/// Writes elements and their number to a buffer of the caller. The number is written even if they do not fit.
///
/// # Errors
///
/// `Usage`: the buffer is too small, or errors of [`read_array`] and [`write_out`].
///
/// # Safety
///
/// The rule of pointers.
pub unsafe fn write_array<T: Copy>(
    values: &[T],
    (buffer, capacity): (*mut T, usize),
    count: *mut usize,
) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { write_out("count", count, values.len()) }?;
    if capacity < values.len() {
        let need = values.len();
        return Err(Error::Usage(format!("`buffer` has room for {capacity} elements; {need} are needed")));
    }
    if buffer.is_null() || !buffer.is_aligned() {
        return if values.is_empty() { Ok(()) } else { check_out("buffer", buffer) };
    }
    // SAFETY: not null, aligned and long enough, checked above; writable by the rule of pointers. `values` are memory
    // of this library, which no buffer of a caller overlaps.
    unsafe { buffer.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
    Ok(())
}
