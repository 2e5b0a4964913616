//! The terminal's mode as it was before the line editor, for signals that end the program while it edits.

use rustix::process::getpgrp;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};
use std::io::{stdin, stdout};
use std::sync::OnceLock;

static BEFORE: OnceLock<Termios> = OnceLock::new();

/// What the editor switches on besides: the terminal marks what is pasted.
const NO_MARKS: &[u8] = b"\x1b[?2004l";

/// Remembers the mode of stdin, before there is an editor.
pub(super) fn remember() {
    if let Ok(mode) = tcgetattr(stdin()) {
        BEFORE.get_or_init(|| mode);
    }
}

/// Makes the terminal what it was. Where it is another process's by now, setting it would stop this one.
pub(super) fn restore() {
    let Some(mode) = BEFORE.get() else { return };
    if tcgetpgrp(stdin()).is_ok_and(|foreground| foreground != getpgrp()) {
        return;
    }
    // Whoever ends the program does not wait for a terminal that has gone, nor for a lock on stdout.
    let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
    let _ = rustix::io::write(stdout(), NO_MARKS);
}
