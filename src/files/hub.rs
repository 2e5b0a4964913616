//! Folders of the Hugging Face cache: `models--org--name` holds every downloaded version of a model under `snapshots`.

use std::env::var_os;
use std::fs;
use std::path::{Path, PathBuf};

/// Where `hf download` keeps models; `None` without a home.
pub fn cache() -> Option<PathBuf> {
    set("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// Where `hf auth login` leaves the token, too.
pub fn home() -> Option<PathBuf> {
    set("HF_HOME")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(set("HOME")?.join(".cache/huggingface")))
}

fn set(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The files of a model in the Hugging Face cache: for a folder `models--org--name`, the snapshot that `refs/main`
/// names, else the only one; any other path is returned as it is.
pub fn snapshot(path: &Path) -> PathBuf {
    let snapshots = path.join("snapshots");
    let commit = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    // A name, not a way out of the folder.
    let commit =
        Some(commit.trim()).filter(|c| !c.is_empty() && c.bytes().all(|b| b.is_ascii_alphanumeric()));
    if let Some(main) = commit.map(|c| snapshots.join(c)).filter(|dir| dir.is_dir()) {
        return main;
    }
    let mut all = fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|e| e.path());
    match (all.next(), all.next()) {
        (Some(only), None) if only.is_dir() => only,
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_the_cache_is_its_snapshot() {
        let dir = std::env::temp_dir().join(format!("antigravity-hub-{}", std::process::id()));
        let model = dir.join("models--org--name");
        let (old, new) = (model.join("snapshots/0a"), model.join("snapshots/1b"));
        fs::create_dir_all(&old).unwrap();
        assert_eq!(snapshot(&model), old, "the only one");
        fs::create_dir_all(&new).unwrap();
        assert_eq!(snapshot(&model), model, "nothing says which");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "1b\n").unwrap();
        assert_eq!(snapshot(&model), new);
        fs::write(model.join("refs/main"), "../../..").unwrap();
        assert_eq!(snapshot(&model), model, "no way out of the folder");
        assert_eq!(snapshot(&new), new, "a snapshot itself");
        fs::remove_dir_all(&dir).unwrap();
    }
}
