//! Damaged and malicious GGUF files are refused with one clear line, without a panic and without memory that the
//! file does not justify.

use crate::support::gguf::writer::{
    ARRAY, BOOL, F32, I32, Parts, STRING, U8, U32, U64, array, claiming, info, pair, text,
};
use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::Error;
use files::blocks::BlockType;
use files::source::gguf::Gguf;
use files::source::gguf::header::GgufHeader;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;

/// Notes the largest allocation of every thread.
struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(bytes: usize) {
    // Threads that are ending have no such variable any more.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: forwards to the system allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's contract is ours.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is ours.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(new_size);
        // SAFETY: the caller's contract is ours.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Parses, and checks that no allocation was larger than the file (with some room for small files) and that what was
/// found lies inside it.
fn parse(bytes: &[u8]) -> Result<GgufHeader, String> {
    LARGEST.set(0);
    let result = GgufHeader::parse(bytes);
    let largest = LARGEST.get();
    assert!(largest <= 4 * bytes.len() + 4096, "{largest} bytes at once for a file of {}", bytes.len());
    if let Ok(header) = &result {
        for (name, entry) in &header.tensors {
            let blocks = entry.shape.iter().product::<usize>() / entry.block.values_per_block();
            assert!(entry.range.end <= bytes.len(), "{name:?}");
            assert_eq!(entry.range.len(), blocks * entry.block.bytes_per_block(), "{name:?}");
        }
    }
    result
}

fn assert_refused(case: &str, bytes: &[u8], what: &str) {
    let message = match parse(bytes) {
        Err(message) => message,
        Ok(header) => panic!("{case}: {header:?}"),
    };
    assert!(message.contains(what), "{case}: no {what:?} in: {message}");
    assert!(!message.contains(|c: char| c.is_control()), "{case}: {message:?}");
    assert!(message.len() < 600, "{case}: {} bytes of message", message.len());
}

fn table(cases: &[(&str, Parts, &str)]) {
    for (case, parts, what) in cases {
        assert_refused(case, &parts.bytes(), what);
    }
}

fn with(pair: Vec<u8>) -> Parts {
    Parts::default().pair(pair).data(64)
}

fn tensor(info: Vec<u8>) -> Parts {
    Parts::default().info(info).data(64)
}

#[test]
fn wrong_magic_version_and_counts_are_refused() {
    let parts = || Parts::default().data(64);
    let counts = |tensors, pairs| Parts { tensor_count: tensors, pair_count: pairs, ..parts() };
    table(&[
        ("magic", Parts { magic: *b"GGML", ..parts() }, "\"GGML\""),
        ("magic of control characters", Parts { magic: *b"\x1b[2J", ..parts() }, "\\x1b[2J"),
        ("version 0", Parts { version: 0, ..parts() }, "version is 0"),
        ("version 1", Parts { version: 1, ..parts() }, "version is 1; supported: 2 and 3"),
        ("version 4", Parts { version: 4, ..parts() }, "version is 4"),
        ("version u32::MAX", Parts { version: u32::MAX, ..parts() }, "version is 4294967295"),
        ("big-endian", Parts { version: 3u32.swap_bytes(), ..parts() }, "version is 3, big-endian"),
        ("2^64-1 tensors", counts(Some(u64::MAX), None), "tensor count is 18446744073709551615"),
        ("2^63 tensors", counts(Some(1 << 63), None), "tensor count is 9223372036854775808"),
        ("65537 tensors", counts(Some(65537), None), "more than 65536"),
        ("60000 tensors", counts(Some(60000), None), "tensor count 60000 at byte 8 goes past the end"),
        ("a tensor that is not there", counts(Some(1), None), "tensor 0: the name is empty"),
        ("2^64-1 pairs", counts(None, Some(u64::MAX)), "metadata count is 18446744073709551615"),
        ("2^32 pairs", counts(None, Some(1 << 32)), "metadata count is 4294967296"),
        ("9000 pairs", counts(None, Some(9000)), "metadata count 9000 at byte 16 goes past the end"),
        ("a pair that is not there", counts(None, Some(1)), "metadata 0: the key is empty"),
    ]);
    assert_refused("no file", &[], "past the end of the file, 0 bytes");
    assert_refused("zeros", &[0; 100], "starts with");
}

#[test]
fn wrong_keys_and_values_are_refused() {
    let huge = || u64::MAX.to_le_bytes();
    let twice = || pair("a", U8, [1]);
    let key = |len, key: &[u8]| with([claiming(len, key), U8.to_le_bytes().to_vec(), vec![1]].concat());
    table(&[
        ("key of 2^64-1 bytes", key(u64::MAX, b"k"), "key of 18446744073709551615 bytes"),
        ("key past the end", key(5000, b"k"), "key of 5000 bytes at byte 32 goes past the end"),
        ("key of 65536 bytes", key(65536, &[b'k'; 65536]), "more than 65535"),
        ("key that is not UTF-8", key(2, b"\xff\xfe"), "metadata 0: key at byte 24 is not UTF-8"),
        ("key of nothing", key(0, b""), "key is empty"),
        ("key twice", with(twice()).pair(twice()), "metadata \"a\" occurs twice"),
        ("key twice, other type", with(twice()).pair(pair("a", BOOL, [1])), "occurs twice"),
        ("control characters", with(twice()).pair(pair("\u{7}\n", 99, [1])), "metadata \"\\u{7}\\n\": value"),
        ("value type 13", with(pair("a", 13, [0; 8])), "metadata \"a\": value type is 13"),
        ("value type u32::MAX", with(pair("a", u32::MAX, [])), "value type is 4294967295"),
        ("string of 2^64-1 bytes", with(pair("a", STRING, huge())), "string of 18446744073709551615 bytes"),
        ("string of 2^63 bytes", with(pair("a", STRING, claiming(1 << 63, "x"))), "9223372036854775808"),
        ("string past the end", with(pair("a", STRING, claiming(200, "x"))), "metadata \"a\": string of 200"),
        ("string that is not UTF-8", with(pair("a", STRING, text(b"\xc3"))), "not UTF-8"),
        ("truth value 2", with(pair("a", BOOL, [2])), "boolean is 2"),
    ]);
}

#[test]
fn wrong_arrays_are_refused() {
    let with_array = |kind, len, elements: &[u8]| with(pair("a", ARRAY, array(kind, len, elements)));
    let nested = |depth: usize| {
        let mut value = array(U8, 1, [1]);
        for _ in 0..depth {
            value = array(ARRAY, 1, value);
        }
        with(pair("a", ARRAY, value))
    };
    table(&[
        ("nested", nested(1), "metadata \"a\": is an array of arrays"),
        ("nested 3000 deep", nested(3000), "array of arrays"),
        ("nested and empty", with_array(ARRAY, 0, &[]), "array of arrays"),
        ("nested, 2^64-1", with_array(ARRAY, u64::MAX, &[]), "array of arrays"),
        ("type 13", with_array(13, 1, &[0; 8]), "array type is 13"),
        ("type u32::MAX", with_array(u32::MAX, 1, &[0; 8]), "array type is 4294967295"),
        ("2^64-1 bytes", with_array(U8, u64::MAX, &[0; 8]), "array length 18446744073709551615"),
        ("bytes that overflow", with_array(U64, (1 << 61) + 1, &[0; 8]), "array length 2305843009213693953"),
        ("2^62 numbers", with_array(I32, 1 << 62, &[0; 8]), "array length 4611686018427387904"),
        ("2^40 strings", with_array(STRING, 1 << 40, &[0; 8]), "array length 1099511627776"),
        (
            "a string past the end",
            with_array(STRING, 1, &claiming(1 << 20, "x")),
            "element 0: string of 1048576",
        ),
        ("a string of 2^64-1", with_array(STRING, 1, &claiming(u64::MAX, "x")), "element 0: string of 18446"),
        ("strings too few", with_array(STRING, 12, &text("x")), "metadata \"a\": "),
        ("not UTF-8", with_array(STRING, 2, &[text("x"), text(b"\xff")].concat()), "element 1: is not UTF-8"),
        ("truth values", with_array(BOOL, 3, &[0, 1, 3]), "element 2: boolean is 3"),
    ]);
}

#[test]
fn wrong_alignments_are_refused() {
    let aligned =
        |kind, value: &[u8]| with(pair("general.alignment", kind, value)).info(info("t", &[4], 0, 0));
    let number = |n: u32| aligned(U32, &n.to_le_bytes());
    let named = "metadata \"general.alignment\" is";
    table(&[
        ("0", number(0), &format!("{named} 0; ")),
        ("1", number(1), &format!("{named} 1; ")),
        ("4", number(4), &format!("{named} 4; ")),
        ("24", number(24), &format!("{named} 24; ")),
        ("33", number(33), &format!("{named} 33; ")),
        ("2^21", number(1 << 21), &format!("{named} 2097152; ")),
        ("2^31", number(1 << 31), &format!("{named} 2147483648; ")),
        ("2^32-1", number(u32::MAX), &format!("{named} 4294967295; ")),
        ("2^63", aligned(U64, &(1u64 << 63).to_le_bytes()), &format!("{named} 9223372036854775808; ")),
        ("with a sign", aligned(I32, &32i32.to_le_bytes()), &format!("{named} 32; supported: an unsigned")),
        ("negative", aligned(I32, &(-32i32).to_le_bytes()), &format!("{named} -32; ")),
        ("a float", aligned(F32, &32f32.to_le_bytes()), &format!("{named} 32.0; ")),
        ("a string", aligned(STRING, &text("32")), &format!("{named} \"32\"; ")),
        ("an array", aligned(ARRAY, &array(U32, 1, 32u32.to_le_bytes())), &format!("{named} an array of 1 ")),
        ("more than the file has", number(1 << 20), "past the end of the data, 0 bytes"),
    ]);
}

#[test]
fn wrong_tensors_are_refused() {
    let t = |dims: &[u64], kind, offset| tensor(info("t", dims, kind, offset));
    let two = |a, b| tensor(info("a", &[8], 0, a)).info(info("b", &[8], 0, b));
    let long = "n".repeat(65);
    table(&[
        ("name of 65 bytes", tensor(info(&long, &[4], 0, 0)), "tensor 0: name at byte 24 is 65 bytes long"),
        ("name of 2^64-1 bytes", tensor(vec![255; 64]), "tensor 0: name of 18446744073709551615 bytes"),
        (
            "name that is not UTF-8",
            tensor(info(b"\xff", &[4], 0, 0)),
            "tensor 0: name at byte 24 is not UTF-8",
        ),
        ("name of nothing", tensor(info("", &[4, 1], 0, 0)), "name is empty"),
        ("name twice", t(&[4], 0, 0).info(info("t", &[4], 0, 32)), "tensor \"t\" occurs twice"),
        ("no dimensions", t(&[], 0, 0), "tensor \"t\": number of dimensions is 0"),
        ("five dimensions", t(&[1; 5], 0, 0), "number of dimensions is 5"),
        ("product of 2^64", t(&[1 << 32, 1 << 32], 0, 0), "[4294967296, 4294967296] of F32 are more than"),
        ("product of 2^64 + 32", t(&[32, (1 << 59) + 1], 2, 0), "more than this machine"),
        ("product of 2^256", t(&[u64::MAX - 31; 4], 2, 0), "more than this machine"),
        ("bytes that overflow", t(&[1 << 62], 0, 0), "more than this machine"),
        ("values that overflow", t(&[1 << 61], 8, 0), "more than this machine"),
        ("no values", t(&[0], 0, 0), "tensor \"t\": dimensions [0]: none may be 0"),
        ("no rows, or 2^80", t(&[1 << 40, 1 << 40, 0], 0, 0), "none may be 0"),
        (
            "larger than the file",
            t(&[17], 0, 0),
            "68 bytes at offset 0 go past the end of the data, 64 bytes",
        ),
        ("a terabyte", t(&[1 << 38], 0, 0), "1099511627776 bytes at offset 0"),
        ("row of part of a block", t(&[33], 2, 0), "dimensions [33]: a row of Q4_0 is a multiple of 32"),
        ("rows of part of a block", t(&[128, 2], 12, 0), "a row of Q4_K is a multiple of 256"),
        ("unknown type", t(&[4], 12345, 0), "tensor \"t\": type is 12345 (unknown); supported: F32, F16"),
        ("type that is not read", t(&[256], 9, 0), "type is 9 (Q8_1)"),
        ("removed type", t(&[32], 4, 0), "type is 4 (Q4_2, removed)"),
        ("type u32::MAX", t(&[4], u32::MAX, 0), "type is 4294967295"),
        ("offset 1", t(&[4], 0, 1), "offset is 1, not a multiple of the alignment 32"),
        ("offset 16", t(&[4], 0, 16), "offset is 16, not a multiple"),
        ("offset at the end", t(&[4], 0, 64), "16 bytes at offset 64 go past the end"),
        ("offset outside", t(&[4], 0, 1 << 20), "at offset 1048576 go past the end"),
        ("offset 2^64-32", t(&[4], 0, u64::MAX - 31), "at offset 18446744073709551584 go past"),
        ("the same bytes", two(0, 0), "tensor \"b\": offset is 0, but the tensors before it end at 32"),
        ("a byte of it", t(&[9], 0, 0).info(info("b", &[8], 0, 32)), "tensor \"b\": offset is 32, but"),
        ("another order", two(32, 0), "tensor \"a\": offset is 32, but the tensors before it end at 0"),
        ("a hole", two(0, 32).info(info("c", &[4], 0, 96)).data(128), "\"c\": offset is 96, but"),
        ("bytes after the last", two(0, 32).data(65), "the tensors end at 64, but the file has 65 bytes"),
        ("a smaller type", two(0, 32).info(info("c", &[8], 1, 64)).data(97), "the tensors end at 96, but"),
        (
            "an info too few",
            Parts { tensor_count: Some(2), ..t(&[4], 0, 0) },
            "tensor 1: name of 504403158265495552",
        ),
    ]);
}

/// A file with every kind of part.
fn sample() -> Vec<u8> {
    fs::read(paths::root().join("tests/fixtures/gguf/m4k-qwen2-h256.Q5_K.part.gguf")).unwrap()
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = sample();
    let header = parse(&file).unwrap();
    let end = header.tensors.values().map(|t| t.range.end).max().unwrap();
    for len in (0..header.len + 64).chain((header.len + 64..end).step_by(997)).chain([end - 1]) {
        assert_refused(&format!("{len} bytes"), &file[..len], "past the end");
    }
    parse(&file[..end]).unwrap();
    // One with a vocabulary, whose arrays make most of the header.
    let file = fs::read(paths::root().join("tests/fixtures/gguf/m4-qwen2-bf16.Q5_0.gguf")).unwrap();
    let len = parse(&file).unwrap().len;
    for len in 0..len {
        assert!(parse(&file[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn a_file_changed_anywhere_is_refused_or_still_sound() {
    let file = sample();
    let header = parse(&file).unwrap().len;
    let mut refused = 0;
    for at in 0..header {
        for change in [0x01, 0x80, 0xff, file[at], !file[at]] {
            let mut bytes = file.clone();
            bytes[at] ^= change;
            if let Err(message) = parse(&bytes) {
                assert!(!message.contains(|c: char| c.is_control()) && message.len() < 600, "{message:?}");
                refused += 1;
            }
        }
    }
    // Most changes of lengths, types and counts show; those of names and numbers do not.
    assert!(refused > header, "{refused} of {}", 5 * header);
}

#[test]
fn no_change_of_a_tensors_type_or_dimensions_goes_unnoticed() {
    let file = sample();
    let names: Vec<String> = parse(&file).unwrap().tensors.into_keys().collect();
    let mut tried = 0;
    for name in names {
        let start = file.windows(name.len()).position(|at| at == name.as_bytes()).unwrap() + name.len();
        let number = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        let rank = number(start) as usize;
        let kind = start + 4 + 8 * rank;
        let found = BlockType::from_id(number(kind)).unwrap();
        // Types of the same size, such as F16 and BF16, cannot be told apart.
        for other in BlockType::ALL.into_iter().filter(|t| t.row_bytes(256) != found.row_bytes(256)) {
            let mut changed = file.clone();
            changed[kind..kind + 4].copy_from_slice(&other.id().to_le_bytes());
            assert!(parse(&changed).is_err(), "{name} as {other:?}");
            tried += 1;
        }
        for dim in 0..rank {
            let mut changed = file.clone();
            let at = start + 4 + 8 * dim;
            let half = number(at) / 2;
            changed[at..at + 4].copy_from_slice(&half.to_le_bytes());
            assert!(parse(&changed).is_err(), "{name} with {half} in dimension {dim}");
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried}");
}

#[test]
fn opening_names_the_file_in_one_line() {
    let temp = TestDir::new();
    let path = temp.file("hostile.gguf");
    let refused = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).unwrap();
        let error = Gguf::open(&path).unwrap_err();
        let Error::Model(message) = &error else { panic!("{error:?}") };
        assert!(message.contains(&path.display().to_string()) && message.contains(what), "{message}");
        assert!(message.contains("; ") && !message.contains('\n'), "{message:?}");
        assert_eq!(error.exit_code(), 3);
    };
    refused(b"", "empty");
    refused(b"GGU", "magic of 4 bytes at byte 0 goes past the end of the file, 3 bytes");
    refused(&sample()[..100], "past the end of the file, 100 bytes");
    refused(&tensor(info("t", &[1 << 40], 0, 0)).bytes(), "tensor \"t\": 4398046511104 bytes at offset 0");
    fs::remove_file(&path).unwrap();
    assert!(Gguf::open(&path).unwrap_err().to_string().contains("cannot be read"));
    assert!(Gguf::open(&temp.0).unwrap_err().to_string().contains("directory"));
}
