//! Parses the command line, runs the command, prints the error.

fn main() {
    let Err(error) = antigravity::cli::run() else { antigravity::opencl::end(0) };
    if error != antigravity::Error::ClosedPipe && error != antigravity::Error::Interrupted {
        eprintln!("error: {error}");
    }
    antigravity::opencl::end(error.exit_code());
}
