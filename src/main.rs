//! Parses the command line, runs the command, prints the error.

fn main() {
    let Err(error) = antigravity::cli::run() else { return };
    if error != antigravity::Error::ClosedPipe && error != antigravity::Error::Interrupted {
        eprintln!("error: {error}");
    }
    std::process::exit(error.exit_code());
}
