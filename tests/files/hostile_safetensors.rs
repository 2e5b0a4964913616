//! Damaged and malicious safetensors files are refused with one clear line; odd but valid ones open.

use crate::support::paths;
use crate::support::random::Random;
use crate::support::test_dir::TestDir;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use antigravity::Error;
use files::blocks::Dtype;
use files::source::Safetensors;

const FILE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Two tensors that fill 24 bytes.
const AB: &str = r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[16,24]}}"#;

/// A file with this header, its length as claimed, and `data` bytes of data.
fn claiming(len: u64, json: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    let mut bytes = len.to_le_bytes().to_vec();
    bytes.extend(json.as_ref());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

fn file(json: impl AsRef<[u8]>, data: usize) -> Vec<u8> {
    claiming(json.as_ref().len() as u64, json, data)
}

/// A file of one tensor `t` with these fields and 16 bytes of data.
fn one(dtype: &str, shape: &str, offsets: &str) -> Vec<u8> {
    file(format!(r#"{{"t":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}"#), 16)
}

/// A shard of one tensor: a byte.
fn shard(tensor: &str) -> Vec<u8> {
    file(format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}}}"#), 1)
}

/// Asserts that `path` is refused, with one line that names `file` and says `what`.
fn assert_refused(case: &str, path: &Path, file: &str, what: &str) {
    let message = match Safetensors::open(path) {
        Err(Error::Model(message)) => message,
        other => panic!("{case}: {other:?}"),
    };
    for part in [file, what] {
        assert!(message.contains(part), "{case}: no {part:?} in: {message}");
    }
    assert!(!message.contains(|c: char| c.is_control()), "{case}: {message:?}");
    assert!(message.contains("; "), "{case}: no remedy in: {message}");
    assert!(message.len() < 1500, "{case}: {} bytes of message", message.len());
}

#[test]
fn damaged_files_are_refused() {
    let ab = file(AB, 24);
    let cut = |n: usize| ab[..n].to_vec();
    let nested = |n: usize| file(format!(r#"{{"a":{}"#, "[".repeat(n)), 0);
    let two = |a: &str, b: &str| {
        file(
            format!(
                r#"{{"a":{{"dtype":"U8","shape":[8],"data_offsets":{a}}},"b":{{"dtype":"U8","shape":[8],"data_offsets":{b}}}}}"#
            ),
            16,
        )
    };
    let t = r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1]}"#;
    let f32 = r#""F32""#;
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        // The length.
        ("empty file", vec![], "empty"),
        ("one byte", cut(1), "too short"),
        ("seven bytes", cut(7), "too short"),
        ("only a length", cut(8), "only 8 bytes"),
        ("zeros", vec![0; 100], "JSON is empty"),
        ("length 0", claiming(0, "", 0), "JSON is empty"),
        ("length 1", claiming(1, "{", 0), "EOF"),
        ("length u64::MAX", claiming(u64::MAX, AB, 24), "18446744073709551615"),
        ("length i64::MAX", claiming(i64::MAX as u64, AB, 24), "9223372036854775807"),
        ("length 2^32", claiming(1 << 32, AB, 24), "4294967296"),
        ("length 200 MB in 100 bytes", claiming(200_000_000, [b'{'; 92], 0), "200000000"),
        ("length 90 MB in 100 bytes", claiming(90_000_000, [b'{'; 92], 0), "only 100 bytes"),
        ("length = file size", claiming(AB.len() as u64 + 32, AB, 24), "only"),
        ("length = file size + 1", claiming(AB.len() as u64 + 33, AB, 24), "only"),
        ("length into the data", claiming(AB.len() as u64 + 3, AB, 24), "trailing"),
        ("length too small", claiming(AB.len() as u64 - 1, AB, 24), "EOF"),
        // Cut short, or too long.
        ("cut in the header", cut(40), "only 40 bytes"),
        ("cut before the data", cut(8 + AB.len()), "past the end"),
        ("cut in the data", cut(ab.len() - 9), "past the end"),
        ("last byte missing", cut(ab.len() - 1), "past the end"),
        ("a byte too many", file(AB, 25), "25 bytes of data"),
        ("data without tensors", file("{}", 1), "1 bytes of data"),
        // Not the JSON of a header.
        ("not JSON", file("hello world", 0), "starts with 'h'"),
        ("array", file("[]", 0), "starts with '['"),
        ("leading space", file(" {}", 0), "starts with ' '"),
        ("byte order mark", file("\u{feff}{}", 0), "starts with"),
        ("not UTF-8", file(b"{\"\xff\":1}", 0), "UTF-8"),
        ("lone surrogate", file(r#"{"\ud800":1}"#, 0), "hex escape"),
        ("control character", file("{\"a\nb\":1}", 0), "control character"),
        ("unclosed", file(r#"{"a":"#, 0), "EOF"),
        ("trailing text", file("{}{}", 0), "trailing"),
        ("nested 100k deep", nested(100_000), "nested"),
        ("nested 100", nested(100), "nested"),
        ("nested objects", file(r#"{"a":"#.repeat(50_000), 0), "nested"),
        ("nested metadata", file(format!(r#"{{"__metadata__":{}"#, "[".repeat(99_999)), 0), "nested"),
        (
            "Git LFS pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n".to_vec(),
            "git lfs pull",
        ),
        ("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03abcdef".to_vec(), "header length"),
        ("web page", b"<!DOCTYPE html><html>Not found</html>".to_vec(), "header length"),
        // Names and entries.
        ("name twice", file(format!(r#"{{"a":{t},"a":{t}}}"#), 1), "\"a\" occurs twice"),
        ("name twice, escaped", file(format!(r#"{{"a":{t},"\u0061":{t}}}"#), 1), "\"a\" occurs twice"),
        ("name twice, far apart", file(format!(r#"{{"a":{t},"b":{t},"a":{t}}}"#), 2), "\"a\" occurs twice"),
        ("empty name", file(format!(r#"{{"":{t}}}"#), 1), "empty name"),
        ("hostile name", file(r#"{"\u001b[2J\nerror":1}"#, 0), r#""\u{1b}[2J\nerror""#),
        ("long name", file(format!(r#"{{"{}":1}}"#, "n".repeat(1 << 20)), 0), "nnn"),
        ("hostile key", file(r#"{"t":{"dtype":"\u001b[2J\n"}}"#, 0), "dtype"),
        ("entry is null", file(r#"{"t":null}"#, 0), "tensor \"t\""),
        ("entry is a string", file(r#"{"t":"F32"}"#, 0), "tensor \"t\""),
        ("entry is an array", file(r#"{"t":["U8",[1],[0,1]]}"#, 1), "expected an object"),
        ("entry is empty", file(r#"{"t":{}}"#, 0), "missing field `dtype`"),
        ("no shape", file(r#"{"t":{"dtype":"U8","data_offsets":[0,1]}}"#, 1), "missing field `shape`"),
        ("no offsets", file(r#"{"t":{"dtype":"U8","shape":[1]}}"#, 1), "missing field `data_offsets`"),
        (
            "field twice",
            file(r#"{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1),
            "duplicate field `dtype`",
        ),
        // Offsets.
        ("overlap", two("[0,8]", "[4,12]"), "[4, 12] overlap"),
        ("same bytes", two("[0,8]", "[0,8]"), "overlap"),
        ("hole", two("[0,8]", "[9,17]"), "hole at 8"),
        ("hole at the start", two("[1,9]", "[9,17]"), "hole at 0"),
        ("out of range", two("[0,8]", "[8,16000]"), "needs 8 bytes"),
        ("past the end", one(f32, "[8]", "[0,32]"), "past the end"),
        ("far past the end", one(r#""U8""#, "[9007199254740992]", "[0,9007199254740992]"), "past the end"),
        ("reversed", one(f32, "[4]", "[16,0]"), "reversed"),
        ("offsets u64::MAX", one(f32, "[4]", "[18446744073709551615,18446744073709551615]"), "needs 16"),
        ("zero bytes at u64::MAX", one(f32, "[0]", "[18446744073709551615,18446744073709551615]"), "hole"),
        ("offsets 2^64", one(f32, "[4]", "[0,18446744073709551616]"), "data_offsets"),
        ("negative offset", one(f32, "[4]", "[-16,0]"), "data_offsets: invalid value: integer `-16`"),
        ("float offsets", one(f32, "[4]", "[0.0,16.0]"), "floating point"),
        ("exponent offsets", one(f32, "[4]", "[0,16e0]"), "floating point"),
        ("string offsets", one(f32, "[4]", r#"["0","16"]"#), "string"),
        ("null offsets", one(f32, "[4]", "null"), "data_offsets"),
        ("one offset", one(f32, "[4]", "[16]"), "data_offsets"),
        ("three offsets", one(f32, "[4]", "[0,16,16]"), "data_offsets"),
        // Shapes.
        ("product overflows", one(f32, "[8589934592,8589934592]", "[0,16]"), "more than this machine"),
        ("product wraps to 16", one(r#""U8""#, "[4294967296,4294967296,16]", "[0,16]"), "more than"),
        ("bytes overflow", one(f32, "[4611686018427387905]", "[0,16]"), "more than"),
        ("zero hides overflow", one(f32, "[0,8589934592,8589934592]", "[0,0]"), "more than"),
        ("zero size, some bytes", one(f32, "[0]", "[0,16]"), "needs 0 bytes"),
        ("zero dim, some bytes", one(f32, "[4,0]", "[0,16]"), "needs 0 bytes"),
        ("scalar, too many bytes", one(f32, "[]", "[0,16]"), "needs 4 bytes"),
        ("wrong byte count", one(f32, "[5]", "[0,16]"), "needs 20 bytes, data_offsets give 16"),
        ("negative dim", one(f32, "[-4]", "[0,16]"), "shape: invalid value: integer `-4`"),
        ("two negative dims", one(f32, "[-2,-2]", "[0,16]"), "shape"),
        ("float dim", one(f32, "[4.0]", "[0,16]"), "shape: invalid type"),
        ("string dim", one(f32, r#"["4"]"#, "[0,16]"), "shape: invalid type"),
        ("shape is a number", one(f32, "4", "[0,16]"), "shape"),
        ("shape is null", one(f32, "null", "[0,16]"), "shape"),
        ("nine dims", one(f32, "[4,1,1,1,1,1,1,1,1]", "[0,16]"), "at most 8"),
        ("a million dims", one(f32, &format!("[{}4]", "1,".repeat(1_000_000)), "[0,16]"), "at most 8"),
        // Dtypes.
        (
            "unknown dtype",
            one(r#""Q7""#, "[4]", "[0,16]"),
            "\"Q7\" is unknown; supported: F32, F16, BF16, U8",
        ),
        ("lower case dtype", one(r#""f32""#, "[4]", "[0,16]"), "unknown"),
        ("wrong dtype", one(r#""F16""#, "[4]", "[0,16]"), "needs 8 bytes"),
        ("half a byte", one(r#""F4""#, "[33]", "[0,16]"), "needs 17 bytes"),
        ("dtype is a number", one("4", "[4]", "[0,16]"), "dtype: invalid type"),
        ("dtype is an object", one(r#"{"F32":null}"#, "[4]", "[0,16]"), "dtype: invalid type"),
        // Metadata.
        ("metadata is a string", file(r#"{"__metadata__":"pt"}"#, 0), "__metadata__"),
        ("metadata is an array", file(r#"{"__metadata__":[]}"#, 0), "__metadata__"),
        ("metadata of numbers", file(r#"{"__metadata__":{"a":1}}"#, 0), "__metadata__: \"a\""),
        ("metadata of objects", file(r#"{"__metadata__":{"a":{}}}"#, 0), "__metadata__: \"a\""),
        ("metadata is a tensor", file(format!(r#"{{"__metadata__":{t}}}"#), 1), "__metadata__: \"shape\""),
        ("metadata twice", file(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), "twice"),
        ("metadata key twice", file(r#"{"__metadata__":{"a":"","a":""}}"#, 0), "\"a\" occurs twice"),
    ];
    assert!(cases.len() > 80);
    for (case, bytes, what) in cases {
        let dir = TestDir::new().with(FILE, bytes);
        assert_refused(case, &dir.0, FILE, what);
        assert_refused(case, &dir.0.join(FILE), FILE, what);
    }
}

/// A directory with an index of this text and shards `1` and `2`, of tensors `a` and `b`.
fn sharded(index: impl AsRef<[u8]>) -> TestDir {
    TestDir::new().with(INDEX, index).with("1", shard("a")).with("2", shard("b"))
}

#[test]
fn damaged_indexes_are_refused() {
    let map = |inner: &str| format!(r#"{{"weight_map":{{{inner}}}}}"#);
    let cases = [
        ("empty", String::new(), "empty"),
        ("array", "[]".into(), "starts with"),
        ("string", "\"weight_map\"".into(), "starts with"),
        ("not JSON", "{weight_map}".into(), "key must be a string"),
        ("no map", "{}".into(), "missing field `weight_map`"),
        ("map is null", r#"{"weight_map":null}"#.into(), "expected an object"),
        ("map is an array", r#"{"weight_map":["a"]}"#.into(), "expected an object"),
        ("map twice", r#"{"weight_map":{"a":"1"},"weight_map":{"b":"2"}}"#.into(), "duplicate"),
        ("map is empty", map(""), "no tensors"),
        ("number", map(r#""a":1"#), "\"a\": invalid type"),
        ("tensor twice", map(r#""a":"1","b":"2","a":"2""#), "\"a\" occurs twice"),
        ("nested", format!(r#"{{"metadata":{}"#, "[".repeat(100_000)), "nested"),
        ("parent", map(r#""a":"../1""#), "the name of a file next to"),
        ("only the parent", map(r#""a":"..""#), "the name of a file next to"),
        ("itself", map(r#""a":".""#), "the name of a file next to"),
        ("nothing", map(r#""a":"""#), "the name of a file next to"),
        ("absolute", map(r#""a":"/etc/passwd""#), "the name of a file next to"),
        ("below", map(r#""a":"sub/1""#), "the name of a file next to"),
        ("dot slash", map(r#""a":"./1""#), "the name of a file next to"),
        ("trailing slash", map(r#""a":"1/""#), "the name of a file next to"),
        ("backslash", map(r#""a":"..\\1""#), "the name of a file next to"),
        ("NUL", map(r#""a":"1\u0000""#), "the name of a file next to"),
        (
            "too many shards",
            map(&(0..500).map(|i| format!(r#""{i}":"{i}""#)).collect::<Vec<_>>().join(",")),
            "500 shards",
        ),
    ];
    for (case, index, what) in cases {
        assert_refused(case, &sharded(index).0, INDEX, what);
    }
    let huge = sharded("{");
    fs::File::options().write(true).open(huge.0.join(INDEX)).unwrap().set_len(65 << 20).unwrap();
    assert_refused("huge", &huge.0, INDEX, "at most");

    // The fault is in, or named after, a shard.
    let shards = [
        ("missing", r#""a":"1","b":"2","c":"3""#, "3", INDEX),
        ("not in its shard", r#""a":"1","b":"2","c":"2""#, "2", "\"c\" is not in this file"),
        ("not listed", r#""a":"1","c":"2""#, "2", "\"b\" is in this file, but not listed"),
        ("in the other shard", r#""a":"2","b":"1""#, "1", "\"a\" is in this file, but not listed"),
    ];
    for (case, inner, shard, what) in shards {
        let dir = sharded(map(inner));
        assert_refused(case, &dir.0, dir.0.join(shard).to_str().unwrap(), what);
    }
    let twice = sharded(map(r#""a":"1","b":"2""#)).with(
        "2",
        file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[0],"data_offsets":[1,1]}}"#, 1),
    );
    assert_refused("in two shards", &twice.0, twice.0.join("2").to_str().unwrap(), "\"a\"");
    let broken = sharded(map(r#""a":"1","b":"2""#)).with("2", "garbage!");
    assert_refused("broken shard", &broken.0, broken.0.join("2").to_str().unwrap(), "header length");
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let dir = TestDir::new();
    assert_refused("no model", &dir.0, dir.0.to_str().unwrap(), FILE);
    assert_refused("no such path", &dir.0.join("x"), "x", "No such file");
    let path = dir.0.join(FILE);

    fs::create_dir(&path).unwrap();
    assert_refused("directory", &dir.0, FILE, "a directory");
    fs::remove_dir(&path).unwrap();

    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: `name` is a C string; mkfifo only reads it.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert_refused("FIFO", &dir.0, FILE, "a FIFO");
    assert_refused("FIFO", &path, FILE, "a FIFO");
    fs::remove_file(&path).unwrap();

    let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert_refused("socket", &path, FILE, "a socket");
    drop(socket);
    fs::remove_file(&path).unwrap();

    assert_refused("device", Path::new("/dev/null"), "/dev/null", "a device");

    symlink("nowhere", &path).unwrap();
    assert_refused("link to nowhere", &dir.0, FILE, "No such file");
    fs::remove_file(&path).unwrap();
    symlink(FILE, &path).unwrap();
    assert_refused("link to itself", &dir.0, FILE, "cannot be read");
    fs::remove_file(&path).unwrap();

    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        fs::write(&path, file("{}", 0)).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        assert_refused("unreadable", &dir.0, FILE, "denied");
    }
}

#[test]
fn odd_but_valid_files_open() {
    let dir = TestDir::new().with(FILE, file(AB, 24));
    let source = Safetensors::open(&dir.0).unwrap();
    let names: Vec<_> = source.tensors().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let b = source.get("b").unwrap();
    assert_eq!((b.dtype, &b.shape[..], &*b.file), (Dtype::BF16, &[4][..], &*dir.0.join(FILE)));
    assert_eq!(b.data.bytes(), [16, 17, 18, 19, 20, 21, 22, 23]);
    assert!(source.get("c").is_none());
    let Err(Error::Model(missing)) = source.get_required("c") else { panic!() };
    assert!(missing.contains("\"c\" is missing"), "{missing}");

    let t = r#"{"dtype":"F32","shape":[],"data_offsets":[1,5]}"#;
    let odd = [
        ("no tensors", file("{}", 0), 0),
        ("padded", file("{}      ", 0), 0),
        ("only metadata", file(r#"{"__metadata__":{"format":"pt"}}"#, 0), 0),
        (
            "odd alignment, scalar",
            file(format!(r#"{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},"s":{t}}}"#), 5),
            2,
        ),
        (
            "zero-sized between others",
            file(
                r#"{"z":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]},"y":{"dtype":"F16","shape":[0],"data_offsets":[1,1]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#,
                3,
            ),
            4,
        ),
        ("only zero-sized", file(r#"{"z":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#, 0), 1),
        (
            "unknown field, fields in any order",
            file(r#"{"t":{"data_offsets":[0,1],"new":[{}],"shape":[1,1,1],"dtype":"U8"}}"#, 1),
            1,
        ),
    ];
    for (case, bytes, count) in odd {
        let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap().len();
        let dir = TestDir::new().with("m", &bytes);
        let source = Safetensors::open(&dir.0.join("m")).unwrap_or_else(|e| panic!("{case}: {e}"));
        assert_eq!((source.tensors().count(), theirs), (count, count), "{case}");
    }
}

#[test]
fn the_bundled_model_opens() {
    let source = Safetensors::open(&paths::root().join("models/story")).unwrap();
    let embed = source.get_required("model.embed_tokens.weight").unwrap();
    assert_eq!((embed.dtype, &embed.shape[..]), (Dtype::BF16, &[4096, 256][..]));
    assert_eq!(source.metadata()["format"], "pt");
}

#[test]
fn other_dtypes_are_listed_and_refused_when_asked_for() {
    let json = r#"{"i":{"dtype":"F64","shape":[2],"data_offsets":[0,16]},"q":{"dtype":"F4","shape":[2,1],"data_offsets":[16,17]}}"#;
    let dir = TestDir::new().with(FILE, file(json, 17));
    let source = Safetensors::open(&dir.0).unwrap();
    assert_eq!(source.tensors().count(), 0);
    let others: Vec<_> = source.unsupported_tensors().map(|t| (&*t.name, &*t.dtype, t.bytes)).collect();
    assert_eq!(others, [("i", "F64", 16), ("q", "F4", 1)]);
    assert!(source.get("i").is_none());
    let Err(Error::Model(message)) = source.get_required("i") else { panic!() };
    for part in [FILE, "\"i\"", "F64", "F32, F16, BF16, U8"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn shards_open_through_links() {
    // As the Hugging Face cache has it: links from a snapshot to files elsewhere.
    let index = r#"{"metadata":{"total_size":2},"weight_map":{"a":"1.safetensors","b":"2.safetensors"}}"#;
    let blobs = TestDir::new().with("x", index).with("y", shard("a")).with("z", shard("b"));
    let snapshot = TestDir::new();
    for (link, blob) in [(INDEX, "x"), ("1.safetensors", "y"), ("2.safetensors", "z")] {
        symlink(Path::new("..").join(blobs.0.file_name().unwrap()).join(blob), snapshot.0.join(link))
            .unwrap();
    }
    let source = Safetensors::open(&snapshot.0).unwrap();
    assert_eq!(source.tensors().map(|t| t.name.as_str()).collect::<String>(), "ab");
    assert!(source.get("b").unwrap().file.ends_with("2.safetensors"));
    // A whole file wins over an index.
    let whole = sharded("not even JSON").with(FILE, file("{}", 0));
    assert_eq!(Safetensors::open(&whole.0).unwrap().tensors().count(), 0);
}

#[test]
fn fingerprints_tell_models_apart() {
    let print = |bytes: &[u8]| {
        let dir = TestDir::new().with(FILE, bytes);
        let print = Safetensors::open(&dir.0).unwrap().hash_files();
        assert_eq!(print, Safetensors::open(&dir.0.join(FILE)).unwrap().hash_files());
        print
    };
    let ab = file(AB, 24);
    assert_eq!(print(&ab), "b4f80583a15f9ffcdf823754e96f4154"); // for good: it is stored in packed files
    let mut data = ab.clone();
    *data.last_mut().unwrap() ^= 1;
    let renamed = file(AB.replace("\"b\"", "\"c\""), 24);
    let mut prints =
        vec![print(&ab), print(&data), print(&renamed), print(&file("{}", 0)), print(&file("{} ", 0))];
    prints.sort();
    prints.dedup();
    assert_eq!(prints.len(), 5);
}

/// Whatever a few wrong bytes do, the answer is a model or a line; and what we take, the reference
/// parser takes too.
#[test]
fn mutations_never_panic() {
    let valid = file(AB, 24);
    let index = br#"{"weight_map":{"a":"1","b":"2"}}"#;
    let mut random = Random(0x2545f491);
    let mut random = |below| random.below(below);
    let mut mutated = |original: &[u8]| {
        let mut bytes = original.to_vec();
        for _ in 0..1 + random(3) {
            let at = random(bytes.len());
            match random(5) {
                0 => bytes[at] ^= 1 << random(8),
                1 => bytes[at] = b"{}[],:\"\\0123456789-.eE"[random(22)],
                2 => bytes[at] = random(256) as u8,
                3 => bytes.insert(at, bytes[random(bytes.len())]),
                _ if bytes.len() > 1 => drop(bytes.remove(at)),
                _ => {}
            }
        }
        bytes
    };
    let check = |path: &Path| match Safetensors::open(path) {
        Err(Error::Model(message)) => {
            assert!(message.starts_with(path.to_str().unwrap()), "{message}");
            assert!(!message.contains(|c: char| c.is_control()), "{message:?}");
            false
        }
        Err(other) => panic!("{other:?}"),
        Ok(source) => {
            assert!(source.tensors().all(|t| {
                t.data.bytes().len() == t.shape.iter().product::<usize>() * t.dtype.byte_size()
            }));
            source.hash_files();
            true
        }
    };
    let (dir, mut opened) = (TestDir::new(), 0);
    let path = dir.0.join(FILE);
    for round in 0..4000 {
        // Mostly the header: most of what can go wrong is there.
        let bytes = if round % 4 == 0 { mutated(&valid) } else { file(mutated(AB.as_bytes()), 24) };
        fs::remove_file(&path).or_else(|e| if round == 0 { Ok(()) } else { Err(e) }).unwrap();
        fs::write(&path, &bytes).unwrap();
        if check(&path) {
            opened += 1;
            safetensors::SafeTensors::deserialize(&bytes).unwrap();
        }
    }
    assert!((40..3000).contains(&opened), "{opened} of 4000 opened");
    let dir = sharded(index);
    for _ in 0..1000 {
        fs::write(dir.0.join(INDEX), mutated(index)).unwrap();
        check(&dir.0);
    }
}
