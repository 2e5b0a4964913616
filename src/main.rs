//! Parses the command line, runs the command, prints the error.

use antigravity::{Error, cli};
use files::{say, stderr};

fn main() {
    stderr::say_panics();
    let Err(error) = cli::run() else { cli::leave(0) };
    if error != Error::ClosedPipe && error != Error::Interrupted {
        say!("error: {error}");
    }
    cli::leave(error.exit_code())
}
