//! Bundles that are whole, damaged, cut and hostile.

use super::*;
use crate::atomic_file::AtomicFile;
use serde_json::json;
use std::fs;
use std::io::Write;

/// A directory of its own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("antigravity-bundle-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("a directory");
        Self(dir)
    }

    fn put(&self, bytes: &[u8]) -> PathBuf {
        let path = self.0.join("x");
        fs::write(&path, bytes).expect("a file");
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A file that looks like a program: 64 bytes of header, a segment of 100 bytes, a section behind it, the tables.
fn program_bytes() -> Vec<u8> {
    let mut file = vec![0xcc; 500];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &[0; 64]);
    put(0, b"\x7fELF\x02\x01\x01");
    put(32, &64u64.to_le_bytes());
    put(40, &300u64.to_le_bytes());
    put(54, &[56, 0, 1, 0, 64, 0, 2, 0]);
    put(64 + 8, &100u64.to_le_bytes());
    put(64 + 32, &100u64.to_le_bytes());
    for (section, kind, at) in [(0, 1u32, 220u64), (1, NOBITS, 1 << 50)] {
        put(300 + section * 64 + 4, &kind.to_le_bytes());
        put(300 + section * 64 + 24, &at.to_le_bytes());
        put(300 + section * 64 + 32, &7u64.to_le_bytes());
    }
    file.truncate(300 + 128);
    file
}

const NOBITS: u32 = 8;

/// A packed model of one tensor, with the metadata of a GGUF file.
fn packed() -> Vec<u8> {
    let json = json!({
        "__metadata__": {"antigravity.layout": "1"},
        "w": {"dtype": "U8", "shape": [100_000], "data_offsets": [0, 100_000]},
        "gguf": {"dtype": "U8", "shape": [64], "data_offsets": [100_000, 100_064]},
    });
    let json = json.to_string().into_bytes();
    let data = (0..100_064u32).map(|i| (i % 251) as u8).collect();
    [(json.len() as u64).to_le_bytes().to_vec(), json, data].concat()
}

/// A whole bundle, and where its mark and its model are.
fn whole(dir: &Scratch) -> (Vec<u8>, usize, usize) {
    let files = [("config.json".to_string(), b"{}".to_vec()), ("tokenizer.json".into(), vec![b'x'; 3000])];
    let out = dir.0.join("whole");
    let unfinished = AtomicFile::create(&out).expect("begun");
    let begun = BundleWriter::new(&unfinished.file, &program_bytes(), &files).expect("written");
    let model = begun.model as usize;
    (&unfinished.file).write_all(&packed()).expect("written");
    let len = begun.finish(unfinished.path().expect("a file")).expect("whole");
    unfinished.commit().expect("there");
    let bytes = fs::read(&out).expect("the bundle");
    assert_eq!(bytes.len() as u64, len);
    assert_eq!(find_mark(&out), Some(448));
    (bytes, 448, model)
}

/// Opens what is at `path` and reads every byte of it.
fn verified(path: &Path) -> Result<Option<()>> {
    Bundle::open(path)?.map(|bundle| bundle.verify_checksums()).transpose()
}

#[test]
fn a_bundle_gives_back_what_was_put_in() {
    let dir = Scratch::new("whole");
    let (bytes, _, model) = whole(&dir);
    let path = dir.put(&bytes);
    let bundle = Bundle::open(&path).expect("readable").expect("a bundle");
    assert_eq!(bundle.file_names().collect::<Vec<_>>(), ["config.json", PACKED_NAME, "tokenizer.json"]);
    assert_eq!(bundle.read_file("config.json"), Ok(Some(&b"{}"[..])));
    assert_eq!((bundle.file_size("tokenizer.json"), bundle.read_file("none")), (Some(3000), Ok(None)));
    let source = bundle.open_model().expect("the model");
    assert_eq!(source.only_file().expect("one file").bytes(), packed());
    bundle.verify_checksums().expect("whole");
    assert_eq!(model % (2 << 20), 0);
    // A bundle's program is the program.
    assert_eq!(read_program(&path), Ok(program_bytes()));
}

#[test]
fn other_files_are_not_taken_for_bundles() {
    let dir = Scratch::new("other");
    let after = |n: usize| [program_bytes(), vec![b'\n'; n]].concat();
    for other in
        [vec![], b"\x7fELF\x02\x01\x01".to_vec(), vec![7; 5000], packed(), after(0), after(1), after(5000)]
    {
        assert_eq!(verified(&dir.put(&other)), Ok(None), "{} bytes", other.len());
    }
    assert_eq!((find_mark(&dir.0), find_mark(Path::new("/nowhere"))), (None, None));
    assert!(read_program(&dir.put(&packed())).is_err_and(|e| e.exit_code() == 1));
    assert!(read_program(&dir.put(&program_bytes()[..400])).is_err());
    let e = verified(&dir.put(&after(100_000))).expect_err("no mark");
    assert!(e.to_string().contains("do not begin with the bundle mark"), "{e}");
}

#[test]
fn every_damaged_byte_is_found() {
    let dir = Scratch::new("damaged");
    let (bytes, mark, model) = whole(&dir);
    let data = mark + HEAD;
    let places = [mark, mark + 20, mark + 24, mark + 32, mark + 40, mark + 200, data - 1, data, data + 3001];
    for at in places.into_iter().chain([model, model + 8, model + 70_001, bytes.len() - 1]) {
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        let e = verified(&dir.put(&bad)).expect_err("damaged");
        assert!(e.exit_code() == 3 && e.to_string().contains("damaged bundle"), "{at}: {e}");
    }
    // What is checked at each start: all but the weights between the samples.
    for at in [data, model + 8, bytes.len() - 1] {
        let mut bad = bytes.clone();
        bad[at] ^= 1;
        let bundle = Bundle::open(&dir.put(&bad)).expect("its table is right").expect("a bundle");
        let found = bundle.open_model().map(|_| ()).and(bundle.read_file("config.json").map(|_| ()));
        assert!(found.is_err(), "{at}");
    }
    // The padding is nobody's.
    let mut padding = bytes;
    padding[model - 1] ^= 1;
    assert_eq!(verified(&dir.put(&padding)), Ok(Some(())));
}

#[test]
fn a_bundle_cut_anywhere_is_refused() {
    let dir = Scratch::new("cut");
    let (bytes, mark, model) = whole(&dir);
    let ends = [mark + MARK_LEN, mark + 100, mark + HEAD, mark + HEAD + 1, model, model + 1, bytes.len() - 1];
    for end in ends {
        let e = verified(&dir.put(&bytes[..end])).expect_err("cut");
        assert!(e.to_string().contains("damaged bundle"), "{end}: {e}");
    }
    let longer = [&bytes[..], b"\n"].concat();
    assert!(verified(&dir.put(&longer)).is_err());
}

/// A table that says of itself that it is right.
fn with_table(bytes: &[u8], mark: usize, json: &serde_json::Value) -> Vec<u8> {
    let mut json = json.to_string().into_bytes();
    json.resize(HEAD - MARK_LEN - 8, b' ');
    let table = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
    let checksum = crc32fast::hash(&table).to_le_bytes();
    [&bytes[..mark + 24], &checksum, &[0; 4], &table, &bytes[mark + HEAD..]].concat()
}

#[test]
fn hostile_tables_are_refused() {
    let dir = Scratch::new("hostile");
    let (bytes, mark, _) = whole(&dir);
    let data = bytes.len() - mark - HEAD;
    let tensor =
        |shape: u64, from: u64, to: u64| json!({"dtype": "U8", "shape": [shape], "data_offsets": [from, to]});
    let all = data as u64;
    let tables = [
        json!({}),
        json!({"x": tensor(all, 0, all)}),
        json!({"__metadata__": {}, "padding": tensor(all, 0, all)}),
        json!({PACKED_NAME: tensor(all, 0, all)}),
        json!({PACKED_NAME: tensor(all + 1, 0, all + 1)}),
        json!({PACKED_NAME: tensor(u64::MAX, 0, u64::MAX)}),
        json!({PACKED_NAME: tensor(all, u64::MAX, u64::MAX - 1)}),
        json!({"__metadata__": {"header": "18446744073709551615", "fingerprint": ""}, PACKED_NAME: tensor(all, 0, all)}),
        json!({"__metadata__": {"header": "-1"}, PACKED_NAME: tensor(all, 0, all)}),
        json!({"a": tensor(all, 0, all), "b": tensor(all, 0, all)}),
        json!([]),
    ];
    for table in tables {
        let e = verified(&dir.put(&with_table(&bytes, mark, &table))).expect_err("hostile");
        assert!(e.exit_code() == 3 && e.to_string().contains("damaged bundle"), "{table}: {e}");
    }
    // The length of the table's JSON is a number of the file's own.
    for len in [0u64, 1, 4057, u64::MAX, 100_000_000] {
        let mut bad = bytes.clone();
        bad[mark + MARK_LEN..mark + MARK_LEN + 8].copy_from_slice(&len.to_le_bytes());
        let checksum = crc32fast::hash(&bad[mark + MARK_LEN..mark + HEAD]).to_le_bytes();
        bad[mark + 24..mark + 28].copy_from_slice(&checksum);
        assert!(verified(&dir.put(&bad)).is_err_and(|e| e.exit_code() == 3), "{len}");
    }
}

/// Whatever a header says: an answer, no panic and no endless memory.
#[test]
fn damaged_programs_cause_no_panic() {
    let dir = Scratch::new("elf");
    let good = [program_bytes(), vec![0; 100_000]].concat();
    for at in (16..120).chain(300..428).step_by(4) {
        for (value, width) in [(0xff, 1), (0xff, 8), (0x7f, 8), (0, 8)] {
            let mut bad = good.clone();
            bad.iter_mut().skip(at).take(width).for_each(|b| *b = value);
            let path = dir.put(&bad);
            let _ = (find_mark(&path), read_program(&path), verified(&path));
        }
    }
}
