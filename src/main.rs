//! Runs the command line and prints its error.

use antigravity::{Error, commands};
use files::{print_stderr, stderr};
use rustix::process::{Resource, getrlimit};
use std::thread;

/// Bytes of stack that the program needs: the usual `ulimit -s`.
const MIN_STACK: usize = 8 << 20;

fn main() {
    stderr::install_panic_hook();
    if getrlimit(Resource::Stack).current.is_some_and(|bytes| bytes < MIN_STACK as u64)
        && let Ok(thread) = thread::Builder::new().stack_size(MIN_STACK).spawn(|| run())
    {
        // `run` ends the process unless it panics.
        let _ = thread.join();
        commands::exit_process(101);
    }
    run()
}

fn run() -> ! {
    let Err(error) = commands::run() else { commands::exit_process(0) };
    if error != Error::ClosedPipe && error != Error::Interrupted {
        print_stderr!("error: {error}");
    }
    commands::exit_process(error.exit_code())
}
