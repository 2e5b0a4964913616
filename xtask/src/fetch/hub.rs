//! Models of the Hugging Face hub, `org/name[:file]`, in the user's own cache of it, where the program and other
//! programs find them. Only in builds with the feature `hub`.

mod choice;
#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use crate::sh;
use choice::{Wanted, Weights, shards};
use files::config::ModelConfig;
use files::folder::TEXT_FILES;
use files::source::gguf::Gguf;
use hf_hub::Cache;
use hf_hub::api::sync::{ApiBuilder, ApiRepo};
use sha2::{Digest, Sha256};
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};

/// Where models come from and go to.
pub struct Hub {
    endpoint: String,
    cache: PathBuf,
    token: Option<String>,
}

/// How often a download that is cut off goes on.
const RETRIES: usize = 3;

impl Hub {
    /// As the variables say that Hugging Face's own tools read.
    pub fn of_user() -> Result<Hub> {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let homeless = || Error::Failed("there is no home to keep models in: set HF_HOME to a folder".into());
        let token_file = set("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| Some(files::hub::home()?.join("token")));
        let saved = || fs::read_to_string(token_file?).ok();
        let token = set("HF_TOKEN").or_else(saved).map(|token| token.trim().to_string());
        Ok(Hub {
            endpoint: set("HF_ENDPOINT")
                .unwrap_or("https://huggingface.co".into())
                .trim_end_matches('/')
                .into(),
            cache: files::hub::cache().ok_or_else(homeless)?,
            token: token.filter(|token| !token.is_empty()),
        })
    }

    /// Fetches what is not there yet, and returns what `ANTIGRAVITY_MODEL` is to be: the model's folder in the cache, or
    /// a GGUF file there.
    pub fn fetch(&self, name: &str) -> Result<PathBuf> {
        let wanted = Wanted::parse(name)?;
        let cache = Cache::new(self.cache.clone());
        let api = ApiBuilder::from_cache(cache.clone()).with_endpoint(self.endpoint.clone());
        let api = api.with_token(self.token.clone()).with_retries(RETRIES).build();
        let refused = |e: hf_hub::api::sync::ApiError| self.refused(&wanted, &e.to_string());
        let repo = api.map_err(refused)?.model(wanted.repo.clone());
        let info = repo.info().map_err(refused)?;
        let cached = cache.model(wanted.repo.clone());
        let snapshot = cached.pointer_path(&info.sha);
        let get = |file: &str| self.get(&wanted, &repo, &snapshot, file);
        let names: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
        let weights = wanted.weights(&names)?;
        if !matches!(weights, Weights::Gguf(_)) {
            for file in TEXT_FILES.iter().filter(|file| names.contains(file)) {
                get(file)?;
            }
            supported(&snapshot.join("config.json"))?;
        }
        let model = match weights {
            Weights::Gguf(file) => get(file)?,
            Weights::Whole(file) => get(file).map(|_| folder(&snapshot))?,
            Weights::Sharded(index) => {
                for shard in shards(&get(index)?)? {
                    get(&shard)?;
                }
                folder(&snapshot)
            }
        };
        if model.is_file() {
            Gguf::open(&model).and_then(|gguf| gguf.config()).map_err(|e| Error::Failed(e.to_string()))?;
        }
        cached.create_ref(&info.sha).map_err(|e| Error::at(&folder(&snapshot), e))?;
        Ok(model)
    }

    /// One file, checked, unless the cache has it.
    fn get(&self, wanted: &Wanted, repo: &ApiRepo, snapshot: &Path, file: &str) -> Result<PathBuf> {
        let path = snapshot.join(file);
        if path.exists() {
            return Ok(path);
        }
        if !std::io::stderr().is_terminal() {
            // Where there is one, a bar says it.
            eprintln!("{file}");
        }
        let path = repo.download(file).map_err(|e| {
            let why = e.to_string();
            if why.contains(FULL) {
                remove_parts(&folder(snapshot).join("blobs"));
            }
            self.refused(wanted, &why)
        })?;
        check(&path)?;
        Ok(path)
    }

    /// Why the hub does not give it, and what to do.
    fn refused(&self, wanted: &Wanted, why: &str) -> Error {
        let (repo, endpoint) = (&wanted.repo, &self.endpoint);
        let remedy = match why {
            _ if why.contains("status: 404") => "check the name".into(),
            _ if why.contains("status: 401") || why.contains("status: 403") => {
                format!("check the name; accept its terms at {endpoint}/{repo} and set HF_TOKEN, or `hf auth login`")
            }
            _ if why.contains(FULL) => format!("make room in {}, or set HF_HOME", self.cache.display()),
            _ => "check the network, or name a mirror in HF_ENDPOINT; what has come stays, and it goes on there".into(),
        };
        Error::Failed(format!("{repo} cannot be fetched from {endpoint}: {}; {remedy}", sh::one_line(why)))
    }
}

const FULL: &str = "No space left";

/// `models--org--name`, from the folder of one version.
fn folder(snapshot: &Path) -> PathBuf {
    snapshot.parent().and_then(Path::parent).unwrap_or(snapshot).into()
}

/// Before gigabytes come that no program can be built for.
fn supported(config: &Path) -> Result<()> {
    let text = fs::read_to_string(config).map_err(|e| Error::at(config, e))?;
    ModelConfig::parse(&text).map(|_| ()).map_err(|e| Error::at(config, e))
}

/// What has come of large files is of no use and takes the room that is lacking.
fn remove_parts(blobs: &Path) {
    for entry in fs::read_dir(blobs).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|e| e == "part") {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The cache names large files by their SHA-256. One that has another is removed.
fn check(path: &Path) -> Result<()> {
    let blob = fs::canonicalize(path).map_err(|e| Error::at(path, e))?;
    let name = blob.file_name().unwrap_or_default().to_string_lossy();
    if name.len() != 64 || !name.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut hash = Sha256::new();
    super::cache::pieces(&blob, |piece| {
        hash.update(piece);
        Ok(())
    })?;
    let found = super::cache::hex(hash);
    if found == name {
        return Ok(());
    }
    let removed = fs::remove_file(path).and_then(|()| fs::remove_file(&blob));
    let kept = removed.err().map_or(String::new(), |e| format!(", and cannot be removed: {e}"));
    Err(Error::at(path, format!("has SHA-256 {found}, not {name}{kept}; try again")))
}
