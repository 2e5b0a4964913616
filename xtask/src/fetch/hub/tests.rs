//! Fetching from a stand-in for the hub on this machine: models in memory, over plain HTTP.

use super::*;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CONFIG: &str = include_str!("../../../../models/smollm2-135m/config.json");

/// What the stand-in has, and what it has been asked.
#[derive(Default)]
struct Shelf {
    files: Vec<(&'static str, Vec<u8>)>,
    /// Who brings no such token gets nothing.
    token: Option<&'static str>,
    /// So many answers with a file break off in the middle.
    cuts: AtomicUsize,
    /// Says a wrong hash of files.
    lies: bool,
    /// The requests' first lines, and their ranges.
    asked: Mutex<Vec<String>>,
}

/// A hub and a user's cache.
struct Bed {
    dir: PathBuf,
    shelf: Arc<Shelf>,
    hub: Hub,
}

impl Bed {
    fn new(name: &str, shelf: Shelf) -> Bed {
        let dir = std::env::temp_dir().join(format!("xtask-hub-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let (listener, shelf) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(shelf));
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shown = Arc::clone(&shelf);
        // It ends with the tests.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shelf = Arc::clone(&shown);
                std::thread::spawn(move || shelf.answer(stream));
            }
        });
        Bed { shelf, hub: Hub { endpoint, cache: dir.join("hub"), token: None }, dir }
    }

    fn folder(&self) -> PathBuf {
        self.hub.cache.join("models--org--name")
    }

    fn refused(&self, name: &str) -> String {
        let said = self.hub.fetch(name).unwrap_err().to_string();
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }

    fn asked(&self, word: &str) -> usize {
        self.shelf.asked.lock().unwrap().iter().filter(|line| line.contains(word)).count()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Shelf {
    fn of(files: &[(&'static str, &[u8])]) -> Shelf {
        Shelf {
            files: files.iter().map(|(name, bytes)| (*name, bytes.to_vec())).collect(),
            ..Shelf::default()
        }
    }

    /// One request, one answer.
    fn answer(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(|line| line.ok());
        let first = lines.next().unwrap_or_default();
        let headers: Vec<String> =
            lines.take_while(|line| !line.is_empty()).map(|line| line.to_lowercase()).collect();
        let header = |name: &str| headers.iter().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let range = header("range:").unwrap_or_default();
        self.asked.lock().unwrap().push(format!("{first} {range}"));
        let path = first.split(' ').nth(1).unwrap_or_default();
        let allowed = self.token.is_none_or(|token| header("authorization: bearer") == Some(token));
        let answer = match path.strip_prefix("/org/name/resolve/main/") {
            _ if !allowed => empty("401 Unauthorized"),
            Some(name) => self.file(name, range),
            None if path == "/api/models/org/name/revision/main" => self.list(),
            None => empty("404 Not Found"),
        };
        let _ = stream.write_all(&answer);
    }

    fn list(&self) -> Vec<u8> {
        let names: Vec<String> =
            self.files.iter().map(|(name, _)| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", names.join(", "));
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n",
            body.len()
        );
        format!("{head}connection: close\r\n\r\n{body}").into_bytes()
    }

    /// `bytes=FIRST-[LAST]`; a range of one byte asks about the file only.
    fn file(&self, name: &str, range: &str) -> Vec<u8> {
        let Some((_, all)) = self.files.iter().find(|(there, _)| *there == name) else {
            return empty("404 Not Found");
        };
        let (first, last) = range.trim_start_matches("bytes=").split_once('-').unwrap_or(("0", ""));
        let first: usize = first.parse().unwrap_or(0);
        let end = last.parse().map_or(all.len(), |last: usize| last + 1);
        let etag =
            if self.lies { "0".repeat(64) } else { super::super::cache::hex(Sha256::new_with_prefix(all)) };
        let mut body = &all[first.min(end)..end];
        let head = format!(
            "HTTP/1.1 206 Partial Content\r\netag: \"{etag}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-length: {}\r\n\
             content-range: bytes {first}-{}/{}\r\nconnection: close\r\n\r\n",
            body.len(),
            end - 1,
            all.len()
        );
        let cut = |cuts: usize| cuts.checked_sub(1);
        if last.is_empty() && self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, cut).is_ok() {
            body = &body[..body.len() / 2];
        }
        [head.as_bytes(), body].concat()
    }
}

fn empty(status: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").into_bytes()
}

fn weights() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

#[test]
fn a_model_comes_into_the_users_cache_and_is_found_there() {
    let files: [(&str, &[u8]); 5] = [
        ("README.md", b"not wanted"),
        ("config.json", CONFIG.as_bytes()),
        ("tokenizer.json", b"{}"),
        ("model.safetensors", &weights()),
        ("onnx/model.onnx", b"not wanted"),
    ];
    let bed = Bed::new("whole", Shelf::of(&files));
    let model = bed.hub.fetch("org/name").unwrap();
    assert_eq!(model, bed.folder());
    let snapshot = files::hub::snapshot(&model);
    assert_eq!(snapshot, bed.folder().join("snapshots").join(COMMIT));
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read_to_string(snapshot.join("config.json")).unwrap(), CONFIG);
    assert!(!snapshot.join("README.md").exists() && !snapshot.join("onnx").exists());
    // What is there is not asked for again.
    let asked = bed.asked("resolve");
    assert_eq!(bed.hub.fetch("org/name").unwrap(), model);
    assert_eq!(bed.asked("resolve"), asked);
}

#[test]
fn shards_come_as_their_index_names_them() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let bed = Bed::new(
        "shards",
        Shelf::of(&[
            ("config.json", CONFIG.as_bytes()),
            ("model.safetensors.index.json", index),
            ("model-1.safetensors", b"1"),
            ("model-2.safetensors", b"2"),
            ("model-3.safetensors", b"3"),
        ]),
    );
    let snapshot = files::hub::snapshot(&bed.hub.fetch("org/name").unwrap());
    assert_eq!(fs::read(snapshot.join("model-2.safetensors")).unwrap(), b"2");
    assert!(snapshot.join("model-1.safetensors").exists() && !snapshot.join("model-3.safetensors").exists());
    let bed = Bed::new(
        "hostile",
        Shelf::of(&[
            ("config.json", CONFIG.as_bytes()),
            ("model.safetensors.index.json", br#"{"weight_map": {"a": "../../../out.safetensors"}}"#),
        ]),
    );
    assert!(bed.refused("org/name").contains("`weight_map` does not name files"));
}

#[test]
fn a_gguf_file_comes_alone() {
    let gguf = fs::read(sh::root().join("tests/fixtures/gguf/m4-qwen2-bf16.Q8_0.gguf")).unwrap();
    let bed =
        Bed::new("gguf", Shelf::of(&[("m-q4.gguf", b"no"), ("m-q8.gguf", &gguf), ("config.json", b"{}")]));
    assert!(bed.refused("org/name").contains("name one: org/name:FILE"));
    let model = bed.hub.fetch("org/name:Q8").unwrap();
    assert_eq!(model, bed.folder().join("snapshots").join(COMMIT).join("m-q8.gguf"));
    assert_eq!(fs::read(model).unwrap(), gguf);
    assert_eq!((bed.asked("m-q4"), bed.asked("config")), (0, 0));
}

#[test]
fn a_download_that_is_cut_off_goes_on_where_it_was() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())];
    let bed = Bed::new("cut", Shelf::of(&files));
    let snapshot = || files::hub::snapshot(&bed.hub.fetch("org/name").unwrap());
    // Within one run, and in the next one.
    bed.shelf.cuts.store(2, Ordering::SeqCst);
    assert_eq!(fs::read(snapshot().join("model.safetensors")).unwrap(), weights());
    let bed = Bed::new("cut-later", Shelf::of(&files));
    bed.shelf.cuts.store(20, Ordering::SeqCst);
    let said = bed.refused("org/name");
    assert!(said.contains("what has come stays"), "{said}");
    bed.shelf.cuts.store(0, Ordering::SeqCst);
    bed.shelf.asked.lock().unwrap().clear();
    let model = bed.hub.fetch("org/name").unwrap();
    assert_eq!(fs::read_to_string(files::hub::snapshot(&model).join("config.json")).unwrap(), CONFIG);
    assert_eq!(bed.asked("config.json HTTP/1.1 bytes=0-"), 1, "only the question how long it is");
}

#[test]
fn a_file_that_is_not_what_the_hub_says_is_refused_and_removed() {
    let shelf = Shelf::of(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())]);
    let bed = Bed::new("lies", Shelf { lies: true, ..shelf });
    let said = bed.refused("org/name");
    assert!(said.contains("config.json: has SHA-256 "), "{said}");
    let blobs = fs::read_dir(bed.folder().join("blobs")).unwrap().flatten();
    assert!(blobs.into_iter().all(|blob| blob.path().extension().is_some_and(|e| e == "lock")));
    assert_eq!(bed.asked("model.safetensors"), 0);
}

#[test]
fn the_token_is_shown_to_the_hub() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", b"w")];
    let mut bed = Bed::new("token", Shelf { token: Some("hf_secret"), ..Shelf::of(&files) });
    let said = bed.refused("org/name");
    assert!(said.contains("HF_TOKEN") && said.contains("accept its terms at http://127.0.0.1:"), "{said}");
    bed.hub.token = Some("hf_secret".into());
    assert!(bed.hub.fetch("org/name").is_ok());
}

#[test]
fn what_cannot_be_used_is_not_fetched() {
    let files: [(&str, &[u8]); 2] =
        [("config.json", br#"{"model_type": "lfm2"}"#), ("model.safetensors", b"w")];
    let bed = Bed::new("arch", Shelf::of(&files));
    let said = bed.refused("org/name");
    assert!(said.contains("field `model_type` is \"lfm2\"; supported: \"llama\""), "{said}");
    assert_eq!(bed.asked("model.safetensors"), 0);
}

#[test]
fn no_model_no_network_and_no_room_are_said_in_a_line() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())];
    let mut bed = Bed::new("lines", Shelf::of(&files));
    let said = bed.refused("org/another");
    assert!(
        said.contains("org/another cannot be fetched from http://") && said.contains("check the name"),
        "{said}"
    );
    // A file system that is full.
    let (blobs, hash) =
        (bed.folder().join("blobs"), super::super::cache::hex(Sha256::new_with_prefix(weights())));
    fs::create_dir_all(&blobs).unwrap();
    let part = blobs.join(format!("{hash}.part"));
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let said = bed.refused("org/name");
    assert!(said.contains("No space left on device") && said.contains("make room in "), "{said}");
    assert!(part.symlink_metadata().is_err(), "it takes no more room");
    bed.hub.endpoint = "http://127.0.0.1:1".into();
    let said = bed.refused("org/name");
    assert!(said.contains("check the network, or name a mirror in HF_ENDPOINT"), "{said}");
}

#[test]
fn the_users_settings_hold() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", b"w")];
    let bed = Bed::new("settings", Shelf { token: Some("hf_saved"), ..Shelf::of(&files) });
    fs::create_dir_all(&bed.dir).unwrap();
    fs::write(bed.dir.join("token"), "hf_saved\n").unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "fetch::hub::tests::a_child_fetches", "--ignored", "--nocapture"]);
    for name in ["HF_HUB_CACHE", "HF_TOKEN", "HF_TOKEN_PATH"] {
        child.env_remove(name);
    }
    let out = child.env("HF_HOME", &bed.dir).env("HF_ENDPOINT", &bed.hub.endpoint).output().unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    let model = bed.folder();
    assert!(files::hub::snapshot(&model).join("model.safetensors").exists());
    assert!(said.contains(&format!("ANTIGRAVITY_MODEL='{}' cargo run", model.display())), "{said}");
}

#[test]
#[ignore = "a process of its own, with the variables that the_users_settings_hold sets"]
fn a_child_fetches() {
    // Never from the network.
    if std::env::var("HF_ENDPOINT").is_ok_and(|endpoint| endpoint.starts_with("http://127.0.0.1:")) {
        super::super::run(&["org/name".into()]).unwrap();
    }
}
