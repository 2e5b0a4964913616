//! The terminal's mode: without echo while an answer is printed, and restored when a signal ends the program.

use rustix::process::getpgrp;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use std::io::{stdin, stdout};
use std::sync::OnceLock;

static SAVED_MODE: OnceLock<Termios> = OnceLock::new();

/// Switches bracketed paste off; the line editor switches it on.
const NO_BRACKETED_PASTE: &[u8] = b"\x1b[?2004l";

/// Saves the mode of stdin; called before the line editor starts.
pub fn save_mode() {
    if let Ok(mode) = tcgetattr(stdin()) {
        SAVED_MODE.get_or_init(|| mode);
    }
}

/// Stops the terminal from echoing typed text, which waits for the next prompt; Ctrl-C still works. Restores the mode
/// when dropped.
pub struct EchoGuard(Option<Termios>);

impl EchoGuard {
    pub fn disable_echo() -> Self {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut mode) = before.clone() {
            mode.local_modes.remove(LocalModes::ECHO);
            let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
        }
        Self(before)
    }
}

impl Drop for EchoGuard {
    fn drop(&mut self) {
        if let Some(mode) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
        }
    }
}

/// Restores the saved mode, unless another process has the terminal: setting the mode would then stop this one.
pub fn restore_mode() {
    let Some(mode) = SAVED_MODE.get() else { return };
    if tcgetpgrp(stdin()).is_ok_and(|foreground| foreground != getpgrp()) {
        return;
    }
    // Never waits for a terminal that is gone or for a lock on stdout.
    let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
    let _ = rustix::io::write(stdout(), NO_BRACKETED_PASTE);
}
