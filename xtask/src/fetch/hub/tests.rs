//! Fetching from a stand-in for the hub on this machine: models in memory, over plain HTTP.

use super::*;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CONFIG: &str = include_str!("../../../../models/smollm2-135m/config.json");

/// What the stand-in has, and what it has been asked.
#[derive(Default)]
struct Shelf {
    files: Vec<(&'static str, Vec<u8>)>,
    /// Other models that it knows of.
    others: Vec<&'static str>,
    /// Who brings no such token gets nothing.
    token: Option<&'static str>,
    /// So many answers with a file break off in the middle.
    cuts: AtomicUsize,
    lie: Option<Lie>,
    /// The requests' first lines, their ranges and tokens.
    asked: Mutex<Vec<String>>,
}

/// What is wrong with an answer.
struct Lie {
    /// In the first line of requests.
    of: &'static str,
    /// A header, `name:`, or a text that comes instead of another; the whole answer instead of an empty one.
    from: &'static str,
    to: Vec<u8>,
    then: Then,
}

#[derive(Clone, Copy, PartialEq)]
enum Then {
    Close,
    Silence,
    /// A byte now and then, for ever.
    Drip,
    /// Whatever the connection takes, for ever.
    Flood,
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
        let client = Client { token: None, patience: PATIENCE };
        Bed { shelf, hub: Hub { endpoint, cache: dir.join("hub"), client }, dir }
    }

    fn folder(&self) -> PathBuf {
        self.hub.cache.join("models--org--name")
    }

    fn fetch(&self, name: &str) -> PathBuf {
        self.hub.fetch(name).unwrap().path
    }

    fn refused(&self, name: &str) -> String {
        let said = self.hub.fetch(name).unwrap_err().to_string();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(!said.contains(|c: char| c.is_control()), "{said:?}");
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
        let header =
            |name: &str| headers.iter().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
        let (range, token) = (header("range:"), header("authorization: bearer"));
        self.asked.lock().unwrap().push(format!("{first} {range} {token}"));
        let path = first.split(' ').nth(1).unwrap_or_default();
        let file = path.strip_prefix("/org/name/resolve/").and_then(|path| path.strip_prefix(COMMIT));
        let repo = path.strip_prefix("/api/models/").and_then(|path| path.strip_suffix("/revision/main"));
        let answer = match (file, repo) {
            _ if self.token.is_some_and(|wanted| wanted != token) => empty("401 Unauthorized"),
            (Some(name), _) => self.file(name.trim_start_matches('/'), range, first.starts_with("HEAD ")),
            (_, Some(repo)) if repo == "org/name" || self.others.contains(&repo) => self.list(),
            _ => empty("404 Not Found"),
        };
        match self.lie.as_ref().filter(|lie| first.contains(lie.of)) {
            Some(lie) => lie.tell(&answer, &mut stream),
            None => stream.write_all(&answer).unwrap_or_default(),
        }
    }

    fn list(&self) -> Vec<u8> {
        let names: Vec<String> =
            self.files.iter().map(|(name, _)| format!("{{\"rfilename\": \"{name}\"}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", names.join(", "));
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
        format!("{head}{body}").into_bytes()
    }

    /// `bytes=FIRST-`, or all of it.
    fn file(&self, name: &str, range: &str, head: bool) -> Vec<u8> {
        let Some((_, all)) = self.files.iter().find(|(there, _)| *there == name) else {
            return empty("404 Not Found");
        };
        let first = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap_or(0);
        let mut body = &all[all.len().min(first)..];
        let status = if range.is_empty() { "200 OK" } else { "206 Partial Content" };
        let header = format!(
            "HTTP/1.1 {status}\r\netag: \"{}\"\r\ncontent-length: {}\r\n\
             content-range: bytes {first}-{}/{}\r\nconnection: close\r\n\r\n",
            cache::hex(Sha256::new_with_prefix(all)),
            body.len(),
            all.len() - 1,
            all.len()
        );
        let cut = |cuts: usize| cuts.checked_sub(1);
        if head {
            body = &[];
        } else if self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, cut).is_ok() {
            body = &body[..body.len() / 2];
        }
        [header.as_bytes(), body].concat()
    }
}

impl Lie {
    fn tell(&self, honest: &[u8], stream: &mut TcpStream) {
        let text = String::from_utf8_lossy(honest);
        let replaced = match self.from {
            "" => text.as_ref(),
            name if name.ends_with(':') => text.lines().find(|line| line.starts_with(name)).unwrap_or(name),
            text => text,
        };
        let (before, after) = text.split_once(replaced).unwrap_or((&text, ""));
        let mut sent = stream.write_all(&[before.as_bytes(), self.to.as_slice(), after.as_bytes()].concat());
        while sent.is_ok() && self.then != Then::Close {
            sent = match self.then {
                Then::Flood => stream.write_all(&b"x: y\r\n".repeat(10_000)),
                Then::Drip => stream.write_all(b"x"),
                // Until the other side has gone.
                _ => stream.read_exact(&mut [0]),
            };
            if self.then == Then::Drip {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
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
    let model = bed.fetch("org/name");
    assert_eq!(model, bed.folder());
    let snapshot = files::hub::snapshot(&model);
    assert_eq!(snapshot, bed.folder().join("snapshots").join(COMMIT));
    assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), weights());
    assert_eq!(fs::read_to_string(snapshot.join("config.json")).unwrap(), CONFIG);
    assert!(!snapshot.join("README.md").exists() && !snapshot.join("onnx").exists());
    // What is there is not asked for again.
    let asked = bed.asked("resolve");
    assert_eq!(bed.fetch("org/name"), model);
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
    let snapshot = files::hub::snapshot(&bed.fetch("org/name"));
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
    let model = bed.fetch("org/name:Q8");
    assert_eq!(model, bed.folder().join("snapshots").join(COMMIT).join("m-q8.gguf"));
    assert_eq!(fs::read(model).unwrap(), gguf);
    assert_eq!((bed.asked("m-q4"), bed.asked("config")), (0, 0));
}

#[test]
fn a_download_that_is_cut_off_goes_on_where_it_was() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())];
    let bed = Bed::new("cut", Shelf::of(&files));
    let snapshot = || files::hub::snapshot(&bed.fetch("org/name"));
    // Within one run, and in the next one.
    bed.shelf.cuts.store(2, Ordering::SeqCst);
    assert_eq!(fs::read(snapshot().join("model.safetensors")).unwrap(), weights());
    let bed = Bed::new("cut-later", Shelf::of(&files));
    bed.shelf.cuts.store(20, Ordering::SeqCst);
    let said = bed.refused("org/name");
    assert!(said.contains("what has come stays"), "{said}");
    bed.shelf.cuts.store(0, Ordering::SeqCst);
    bed.shelf.asked.lock().unwrap().clear();
    let model = bed.fetch("org/name");
    assert_eq!(fs::read_to_string(files::hub::snapshot(&model).join("config.json")).unwrap(), CONFIG);
    let asked = (bed.asked("/config.json"), bed.asked("/config.json HTTP/1.1 bytes="));
    assert_eq!(asked, (2, 1), "how long it is, and the rest of it");
}

/// An honest model, about which the stand-in lies.
fn lying(name: &str, lie: Lie) -> Bed {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())];
    let mut bed = Bed::new(name, Shelf { lie: Some(lie), ..Shelf::of(&files) });
    bed.hub.client.patience = 1;
    bed
}

/// All that is below a folder.
fn below(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| below(&path).into_iter().chain([path])).collect()
}

#[test]
fn an_endpoint_that_lies_writes_nothing_and_is_told_in_a_line() {
    let (list, head, body) = ("/api/", "HEAD ", "GET /org/name/resolve");
    let long = "a".repeat(65);
    let cases: Vec<(&'static str, &'static str, &[u8], &str)> = vec![
        // Names that become paths.
        (list, COMMIT, b"../../../../evil", "its commit is `../../../../evil`, which is no hash"),
        (list, COMMIT, b"", "its commit is ``"),
        (list, COMMIT, long.as_bytes(), "which is no hash"),
        (head, "etag:", b"etag: \"../../../../evil\"", "config.json: its ETag is `../../../../evil`"),
        (head, "etag:", b"x-linked-etag: /tmp/xtask-hub-evil", "its ETag is `/tmp/xtask-hub-evil`"),
        (head, "etag:", b"etag: \xff\x1b[2J", "its ETag is"),
        (head, "etag:", b"x: y", "its ETag is ``"),
        (list, "model.safetensors", b"../../../evil.gguf", "the hub has neither"),
        (list, "model.safetensors", b"/tmp/xtask-hub-evil.gguf", "the hub has neither"),
        (list, "model.safetensors", b"..\\\\evil.gguf", "the hub has neither"),
        (list, "model.safetensors", b"evil\\u0000.gguf", "the hub has neither"),
        (
            head,
            "etag:",
            b"etag: 0000000000000000000000000000000000000000000000000000000000000000",
            "config.json: has SHA-256",
        ),
        // More than was announced, or than may come.
        (head, "content-length:", b"content-length: 10", "more comes than the 10 bytes"),
        (
            head,
            "content-length:",
            b"x-linked-size: 99999999999999999",
            "config.json: 99999999999999999 bytes, where",
        ),
        (body, "content-length:", b"transfer-encoding: chunked", "cannot be fetched"),
        // Redirects.
        (list, "", b"HTTP/1.1 302 Found\r\nlocation: /api/again\r\n\r\n", "it redirects more than 5 times"),
        (
            list,
            "",
            b"HTTP/1.1 302 Found\r\nlocation: file:///etc/passwd\r\n\r\n",
            "it redirects to `file:///etc/passwd`",
        ),
        (head, "", b"HTTP/1.1 302 Found\r\n\r\n", "it redirects to ``"),
        (head, "", b"HTTP/1.1 307 Moved\r\nlocation: \xff\xfe\r\n\r\n", "it redirects to"),
        (body, "", b"HTTP/1.1 308 Moved\r\nlocation: //\r\n\r\n", "it redirects to `//`"),
        // No hub, or none that anyone knows.
        (list, "", b"HTTP/1.1 200 OK\r\n\r\n[1, 2]", "its commit is ``"),
        (list, "", b"HTTP/1.1 200 OK\r\n\r\nnull", "its commit is ``"),
        (list, "", b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "is no JSON"),
        (list, "[", b"1, \"x\": [", "it lists no files"),
        (list, "", b"220 ready\r\n", "cannot be fetched"),
        (list, "", b"", "cannot be fetched"),
        (list, "200", b"xyz", "cannot be fetched"),
        (head, "200", b"300", "status 300"),
        (head, "200", b"999", "status 999"),
        (body, "200", b"204", "status 204"),
        (
            body,
            "",
            b"HTTP/1.1 206 Part\r\ncontent-range: bytes 7-9/10\r\n\r\nabc",
            "another part of the file",
        ),
    ];
    for (i, (of, from, to, words)) in cases.into_iter().enumerate() {
        let bed = lying(&format!("lie-{i}"), Lie { of, from, to: to.to_vec(), then: Then::Close });
        let said = bed.refused("org/name");
        assert!(said.contains(words), "{i}: {said}, not {words}");
        let written = below(&bed.dir);
        let wrong = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.contains("evil") || !path.starts_with(&bed.hub.cache) && *path != bed.hub.cache
        };
        assert!(!written.iter().any(wrong), "{i}: {written:?}");
        assert_eq!(bed.asked("model.safetensors"), 0, "{i}");
        let kept = written.iter().filter(|path| path.parent().is_some_and(|dir| dir.ends_with("blobs")));
        assert!(said.contains("what has come stays") || kept.count() == 0, "{i}: {said}: {written:?}");
    }
    assert!(!Path::new("/tmp/xtask-hub-evil").exists() && !Path::new("/tmp/xtask-hub-evil.gguf").exists());
}

#[test]
fn an_endpoint_that_keeps_one_waiting_or_never_ends_is_left() {
    let (list, head, body) = ("/api/", "HEAD ", "GET /org/name/resolve");
    let ok = b"HTTP/1.1 200 OK\r\n".as_slice();
    let long = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n".as_slice();
    let unsized_ = b"HTTP/1.1 200 OK\r\n\r\n".as_slice();
    let cases: [(&'static str, &[u8], Then, &str); 10] = [
        (list, b"", Then::Silence, "(28)"),
        (list, ok, Then::Drip, "(28)"),
        (list, ok, Then::Flood, "endless headers"),
        (list, unsized_, Then::Flood, "more comes than"),
        (list, long, Then::Silence, "(28)"),
        (head, b"", Then::Silence, "(28)"),
        (head, ok, Then::Drip, "(28)"),
        (body, long, Then::Drip, "(28)"),
        (body, unsized_, Then::Flood, "more comes than"),
        // Of TLS.
        ("", b"\x16\x03\x03\x40\x00", Then::Drip, "(28)"),
    ];
    std::thread::scope(|scope| {
        for (i, (of, to, then, words)) in cases.into_iter().enumerate() {
            scope.spawn(move || {
                let mut bed = lying(&format!("slow-{i}"), Lie { of, from: "", to: to.to_vec(), then });
                if of.is_empty() {
                    bed.hub.endpoint = bed.hub.endpoint.replace("http:", "https:");
                }
                let began = Instant::now();
                let said = bed.refused("org/name");
                assert!(said.contains(words), "{i}: {said}");
                assert!(began.elapsed() < Duration::from_secs(60), "{i}: {said}");
            });
        }
    });
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let files: [(&str, &[u8]); 2] = [("config.json", CONFIG.as_bytes()), ("model.safetensors", b"w")];
    let mut bed = Bed::new("token", Shelf { token: Some("hf_secret"), ..Shelf::of(&files) });
    let said = bed.refused("org/name");
    assert!(said.contains("HF_TOKEN") && said.contains("accept its terms at http://127.0.0.1:"), "{said}");
    bed.hub.client.token = Some("hf_secret".into());
    assert!(bed.hub.fetch("org/name").is_ok());
    // As the hub does: a small file is elsewhere on it, a large one on another server that the redirect describes.
    let moved = |of, location: String, more: &str| {
        let to =
            format!("HTTP/1.1 302 Found\r\nlocation: {location}/org/name/resolve/{COMMIT}/{more}\r\n\r\n");
        let lie = Lie { of, from: "", to: to.into_bytes(), then: Then::Close };
        let files: [(&str, &[u8]); 3] =
            [("config.json", b"elsewhere"), files[1], ("settings", CONFIG.as_bytes())];
        Shelf { token: Some("hf_secret"), lie: Some(lie), ..Shelf::of(&files) }
    };
    let mut bed = Bed::new("moved", moved("config.json", String::new(), "settings"));
    bed.hub.client.token = Some("hf_secret".into());
    bed.fetch("org/name");
    assert_eq!(bed.asked("/settings HTTP/1.1  hf_secret"), 2);
    let described =
        format!("x-linked-size: 1\r\nx-linked-etag: \"{}\"", cache::hex(Sha256::new_with_prefix(b"w")));
    for (name, more, asked) in [("described", described.as_str(), 1), ("undescribed", "x: y", 2)] {
        let other = Bed::new(&format!("{name}-other"), Shelf::of(&files));
        let more = format!("model.safetensors\r\n{more}");
        let mut shelf = moved("model.safetensors", other.hub.endpoint.clone(), &more);
        shelf.files[0].1 = CONFIG.into();
        let mut bed = Bed::new(name, shelf);
        bed.hub.client.token = Some("hf_secret".into());
        let snapshot = files::hub::snapshot(&bed.fetch("org/name"));
        assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), b"w");
        assert_eq!((other.asked("model.safetensors"), other.asked("hf_secret")), (asked, 0), "{name}");
        assert_eq!(bed.asked("model.safetensors HTTP/1.1  hf_secret"), 2, "{name}");
    }
}

#[test]
fn a_base_model_is_told_with_what_there_is_for_chats() {
    let gguf = fs::read(sh::root().join("tests/fixtures/gguf/m16-llama-linear-bf16.Q8_0.gguf")).unwrap();
    let files: [(&str, &[u8]); 3] =
        [("config.json", CONFIG.as_bytes()), ("model.safetensors", b"w"), ("m.gguf", &gguf)];
    let bed = Bed::new("base", Shelf { others: vec!["org/name-it"], ..Shelf::of(&files) });
    for name in ["org/name", "org/name:m.gguf"] {
        let base = bed.hub.fetch(name).unwrap().base.unwrap();
        assert!(
            base.starts_with("org/name is a base model: ") && base.ends_with("fetch org/name-it"),
            "{base}"
        );
    }
    let bed = Bed::new("no-sibling", Shelf::of(&files));
    assert!(bed.hub.fetch("org/name").unwrap().base.is_some_and(|base| base.ends_with("-Instruct or -it")));
    let template: (&str, &[u8]) = ("tokenizer_config.json", br#"{"chat_template": "{{ messages }}"}"#);
    let bed = Bed::new("chats", Shelf::of(&[files[0], files[1], template]));
    assert_eq!(bed.hub.fetch("org/name").unwrap().base, None);
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
    let (blobs, hash) = (bed.folder().join("blobs"), cache::hex(Sha256::new_with_prefix(weights())));
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
    child.args(["--exact", "fetch::hub::tests::a_child_fetches", "--nocapture"]);
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
fn a_child_fetches() {
    // As a process of its own, with the variables that the test above sets: never from the network.
    if std::env::var("HF_ENDPOINT").is_ok_and(|endpoint| endpoint.starts_with("http://127.0.0.1:")) {
        super::super::run(&["org/name".into()]).unwrap();
    }
}
