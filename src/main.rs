//! Runs the command line and prints its error.

use antigravity::{Error, commands};
use files::{say, stderr};
use rustix::process::{Resource, getrlimit};
use std::thread;

/// Bytes of stack that the program needs: the usual `ulimit -s`.
const STACK: usize = 8 << 20;

fn main() {
    stderr::say_panics();
    if getrlimit(Resource::Stack).current.is_some_and(|bytes| bytes < STACK as u64)
        && let Ok(thread) = thread::Builder::new().stack_size(STACK).spawn(|| run())
    {
        // `run` ends the process unless it panics.
        let _ = thread.join();
        commands::leave(101);
    }
    run()
}

fn run() -> ! {
    let Err(error) = commands::run() else { commands::leave(0) };
    if error != Error::ClosedPipe && error != Error::Interrupted {
        say!("error: {error}");
    }
    commands::leave(error.exit_code())
}
