//! Models of the Hugging Face Hub, `org/name[:file]`, in the user's local cache, which other programs share. The
//! endpoint is not trusted: its names do not become paths, and files are checked.

#[cfg(test)]
mod tests;

use super::cache;
use super::choice::{self, ModelSpec, Weights, is_below_folder, read_shards};
use super::curl::{Client, Failure, Outcome};
use crate::error::{AtPath, Error, Result};
use crate::{build::has_template, command};
use files::atomic_file;
use files::config::ModelConfig;
use files::model_dir::TEXT_FILES;
use files::progress::ProgressLine;
use files::source::gguf::Gguf;
use serde::Deserialize;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An endpoint, and the local cache of models.
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    client: Client,
}

/// A model that is in the cache.
#[derive(Debug)]
pub struct Fetched {
    /// Value for `ANTIGRAVITY_MODEL`: the model's folder in the cache, or a GGUF file there.
    pub path: PathBuf,
    /// For a base model, a line that says so and names a chat model; it has been printed.
    pub base: Option<String>,
}

/// The endpoint's list of a model's files.
#[derive(Deserialize)]
struct Listing {
    #[serde(rename = "sha")]
    commit: String,
    #[serde(rename = "siblings")]
    files: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    size: Option<u64>,
    /// SHA-1 of a small file.
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
}

/// One version of a model in the cache.
struct Snapshot {
    /// URL of the folder of its files.
    url: String,
    files: Vec<Sibling>,
    blobs: PathBuf,
    dir: PathBuf,
}

/// Maximum retries of an interrupted download.
const RETRIES: usize = 3;
/// Maximum bytes of the list of files, and of a text file.
const MAX_LIST: u64 = 8 << 20;
const MAX_TEXT: u64 = 64 << 20;

impl Hub {
    /// The hub and cache in the environment variables of Hugging Face's own tools.
    pub fn of_user() -> Result<Hub> {
        if !command::is_on_path("curl") {
            let remedy = "sudo apt-get install curl, or add it to PATH";
            return Err(Error::Failed(format!("curl, which downloads models, is missing: {remedy}")));
        }
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let homeless =
            || Error::Failed("no home directory to keep models in: set HF_HOME to a folder".into());
        let token_file = set("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| Some(files::hf_cache::home_dir()?.join("token")));
        let saved = || fs::read_to_string(token_file?).ok();
        let token = set("HF_TOKEN").or_else(saved).map(|token| token.trim().to_string());
        let token = token.filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            let why = "HF_TOKEN, or the token of `hf auth login`, has invalid characters; set it again";
            return Err(Error::Failed(why.into()));
        }
        let endpoint = set("HF_ENDPOINT").unwrap_or("https://huggingface.co".into());
        Ok(Hub {
            endpoint: endpoint.trim_end_matches('/').into(),
            cache: files::hf_cache::cache_dir().ok_or_else(homeless)?,
            client: Client { token, timeout: 30 },
        })
    }

    /// Downloads the files of a model that are missing.
    pub fn fetch(&self, name: &str) -> Result<Fetched> {
        let spec = ModelSpec::parse(name)?;
        let repo = &spec.repo;
        let refused = |failure| self.describe(repo, failure);
        let Listing { commit, files } = self.list_files(repo).map_err(refused)?;
        let names: Vec<String> = files.iter().map(|file| file.name.clone()).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let weights = spec.choose_weights(&names)?;
        let folder = format!("models--{}", repo.replace('/', "--"));
        let lock = self.cache.join(".locks").join(&folder);
        fs::create_dir_all(&lock).at(&lock)?;
        let _locked = cache::lock(&lock.join("fetch.lock"))?;
        let folder = self.cache.join(folder);
        let snapshot = Snapshot {
            // The commit and not a branch, so that all files are of one version.
            url: format!("{}/{repo}/resolve/{commit}", self.endpoint),
            files,
            blobs: folder.join("blobs"),
            dir: folder.join("snapshots").join(&commit),
        };
        let get = |file: &str, most| self.get_file(&snapshot, file, most).map_err(refused);
        let mut base = None;
        if !matches!(weights, Weights::Gguf(_)) {
            for file in TEXT_FILES.iter().filter(|file| names.contains(file)) {
                get(file, MAX_TEXT)?;
            }
            check_supported(&snapshot.dir.join("config.json"))?;
            // Told before gigabytes come: the user may have meant another model.
            base = self.describe_base(repo, has_template(&snapshot.dir));
        }
        let path = match weights {
            Weights::Gguf(file) => get(file, u64::MAX)?,
            Weights::Whole(file) => get(file, u64::MAX).map(|_| folder.clone())?,
            Weights::Sharded(index) => {
                for shard in read_shards(&get(index, MAX_TEXT)?)? {
                    get(&shard, u64::MAX)?;
                }
                folder.clone()
            }
        };
        if path.is_file() {
            let config = Gguf::open(&path).and_then(|gguf| gguf.read_config());
            config.map_err(|e| Error::Failed(e.to_string()))?;
            base = self.describe_base(repo, has_template(&path));
        }
        let main = folder.join("refs/main");
        fs::create_dir_all(folder.join("refs"))
            .and_then(|()| atomic_file::write_file(&main, commit.as_bytes()))
            .at(&main)?;
        Ok(Fetched { path, base })
    }

    /// Gets the newest commit and its files with their sizes and hashes.
    fn list_files(&self, repo: &str) -> Outcome<Listing> {
        let url = format!("{}/api/models/{repo}/revision/main?blobs=true", self.endpoint);
        let mut text = Vec::new();
        self.client.get(&url, (0, MAX_LIST), |piece| text.write_all(piece))?;
        let mut listing: Listing = serde_json::from_slice(&text)
            .map_err(|e| Failure::Invalid(format!("its list of files is invalid: {e}")))?;
        check_hash("its commit", &listing.commit)?;
        listing.files.retain(|file| is_below_folder(&file.name));
        Ok(listing)
    }

    /// Downloads and checks one file of at most `most` bytes, unless the cache has it; returns its path.
    fn get_file(&self, snapshot: &Snapshot, file: &str, most: u64) -> Outcome<PathBuf> {
        let path = snapshot.dir.join(file);
        if path.exists() {
            return Ok(path);
        }
        eprintln!("{file}");
        let unlisted =
            || Failure::Invalid(format!("{file}: not in the list of files, or without size and hash"));
        let listed = snapshot.files.iter().find(|listed| listed.name == file).ok_or_else(unlisted)?;
        let sha256 = listed.lfs.as_ref().map(|large| &large.sha256);
        let (hash, size) = sha256.or(listed.blob.as_ref()).zip(listed.size).ok_or_else(unlisted)?;
        check_hash(&format!("{file}: its hash"), hash)?;
        if size > most {
            return Err(Failure::Invalid(format!("{file}: {size} bytes exceed the maximum of {most}")));
        }
        let blob = snapshot.blobs.join(hash);
        if !blob.exists() {
            fs::create_dir_all(&snapshot.blobs).map_err(Failure::Disk)?;
            let part = snapshot.blobs.join(format!("{hash}.part"));
            let url = format!("{}/{}", snapshot.url, encode_path(file));
            let came = self.download(&url, &part, size).and_then(|()| check_content(file, &part, sha256));
            if matches!(came, Err(Failure::Invalid(_) | Failure::Disk(_))) {
                // It is useless, and the disk may be full.
                let _ = fs::remove_file(&part);
            }
            came?;
            fs::rename(&part, &blob).map_err(Failure::Disk)?;
        }
        link_blob(&path, &format!("{}blobs/{hash}", "../".repeat(file.split('/').count() + 1)))
            .map_err(Failure::Disk)?;
        Ok(path)
    }

    /// Downloads the rest of a file, with retries where it is interrupted.
    fn download(&self, url: &str, part: &Path, size: u64) -> Outcome<()> {
        let progress = ProgressLine::new("downloading", "MiB");
        let mut retries = RETRIES;
        loop {
            let mut out = OpenOptions::new().append(true).create(true).open(part).map_err(Failure::Disk)?;
            let mut at = out.metadata().map_err(Failure::Disk)?.len();
            if at == size {
                return Ok(());
            }
            let came = self.client.get(url, (at, size.saturating_sub(at)), |piece| {
                at += piece.len() as u64;
                progress.show_progress((at >> 20) as usize, (size >> 20) as usize);
                out.write_all(piece)
            });
            let came = match came {
                Ok(()) if at < size => {
                    Err(Failure::Connection(format!("it ended after {at} of {size} bytes")))
                }
                came => came,
            };
            match came {
                Err(Failure::NoRange) => fs::write(part, "").map_err(Failure::Disk)?,
                Err(Failure::Connection(_)) if retries > 0 => retries -= 1,
                ended => return ended,
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// The line about a model without a template, which names a chat model that the hub has; it is printed, too.
    fn describe_base(&self, repo: &str, has_template: bool) -> Option<String> {
        let siblings = if has_template { return None } else { choice::guess_siblings(repo)? };
        let mut asked = siblings.iter().map(|name| (name, self.list_files(name)));
        // After a failed connection no other name is tried.
        let there = asked.find(|(_, answer)| !matches!(answer, Err(Failure::Status(_))));
        let there = there.and_then(|(name, answer)| answer.is_ok().then_some(name));
        let instead = there.map_or("a model whose name ends in -Instruct or -it".into(), |name| {
            format!("cargo xtask fetch {name}")
        });
        let line = format!(
            "{repo} is a base model: it has no chat template and only continues texts; for a chat: {instead}"
        );
        eprintln!("{line}");
        Some(line)
    }

    /// The cause of a failure, and its remedy.
    fn describe(&self, repo: &str, failure: Failure) -> Error {
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
            Failure::Connection(why) => (
                why,
                format!("{network}; the part that has come is kept, and the next download continues there"),
            ),
            Failure::NoRange => ("it does not send parts of files".into(), network.into()),
            Failure::Invalid(why) => (why, "try again, or name another mirror in HF_ENDPOINT".into()),
            Failure::Disk(e) => {
                let full = e.kind() == std::io::ErrorKind::StorageFull;
                let what = if full { "make room in" } else { "make sure that files can be written in" };
                (e.to_string(), format!("{what} {}, or set HF_HOME", self.cache.display()))
            }
        };
        let why = command::one_line(&why);
        Error::Failed(format!("{repo} cannot be fetched from {endpoint}: {why}; {remedy}"))
    }
}

/// Refuses a model of an unsupported architecture before gigabytes come.
fn check_supported(config: &Path) -> Result<()> {
    let text = fs::read_to_string(config).at(config)?;
    ModelConfig::parse(&text).map(|_| ()).at(config)
}

/// Refuses the name of a blob or commit, which becomes part of a path, unless it is a hash.
fn check_hash(of: &str, text: &str) -> Outcome<()> {
    if (40..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(Failure::Invalid(format!("{of} is `{}`, which is not a hash", command::one_line(text))))
}

/// Escapes a file name for a URL.
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
        // A dangling link.
        fs::remove_file(path)?;
    }
    std::os::unix::fs::symlink(target, path)
}

fn check_content(file: &str, part: &Path, sha256: Option<&String>) -> Outcome<()> {
    let Some(sha256) = sha256 else { return Ok(()) };
    let found = cache::hash_file(part).map_err(|e| Failure::Disk(std::io::Error::other(e.to_string())))?;
    if found == *sha256 {
        return Ok(());
    }
    Err(Failure::Invalid(format!("{file}: has SHA-256 {found}, not {sha256}")))
}
