//! Restores the terminal's mode when a signal ends the program while the line editor runs.

use rustix::process::getpgrp;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use std::io::{stdin, stdout};
use std::sync::OnceLock;

static BEFORE: OnceLock<Termios> = OnceLock::new();

/// Switches bracketed paste off, which the editor switches on.
const NO_BRACKETED_PASTE: &[u8] = b"\x1b[?2004l";

/// Remembers the mode of stdin, before there is an editor.
pub fn remember() {
    if let Ok(mode) = tcgetattr(stdin()) {
        BEFORE.get_or_init(|| mode);
    }
}

/// While it lives, stdin shows nothing of what is typed, which waits for the next prompt. Ctrl-C works.
pub struct Hushed(Option<Termios>);

impl Hushed {
    pub fn new() -> Self {
        let before = tcgetattr(stdin()).ok();
        if let Some(mut mode) = before.clone() {
            mode.local_modes.remove(LocalModes::ECHO);
            let _ = tcsetattr(stdin(), OptionalActions::Now, &mode);
        }
        Self(before)
    }
}

impl Drop for Hushed {
    fn drop(&mut self) {
        if let Some(mode) = &self.0 {
            let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
        }
    }
}

/// Restores the mode, unless another process has the terminal now: setting it would then stop this one.
pub fn restore() {
    let Some(mode) = BEFORE.get() else { return };
    if tcgetpgrp(stdin()).is_ok_and(|foreground| foreground != getpgrp()) {
        return;
    }
    // Without waiting for a terminal that has gone or for a lock on stdout.
    let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
    let _ = rustix::io::write(stdout(), NO_BRACKETED_PASTE);
}
