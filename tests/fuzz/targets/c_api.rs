//! Calls of the C API with arbitrary arguments: handles, texts, lengths, buffers.
#![no_main]

use antigravity::ffi::engine::*;
use antigravity::ffi::session::*;
use libfuzzer_sys::fuzz_target;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Texts that calls understand; the others come from the input.
const TEXTS: [&str; 12] = [
    "Once upon a time",
    "{}",
    r#"{"num_tokens": 3}"#,
    r#"{"num_tokens": -1, "ignore_eos": true, "temperature": 0}"#,
    r#"{"seed": 7, "top_k": 4, "stop": ["a"], "json_schema": {"type": "object"}}"#,
    r#"[" time", ""]"#,
    r#"[{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]"#,
    r#"{"pooling": "mean", "dimensions": 8}"#,
    r#"{"max_seq_len": 64, "threads": 1}"#,
    r#"{"max_seq_len": 160, "eviction_policy": "sliding", "eviction_window": 64, "threads": 1}"#,
    r#"{"tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"x": 1}}"#,
    antigravity::dims::MODEL_DIR,
];
/// Calls of an input, of which few load a model.
const MAX_CALLS: usize = 24;
const MAX_LOADS: usize = 2;
/// Elements of the buffers.
const ROOM: usize = 300;

static ENGINE: LazyLock<usize> = LazyLock::new(|| {
    let ([model, options], mut engine) = ([TEXTS[11], TEXTS[8]].map(str::as_bytes), null_mut());
    let [from, with] = [model, options].map(|text| text.as_ptr().cast());
    // SAFETY: texts with their lengths, and a place for the handle.
    let status = unsafe { antigravity_load(from, model.len(), with, options.len(), &mut engine) };
    assert_eq!(status, 0, "the bundled model loads");
    engine.addr()
});

/// The rest of an input.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> usize {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first.into()
    }

    /// A text or bytes, NULL with or without a length, or more bytes than memory has.
    fn text(&mut self) -> (*const c_char, usize) {
        match self.byte() {
            kind if kind < 48 => {
                let text = TEXTS[kind % TEXTS.len()];
                (text.as_ptr().cast(), text.len())
            }
            48 => (null(), 0),
            49 => (null(), self.byte()),
            50 => (TEXTS[0].as_ptr().cast(), usize::MAX - self.byte()),
            kind => {
                let (text, rest) = self.0.split_at((kind - 51).min(self.0.len()));
                self.0 = rest;
                // A draft model is a program that would be started.
                let is_draft = text.windows(5).any(|part| part == b"draft");
                if is_draft { (null(), 0) } else { (text.as_ptr().cast(), text.len()) }
            }
        }
    }

    /// One of the open handles, a freed one, or a number.
    fn handle<T>(&mut self, known: &[usize]) -> *mut T {
        without_provenance_mut(match self.byte() {
            0 => 0,
            1 => self.byte() << (self.byte() % 57),
            kind => known[kind % known.len()],
        })
    }

    /// The start of a buffer: NULL, as it is, or not aligned; and elements from there on, perhaps fewer.
    fn buffer<T>(&mut self, buffer: &mut [T; ROOM]) -> (*mut T, usize) {
        let start = buffer.as_mut_ptr();
        match self.byte() {
            0 => (null_mut(), self.byte()),
            1 => (start.cast::<u8>().wrapping_add(1).cast(), ROOM - 1),
            kind if kind < 40 => (start, kind),
            _ => (start, ROOM),
        }
    }

    /// A place for a result.
    fn place<T>(&mut self, place: &mut T) -> *mut T {
        if self.byte() == 0 { null_mut() } else { place }
    }
}

/// Pieces of the current text.
static PIECES: AtomicUsize = AtomicUsize::new(0);

/// Takes some pieces, then cancels; `data` is a session.
unsafe extern "C" fn take_piece(kind: i32, piece: *const c_char, length: usize, data: *mut c_void) -> i32 {
    // SAFETY: a piece with its length, alive during the call.
    let text = unsafe { std::slice::from_raw_parts(piece.cast::<u8>(), length) };
    assert!((0..3).contains(&kind) && std::str::from_utf8(text).is_ok());
    assert_eq!(antigravity_session_rewind(data.cast(), 0), 2, "it is in use");
    i32::from(length == 7 || PIECES.fetch_add(1, Ordering::Relaxed) > 40)
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let (mut engines, mut sessions) = (vec![*ENGINE], vec![0]);
    let (mut ids, mut numbers, mut sums, mut bytes) = ([0; ROOM], [0.0; ROOM], [0.0; ROOM], [0; ROOM]);
    let (mut count, mut engine_made, mut session_made, mut loads) = (0, null_mut(), null_mut(), 0);
    let mut memory = MemoryNeed { needed: 0, peak: 0, available: 0 };
    for _ in 0..MAX_CALLS.min(data.len()) {
        let call = input.byte() % 18;
        // SAFETY: every pointer is NULL, or points to as many elements as its length says, unless that is longer than
        // memory; nobody else uses them.
        let status = unsafe {
            let engine: *mut EngineHandle = input.handle(&engines);
            let session: *mut SessionHandle = input.handle(&sessions);
            match call {
                0..=2 if loads == MAX_LOADS => continue,
                0 => {
                    let ((model, n), (options, m)) = (input.text(), input.text());
                    loads += 1;
                    antigravity_plan(model, n, options, m, input.place(&mut memory))
                }
                1 => {
                    let ((model, n), (options, m)) = (input.text(), input.text());
                    loads += 1;
                    antigravity_load(model, n, options, m, input.place(&mut engine_made))
                }
                2 => {
                    let (fd, at, (options, m)) = (input.byte() as i32 - 1, input.byte() as u64, input.text());
                    loads += 1;
                    antigravity_load_fd(
                        fd,
                        at,
                        input.byte() as u64,
                        options,
                        m,
                        input.place(&mut engine_made),
                    )
                }
                // The first one is used by all inputs.
                3 if engine.addr() == *ENGINE => continue,
                3 => antigravity_free(engine),
                4 => {
                    let ((text, n), special) = (input.text(), input.byte() as i32);
                    let (to, room) = input.buffer(&mut ids);
                    antigravity_tokenize(engine, text, n, special, to, room, input.place(&mut count))
                }
                5 => {
                    let (from, n) = input.buffer(&mut ids);
                    let (to, room) = input.buffer(&mut bytes);
                    antigravity_detokenize(engine, from, n, to, room, input.place(&mut count))
                }
                6 => {
                    let ((texts, n), (options, m)) = (input.text(), input.text());
                    let (to, room) = input.buffer(&mut numbers);
                    antigravity_embed(engine, texts, n, options, m, to, room, input.place(&mut count))
                }
                7 => {
                    let ((prompt, n), (texts, m)) = (input.text(), input.text());
                    let (to, room) = input.buffer(&mut sums);
                    antigravity_score(engine, prompt, n, texts, m, to, room, input.place(&mut count))
                }
                8 => antigravity_session_new(engine, input.place(&mut session_made)),
                9 => antigravity_session_free(session),
                10 => antigravity_cancel(session),
                11 | 12 => {
                    // Only files of this process are written.
                    let file = antigravity_fuzz::file("c_api", b"AGSAVED");
                    let path = match input.byte() % 5 {
                        4 => String::new(),
                        name => format!("{}{name}", file.display()),
                    };
                    let call = if call == 11 { antigravity_session_save } else { antigravity_session_load };
                    call(session, path.as_ptr().cast(), path.len())
                }
                13 => antigravity_session_rewind(session, input.byte()),
                14 => {
                    let (to, room) = input.buffer(&mut ids);
                    antigravity_session_tokens(session, to, room, input.place(&mut count))
                }
                _ => {
                    let ((prompt, n), (options, m)) = (input.text(), input.text());
                    let call = if call == 15 { antigravity_chat } else { antigravity_generate };
                    PIECES.store(0, Ordering::Relaxed);
                    call(session, prompt, n, options, m, Some(take_piece), session.cast(), null_mut())
                }
            }
        };
        // SAFETY: valid until the next call.
        let message = unsafe { CStr::from_ptr(antigravity_last_error()) }.to_str().expect("UTF-8");
        assert!([0, 1, 2, 3, 4, 5, 130].contains(&status), "{call}: {status}");
        assert!(status == 0 || !message.is_empty() && message.lines().count() == 1, "{call}: {message:?}");
        assert!(!message.contains("internal error"), "{call}: {message}");
        engines
            .extend(Some(std::mem::replace(&mut engine_made, null_mut()).addr()).filter(|&made| made != 0));
        sessions
            .extend(Some(std::mem::replace(&mut session_made, null_mut()).addr()).filter(|&made| made != 0));
    }
    sessions.into_iter().for_each(|session| _ = antigravity_session_free(without_provenance_mut(session)));
    engines.into_iter().skip(1).for_each(|engine| _ = antigravity_free(without_provenance_mut(engine)));
});
