//! The only writer of stderr. Text that cannot be written is dropped: `eprintln!` would end the program if a disk is
//! full or a terminal has been closed.

use crate::error::{MAX_LINE_BYTES, one_line};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Arguments;
use std::io::stderr;
use std::panic::{self, PanicHookInfo};

/// Writes a line to stderr, formatted as by `format!`.
#[macro_export]
macro_rules! print_stderr {
    ($($text:tt)*) => {
        $crate::stderr::write_stderr(::core::format_args!("{}\n", ::core::format_args!($($text)*)))
    };
}

/// Writes text to stderr in one call, so that lines of several threads do not mix.
pub fn write_stderr(text: Arguments<'_>) {
    let text = text.to_string();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(stderr(), rest) {
            Ok(n) if n > 0 => rest = &rest[n..],
            Err(Errno::INTR) => {}
            // The pipe is full, and another process has made it non-blocking.
            Err(Errno::AGAIN) => match poll(&mut [PollFd::new(&stderr(), PollFlags::OUT)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            },
            _ => return,
        }
    }
}

/// Sets a panic hook that prints panics through [`write_stderr`].
pub fn install_panic_hook() {
    panic::set_hook(Box::new(|info: &PanicHookInfo<'_>| {
        print_stderr!("error: {}", one_line(&info.to_string().replace('\n', " "), MAX_LINE_BYTES));
        // A release has no symbols, so a trace would name nothing.
        if cfg!(debug_assertions) && Backtrace::capture().status() == BacktraceStatus::Captured {
            print_stderr!("{}", Backtrace::capture());
        }
    }));
}
