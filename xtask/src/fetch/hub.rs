//! Models of the Hugging Face hub, `org/name[:file]`, in the user's own cache of it, where the program and other
//! programs find them. An endpoint is not trusted: what it names becomes no path, and files are checked.

mod choice;
mod client;
#[cfg(test)]
mod tests;

use super::cache;
use crate::error::{Error, Result};
use crate::sh;
use choice::{Wanted, Weights, is_plain, shards};
use client::{Answer, Ask, Client, Failure, LINKED_ETAG, Outcome};
use files::atomic_file;
use files::config::ModelConfig;
use files::folder::TEXT_FILES;
use files::source::gguf::Gguf;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::{self, OpenOptions};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where models come from and go to.
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    client: Client,
}

/// A model that is in the cache.
#[derive(Debug)]
pub struct Fetched {
    /// What `ANTIGRAVITY_MODEL` is to be: the model's folder in the cache, or a GGUF file there.
    pub path: PathBuf,
    /// For a base model, a line that says so and names one for chats.
    pub base: Option<String>,
}

/// One version of a model.
struct Version {
    /// Of its files, without their names.
    url: String,
    blobs: PathBuf,
    snapshot: PathBuf,
}

/// How often a download that is cut off goes on.
const RETRIES: usize = 3;
/// Seconds.
const PATIENCE: u32 = 30;
/// Bytes of the list of files.
const MOST_LIST: u64 = 8 << 20;
/// Bytes of a file that is read as a whole, or whose length nobody says.
const MOST_TEXT: u64 = 64 << 20;

impl Hub {
    /// As the variables say that Hugging Face's own tools read.
    pub fn of_user() -> Result<Hub> {
        if !sh::on_path("curl") {
            let remedy = "sudo apt-get install curl, or add it to PATH";
            return Err(Error::Failed(format!("curl is missing, which brings models of the hub: {remedy}")));
        }
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let homeless = || Error::Failed("there is no home to keep models in: set HF_HOME to a folder".into());
        let token_file = set("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| Some(files::hub::home()?.join("token")));
        let saved = || fs::read_to_string(token_file?).ok();
        let token = set("HF_TOKEN").or_else(saved).map(|token| token.trim().to_string());
        let token = token.filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            let why =
                "HF_TOKEN, or the token of `hf auth login`, has characters that no token has; set it again";
            return Err(Error::Failed(why.into()));
        }
        Ok(Hub {
            endpoint: set("HF_ENDPOINT")
                .unwrap_or("https://huggingface.co".into())
                .trim_end_matches('/')
                .into(),
            cache: files::hub::cache().ok_or_else(homeless)?,
            client: Client { token, patience: PATIENCE },
        })
    }

    /// Fetches what is not there yet.
    pub fn fetch(&self, name: &str) -> Result<Fetched> {
        let wanted = Wanted::parse(name)?;
        let repo = &wanted.repo;
        let refused = |failure| self.refused(repo, failure);
        let folder = format!("models--{}", repo.replace('/', "--"));
        let (commit, names) = self.list_files(repo).map_err(refused)?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let weights = wanted.weights(&names)?;
        let lock = self.cache.join(".locks").join(&folder);
        fs::create_dir_all(&lock).map_err(|e| Error::at(&lock, e))?;
        let _locked = cache::lock_file(&lock.join("fetch.lock")).map_err(|e| Error::at(&lock, e))?;
        let folder = self.cache.join(folder);
        let version = Version {
            // Not by the name of a branch: all files are of one commit.
            url: format!("{}/{repo}/resolve/{commit}", self.endpoint),
            blobs: folder.join("blobs"),
            snapshot: folder.join("snapshots").join(&commit),
        };
        let get = |file: &str, most| self.get(&version, file, most).map_err(refused);
        let mut base = None;
        if !matches!(weights, Weights::Gguf(_)) {
            for file in TEXT_FILES.iter().filter(|file| names.contains(file)) {
                get(file, MOST_TEXT)?;
            }
            check_supported(&version.snapshot.join("config.json"))?;
            base = self.describe_base(repo, has_template(&version.snapshot));
        }
        if let Some(base) = &base {
            // Before gigabytes come that another model is meant by.
            eprintln!("{base}");
        }
        let path = match weights {
            Weights::Gguf(file) => get(file, u64::MAX)?,
            Weights::Whole(file) => get(file, u64::MAX).map(|_| folder.clone())?,
            Weights::Sharded(index) => {
                for shard in shards(&get(index, MOST_TEXT)?)? {
                    get(&shard, u64::MAX)?;
                }
                folder.clone()
            }
        };
        if path.is_file() {
            let gguf = Gguf::open(&path).and_then(|gguf| gguf.config().map(|_| gguf));
            let gguf = gguf.map_err(|e| Error::Failed(e.to_string()))?;
            base = self.describe_base(repo, gguf.metadata().get("tokenizer.chat_template").is_some());
        }
        let main = folder.join("refs/main");
        fs::create_dir_all(folder.join("refs"))
            .and_then(|()| atomic_file::write(&main, commit.as_bytes()))
            .map_err(|e| Error::at(&main, e))?;
        Ok(Fetched { path, base })
    }

    /// The commit that is the newest, and the names of its files.
    fn list_files(&self, repo: &str) -> Outcome<(String, Vec<String>)> {
        let answer = self.ask_about(repo)?;
        let mut text = Vec::new();
        answer.body(MOST_LIST, |piece| text.write_all(piece))?;
        let value: Value = serde_json::from_slice(&text)
            .map_err(|e| Failure::Lie(format!("its list of files is no JSON: {e}")))?;
        let commit = parse_hash("its commit", value["sha"].as_str().unwrap_or_default())?;
        let files = value["siblings"].as_array().ok_or(Failure::Lie("it lists no files".into()))?;
        let names = files.iter().filter_map(|file| file["rfilename"].as_str());
        Ok((commit, names.filter(|name| is_plain(name)).map(String::from).collect()))
    }

    fn ask_about(&self, repo: &str) -> Outcome<Answer> {
        let url = format!("{}/api/models/{repo}/revision/main", self.endpoint);
        let answer = self.client.ask(&url, Ask::From(0))?;
        if answer.status == 200 { Ok(answer) } else { Err(Failure::Status(answer.status)) }
    }

    /// One file of at most this many bytes, checked, unless the cache has it.
    fn get(&self, version: &Version, file: &str, most: u64) -> Outcome<PathBuf> {
        let path = version.snapshot.join(file);
        if path.exists() {
            return Ok(path);
        }
        eprintln!("{file}");
        let url = format!("{}/{}", version.url, encode_path(file));
        let answer = self.client.ask(&url, Ask::Head)?;
        let linked = answer.header(LINKED_ETAG);
        if linked.is_none() && answer.status != 200 {
            return Err(Failure::Status(answer.status));
        }
        let etag = linked.or(answer.header("etag")).unwrap_or_default();
        let etag = parse_hash(&format!("{file}: its ETag"), etag.trim_start_matches("W/").trim_matches('"'))?;
        // That of a redirect is not the file's.
        let own = || answer.header("content-length").filter(|_| answer.status == 200);
        let size: Option<u64> =
            answer.header("x-linked-size").or_else(own).and_then(|size| size.parse().ok());
        if let Some(size) = size.filter(|size| *size > most) {
            return Err(Failure::Lie(format!("{file}: {size} bytes, where {most} are the most")));
        }
        drop(answer);
        let blob = version.blobs.join(&etag);
        if !blob.exists() {
            fs::create_dir_all(&version.blobs).map_err(Failure::Disk)?;
            let part = version.blobs.join(format!("{etag}.part"));
            let came = self.download(&url, &part, size).and_then(|()| check_hash(file, &part, &etag));
            if matches!(came, Err(Failure::Lie(_) | Failure::Disk(_))) {
                // It is of no use, and takes room that may be lacking.
                let _ = fs::remove_file(&part);
            }
            came?;
            fs::rename(&part, &blob).map_err(Failure::Disk)?;
        }
        link_blob(&path, &format!("{}blobs/{etag}", "../".repeat(file.split('/').count() + 1)))
            .map_err(Failure::Disk)?;
        Ok(path)
    }

    /// A whole file, of which a part may have come before.
    fn download(&self, url: &str, part: &Path, size: Option<u64>) -> Outcome<()> {
        let mut retries = RETRIES;
        loop {
            match self.resume_download(url, part, size) {
                Err(Failure::Connection(_)) if retries > 0 => retries -= 1,
                ended => return ended,
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    fn resume_download(&self, url: &str, part: &Path, size: Option<u64>) -> Outcome<()> {
        let most = size.unwrap_or(MOST_TEXT);
        let there = fs::metadata(part).map_or(0, |meta| meta.len());
        let mut at = if there < most && size.is_some() { there } else { 0 };
        if size == Some(there) && part.exists() {
            return Ok(());
        }
        let answer = self.client.ask(url, Ask::From(at))?;
        match answer.status {
            206 if parse_first_byte(&answer) == Some(at) => {}
            200 => at = 0,
            206 => return Err(Failure::Lie("another part of the file comes than was asked for".into())),
            status => return Err(Failure::Status(status)),
        }
        let mut out = OpenOptions::new().append(true).create(true).open(part).map_err(Failure::Disk)?;
        if at != there {
            out.set_len(at).map_err(Failure::Disk)?;
        }
        let bar = std::io::stderr().is_terminal();
        let (from, mut shown) = (at, 0);
        let came = answer.body(most - from, |piece| {
            out.write_all(piece)?;
            at += piece.len() as u64;
            if bar && at >> 20 != shown {
                shown = at >> 20;
                eprint!("\r{shown} of {} MiB ", most >> 20);
            }
            Ok(())
        });
        if shown > 0 {
            eprintln!();
        }
        came?;
        match size {
            Some(size) if at < size => {
                Err(Failure::Connection(format!("it ended after {at} of {size} bytes")))
            }
            _ => Ok(()),
        }
    }

    /// For a model without a template: the line about it, with a sibling of it that the hub has.
    fn describe_base(&self, repo: &str, has_template: bool) -> Option<String> {
        let siblings = if has_template { return None } else { choice::guess_siblings(repo)? };
        let mut asked = siblings.iter().map(|name| (name, self.ask_about(name)));
        // Who does not answer is not asked again.
        let there = asked.find(|(_, answer)| !matches!(answer, Err(Failure::Status(_))));
        let there = there.and_then(|(name, answer)| answer.is_ok().then_some(name));
        let instead = there.map_or("a model whose name ends in -Instruct or -it".into(), |name| {
            format!("cargo xtask fetch {name}")
        });
        Some(format!(
            "{repo} is a base model: it has no chat template and goes on with texts; for a chat: {instead}"
        ))
    }

    /// Why the hub does not give it, and what to do.
    fn refused(&self, repo: &str, failure: Failure) -> Error {
        let endpoint = &self.endpoint;
        let network = "check the network, or name a mirror in HF_ENDPOINT";
        let (why, remedy) = match failure {
            Failure::Status(status) => {
                let remedy = match status {
                    404 => "check the name".into(),
                    401 | 403 => format!(
                        "check the name; accept its terms at {endpoint}/{repo} and set HF_TOKEN, or `hf auth login`"
                    ),
                    _ => "try later, or name a mirror in HF_ENDPOINT".into(),
                };
                (format!("it answers with status {status}"), remedy)
            }
            Failure::Connection(why) => {
                (why, format!("{network}; what has come stays, and it goes on there"))
            }
            Failure::Lie(why) => (why, "try again, or name another mirror in HF_ENDPOINT".into()),
            Failure::Disk(e) => {
                let full = e.kind() == std::io::ErrorKind::StorageFull;
                let what = if full { "make room in" } else { "make sure that files can be written in" };
                (e.to_string(), format!("{what} {}, or set HF_HOME", self.cache.display()))
            }
        };
        Error::Failed(format!("{repo} cannot be fetched from {endpoint}: {}; {remedy}", sh::one_line(&why)))
    }
}

/// Before gigabytes come that no program can be built for.
fn check_supported(config: &Path) -> Result<()> {
    let text = fs::read_to_string(config).map_err(|e| Error::at(config, e))?;
    ModelConfig::parse(&text).map(|_| ()).map_err(|e| Error::at(config, e))
}

fn has_template(snapshot: &Path) -> bool {
    let settings = fs::read(snapshot.join("tokenizer_config.json")).unwrap_or_default();
    let settings: Value = serde_json::from_slice(&settings).unwrap_or_default();
    !settings["chat_template"].is_null() || snapshot.join("chat_template.jinja").exists()
}

/// A name of blobs and commits, which becomes part of a path.
fn parse_hash(of: &str, text: &str) -> Outcome<String> {
    if (32..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(Failure::Lie(format!("{of} is `{}`, which is no hash", sh::one_line(text))))
}

/// The first byte of the part that an answer brings.
fn parse_first_byte(answer: &Answer) -> Option<u64> {
    let range = answer.header("content-range")?.strip_prefix("bytes ")?;
    range.split('-').next()?.trim().parse().ok()
}

/// A file's name as part of an address.
fn encode_path(name: &str) -> String {
    let byte = |b: u8| match b {
        b if b.is_ascii_alphanumeric() || b"-._~/".contains(&b) => char::from(b).to_string(),
        b => format!("%{b:02X}"),
    };
    name.bytes().map(byte).collect()
}

fn link_blob(path: &Path, target: &str) -> std::io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    if path.symlink_metadata().is_ok() {
        // It leads nowhere.
        fs::remove_file(path)?;
    }
    std::os::unix::fs::symlink(target, path)
}

/// Large files are named by their SHA-256.
fn check_hash(file: &str, part: &Path, etag: &str) -> Outcome<()> {
    if etag.len() != 64 {
        return Ok(());
    }
    let mut hash = Sha256::new();
    let read = cache::pieces(part, |piece| {
        hash.update(piece);
        Ok(())
    });
    read.map_err(|e| Failure::Disk(std::io::Error::other(e.to_string())))?;
    let found = cache::hex(hash);
    if found == etag { Ok(()) } else { Err(Failure::Lie(format!("{file}: has SHA-256 {found}, not {etag}"))) }
}
