//! A saved session: the header's text and what follows it, with sums that fit.
#![no_main]

use antigravity::{Engine, EngineOptions, saved};
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    let mut options = EngineOptions::new(antigravity::dims::MODEL_DIR);
    options.max_seq_len = 64;
    Engine::load(options).expect("the bundled model loads")
});

/// Splits at the first zero byte into header and rows; `raw` files are taken as they are.
fn content(data: &[u8]) -> Vec<u8> {
    let Some((b'!', data)) = data.split_first().map(|(first, rest)| (*first, rest)) else { return data.to_vec() };
    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    let (json, rows) = (&data[..end], data.get(end + 1..).unwrap_or(&[]));
    let mut file = [saved::MAGIC, &[saved::VERSION][..], &(json.len() as u64).to_le_bytes(), json].concat();
    file.extend(crc32fast::hash(&file).to_le_bytes());
    file.extend(rows);
    file.extend(crc32fast::hash(&file).to_le_bytes());
    file
}

fuzz_target!(|data: &[u8]| {
    let path = antigravity_fuzz::file("session", &content(data));
    let mut session = ENGINE.session().expect("a session");
    match saved::load_session(&path, &mut session, &ENGINE) {
        // What was restored can go on.
        Ok(Some(_)) if !session.is_full() => drop(session.decode(1)),
        Ok(_) => {}
        Err(_) => assert!(session.tokens().is_empty()),
    }
});
