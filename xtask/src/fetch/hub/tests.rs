//! Downloads from a fake hub on this machine: models in memory, over plain HTTP.

use super::*;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const CONFIG: &str = include_str!("../../../../models/smollm2-135m/config.json");
const BLOB: &str = "89abcdef0123456789abcdef0123456789abcdef";

/// The files of a fake hub, its faults, and the requests that it got.
#[derive(Default)]
struct FakeHub {
    files: Vec<(&'static str, Vec<u8>)>,
    /// Another model that it knows of.
    sibling: Option<&'static str>,
    /// The token that requests must have.
    token: Option<&'static str>,
    /// Number of file downloads that break off in the middle.
    cuts: AtomicUsize,
    /// A text of the list of files, and its replacement.
    lie: (&'static str, &'static str),
    /// Sent instead of a file, without end.
    flood: Option<&'static [u8]>,
    /// The server that files are redirected to.
    elsewhere: Option<String>,
    /// The requests' first lines, their ranges and tokens.
    requests: Mutex<Vec<String>>,
}

/// A fake hub, and a user's cache.
struct HubFixture {
    dir: PathBuf,
    server: Arc<FakeHub>,
    hub: Hub,
}

impl HubFixture {
    fn new(name: &str, server: FakeHub) -> HubFixture {
        let dir = std::env::temp_dir().join(format!("xtask-hub-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        let (listener, server) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::new(server));
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::clone(&server);
        // It ends with the tests.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = Arc::clone(&shared);
                std::thread::spawn(move || server.answer(stream));
            }
        });
        let client = Client { token: server.token.map(String::from), timeout: 1 };
        HubFixture { server, hub: Hub { endpoint, cache: dir.join("hub"), client }, dir }
    }

    fn folder(&self) -> PathBuf {
        self.hub.cache.join("models--org--name")
    }

    fn read(&self, file: &str) -> Vec<u8> {
        fs::read(self.folder().join("snapshots").join(COMMIT).join(file)).unwrap_or_default()
    }

    fn refused(&self, name: &str) -> String {
        let said = self.hub.fetch(name).unwrap_err().to_string();
        assert!(said.lines().count() == 1 && !said.contains(|c: char| c.is_control()), "{said:?}");
        said
    }

    fn requests(&self, word: &str) -> usize {
        self.server.requests.lock().unwrap().iter().filter(|line| line.contains(word)).count()
    }
}

impl Drop for HubFixture {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl FakeHub {
    fn of(files: &[(&'static str, &[u8])]) -> FakeHub {
        let files = files.iter().map(|(name, bytes)| (*name, bytes.to_vec())).collect();
        FakeHub { files, ..FakeHub::default() }
    }

    fn model() -> FakeHub {
        FakeHub::of(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &weights())])
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
        self.requests.lock().unwrap().push(format!("{first} {range} {token}"));
        let path = first.split(' ').nth(1).unwrap_or_default();
        let file = path.strip_prefix("/org/name/resolve/").and_then(|path| path.strip_prefix(COMMIT));
        let repo =
            path.strip_prefix("/api/models/").and_then(|path| path.strip_suffix("/revision/main?blobs=true"));
        let answer = match (file, repo) {
            _ if self.token.is_some_and(|wanted| wanted != token) => empty("401 Unauthorized"),
            (Some(name), _) => self.file(name.trim_start_matches('/'), range),
            (_, Some(repo)) if repo == "org/name" || self.sibling == Some(repo) => self.list(),
            _ => empty("404 Not Found"),
        };
        let _ = stream.write_all(&answer);
        while let (Some(flood), Some(_)) = (self.flood, file) {
            if stream.write_all(flood).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(if flood.len() < 100 { 50 } else { 0 }));
        }
    }

    fn list(&self) -> Vec<u8> {
        let file = |(name, bytes): &(&str, Vec<u8>)| {
            let lfs = name.contains("model").then(|| serde_json::json!({"sha256": sha256(bytes)}));
            serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": BLOB.replace('8', &bytes.len().to_string()[..1]), "lfs": lfs})
        };
        let list =
            serde_json::json!({"sha": COMMIT, "siblings": self.files.iter().map(file).collect::<Vec<_>>()});
        let list = list.to_string().replacen(self.lie.0, self.lie.1, usize::from(!self.lie.0.is_empty()));
        format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{list}").into_bytes()
    }

    /// `bytes=FIRST-`, or all of it.
    fn file(&self, name: &str, range: &str) -> Vec<u8> {
        if let Some(elsewhere) = &self.elsewhere {
            let to = format!("location: {elsewhere}/org/name/resolve/{COMMIT}/{name}");
            return format!("HTTP/1.1 302 Found\r\n{to}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .into_bytes();
        }
        if self.flood.is_some() {
            return b"HTTP/1.1 200 OK\r\n\r\n".to_vec();
        }
        let Some((_, all)) = self.files.iter().find(|(there, _)| *there == name) else {
            return empty("404 Not Found");
        };
        let first = range.trim_start_matches("bytes=").trim_end_matches('-').parse().unwrap_or(0);
        let mut body = &all[all.len().min(first)..];
        let status = if range.is_empty() { "200 OK" } else { "206 Partial Content" };
        let (length, last, whole) = (body.len(), all.len() - 1, all.len());
        let header = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {length}\r\ncontent-range: bytes {first}-{last}/{whole}\r\nconnection: close\r\n\r\n"
        );
        if self.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |cuts| cuts.checked_sub(1)).is_ok() {
            body = &body[..body.len() / 2];
        }
        [header.as_bytes(), body].concat()
    }
}

fn empty(status: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").into_bytes()
}

fn weights() -> Vec<u8> {
    (0..100_000_u32).flat_map(u32::to_le_bytes).collect()
}

fn sha256(bytes: &[u8]) -> String {
    cache::to_hex(Sha256::new_with_prefix(bytes))
}

#[test]
fn a_model_is_downloaded_once_and_an_interrupted_download_continues() {
    let bed = HubFixture::new("whole", FakeHub::model());
    // Within one run, and in the next one.
    bed.server.cuts.store(20, Ordering::SeqCst);
    assert!(bed.refused("org/name").contains("the part that has come is kept"));
    bed.server.cuts.store(2, Ordering::SeqCst);
    bed.server.requests.lock().unwrap().clear();
    let model = bed.hub.fetch("org/name").unwrap().path;
    assert_eq!(
        (&model, files::hf_cache::resolve_snapshot(&model)),
        (&bed.folder(), bed.folder().join("snapshots").join(COMMIT))
    );
    assert!(bed.read("model.safetensors") == weights() && bed.read("config.json") == CONFIG.as_bytes());
    assert_eq!(bed.requests("/config.json"), bed.requests("/config.json HTTP/1.1 bytes="));
    let requests = bed.requests("resolve");
    assert_eq!(bed.hub.fetch("org/name").unwrap().path, model);
    assert_eq!(bed.requests("resolve"), requests, "a file that is there is not asked for again");
}

#[test]
fn shards_and_gguf_files_are_fetched_by_name_and_base_models_are_reported() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let config = ("config.json", CONFIG.as_bytes());
    let shards: [(&str, &[u8]); 5] = [
        config,
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"1"),
        ("model-2.safetensors", b"22"),
        ("model-3.safetensors", b"333"),
    ];
    let bed = HubFixture::new("shards", FakeHub { sibling: Some("org/name-it"), ..FakeHub::of(&shards) });
    let base = bed.hub.fetch("org/name").unwrap().base.unwrap();
    assert!(base.starts_with("org/name is a base model: ") && base.ends_with("fetch org/name-it"), "{base}");
    assert_eq!(
        (bed.read("model-2.safetensors").as_slice(), bed.read("model-3.safetensors").len()),
        (&b"22"[..], 0)
    );
    let hostile = br#"{"weight_map": {"a": "../../../out.safetensors"}}"#;
    let bed = HubFixture::new("hostile", FakeHub::of(&[config, ("model.safetensors.index.json", hostile)]));
    assert!(bed.refused("org/name").contains("`weight_map` does not name files"));
    let gguf = fs::read(command::root().join("tests/fixtures/gguf/m4-qwen2-bf16.Q8_0.gguf")).unwrap();
    let bed = HubFixture::new("gguf", FakeHub::of(&[("model-q4.gguf", b"no"), ("model-q8.gguf", &gguf)]));
    assert!(bed.refused("org/name").contains("name one: org/name:FILE"));
    assert_eq!(fs::read(bed.hub.fetch("org/name:Q8").unwrap().path).unwrap(), gguf);
    assert_eq!(bed.requests("model-q4"), 0);
}

#[test]
fn a_lying_endpoint_writes_nothing_and_is_one_line_of_error() {
    let cases = [
        (COMMIT, "../../../../evil", "its commit is `../../../../evil`, which is not a hash"),
        (COMMIT, "", "its commit is ``"),
        ("\"rfilename\":\"model.safetensors\"", "\"rfilename\":\"../../evil\"", "the hub has neither"),
        ("\"rfilename\":\"model.safetensors\"", "\"rfilename\":\"evil\\u0000\"", "the hub has neither"),
        ("\"sha256\":\"", "\"sha256\":\"/evil", "model.safetensors: its hash is `/evil"),
        ("\"size\":400000", "\"size\":10", "more than the 10 bytes"),
        ("\"size\":400000", "\"size\":null", "or without size and hash"),
        ("\"blobId\":\"", "\"blobId\":\"../", "config.json: its hash is `../"),
        ("{", "[", "its list of files is invalid"),
        ("\"siblings\"", "\"brothers\"", "its list of files is invalid"),
    ];
    for (i, (from, to, words)) in cases.into_iter().enumerate() {
        let bed = HubFixture::new(&format!("lie-{i}"), FakeHub { lie: (from, to), ..FakeHub::model() });
        let said = bed.refused("org/name");
        assert!(said.contains(words), "{i}: {said}, not {words}");
        let blobs = fs::read_dir(bed.folder().join("blobs")).into_iter().flatten().flatten();
        assert!(!bed.dir.join("evil").exists() && blobs.count() <= 1, "{i}: {said}");
    }
    for (name, flood, words) in [
        ("drip", &b"x"[..], "Operation too slow"),
        ("flood", &[b'x'; 10_000], "more than the"),
        ("silence", b"", "Operation too slow"),
    ] {
        let said =
            HubFixture::new(name, FakeHub { flood: Some(flood), ..FakeHub::model() }).refused("org/name");
        assert!(said.contains(words), "{name}: {said}");
    }
    let other = FakeHub::of(&[("config.json", CONFIG.as_bytes()), ("model.safetensors", &[0; 400_000])]);
    let sum: &'static str = Box::leak(sha256(&[0; 400_000]).into_boxed_str());
    let wrong: &'static str = Box::leak(sha256(b"").into_boxed_str());
    let said = HubFixture::new("sum", FakeHub { lie: (sum, wrong), ..other }).refused("org/name");
    assert!(said.contains("model.safetensors: has SHA-256"), "{said}");
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let elsewhere = HubFixture::new("elsewhere", FakeHub::model());
    let bed = HubFixture::new(
        "token",
        FakeHub {
            token: Some("hf_secret"),
            elsewhere: Some(elsewhere.hub.endpoint.clone()),
            ..FakeHub::model()
        },
    );
    bed.hub.fetch("org/name").unwrap();
    assert_eq!((bed.requests("hf_secret"), elsewhere.requests("resolve")), (bed.requests(""), 2));
    assert_eq!(elsewhere.requests("hf_secret"), 0);
    let mut bed = HubFixture::new("no-token", FakeHub { token: Some("hf_secret"), ..FakeHub::model() });
    bed.hub.client.token = None;
    let said = bed.refused("org/name");
    assert!(said.contains("HF_TOKEN") && said.contains("accept its terms at http://127.0.0.1:"), "{said}");
}

#[test]
fn a_missing_model_network_or_space_is_one_line_of_error() {
    let unsupported: [(&str, &[u8]); 2] =
        [("config.json", br#"{"model_type": "mamba2"}"#), ("model.safetensors", b"w")];
    let bed = HubFixture::new("arch", FakeHub::of(&unsupported));
    assert!(bed.refused("org/name").contains("field `model_type` is \"mamba2\"; supported: \"llama\""));
    assert_eq!(bed.requests("model.safetensors"), 0, "not fetched, as it cannot be used");
    let mut bed = HubFixture::new("lines", FakeHub::model());
    assert!(bed.refused("org/another").contains("check the name"));
    // A file system that is full.
    let blobs = bed.folder().join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    std::os::unix::fs::symlink("/dev/full", blobs.join(format!("{}.part", sha256(&weights())))).unwrap();
    let said = bed.refused("org/name");
    assert!(said.contains("No space left on device") && said.contains("make room in "), "{said}");
    bed.hub.endpoint = "http://127.0.0.1:1".into();
    assert!(bed.refused("org/name").contains("check the network, or name a mirror in HF_ENDPOINT"));
}
