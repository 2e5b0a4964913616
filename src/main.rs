//! Entry point.
fn main() {
    println!("{}", antigravity::dims::MODEL);
}
