//! The terminal's mode: keeps typed text while nobody reads it, and is restored when a signal ends the program.

use rustix::process::getpgrp;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use std::io::{stdin, stdout};
use std::sync::OnceLock;

static SAVED_MODE: OnceLock<Termios> = OnceLock::new();

/// Switches bracketed paste on and off, as the line editor does: a pasted text is then one message.
const BRACKETED_PASTE: &[u8] = b"\x1b[?2004h";
const NO_BRACKETED_PASTE: &[u8] = b"\x1b[?2004l";

/// Saves the mode of stdin; called before the line editor starts.
pub fn save_mode() {
    if let Ok(mode) = tcgetattr(stdin()) {
        SAVED_MODE.get_or_init(|| mode);
    }
}

/// Makes typed text wait for the next prompt, without echo; Ctrl-C still works. Restores the mode when dropped.
pub struct TypingGuard(Option<Termios>);

impl TypingGuard {
    pub fn hold_typing() -> Self {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut mode) = before.clone() {
            // Not line by line: the terminal would drop what exceeds 4,095 bytes of a line, and take Ctrl-D for itself.
            mode.local_modes.remove(LocalModes::ECHO | LocalModes::ICANON);
            let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
            let _ = rustix::io::write(stdout(), BRACKETED_PASTE);
        }
        Self(before)
    }
}

impl Drop for TypingGuard {
    fn drop(&mut self) {
        if let Some(mode) = &self.0 {
            let _ = rustix::io::write(stdout(), NO_BRACKETED_PASTE);
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
