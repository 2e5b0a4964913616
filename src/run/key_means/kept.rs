//! The means of one model in the folder of the user's state: a line that names them, their bytes, a checksum.

use crate::dims;
use crate::model::trace::digest;
use crate::model::weights::{KeyMeans, Weights};
use files::atomic_file;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the checksum.
const SUM: usize = 8;

/// A place for the means of some weights.
pub(super) struct Kept {
    path: PathBuf,
    /// All that the means depend on.
    name: String,
}

impl Kept {
    /// In `dir`; one file a model and weight type, whatever became of its weights.
    pub fn new(dir: &Path, weights: &Weights, tokens: &[u32]) -> Self {
        let tokens: Vec<f32> = tokens.iter().map(|&id| f32::from_bits(id)).collect();
        let Weights { fingerprint, weight_type, .. } = weights;
        let name = format!(
            "antigravity key means {} {fingerprint} {weight_type} {:016x}\n",
            KeyMeans::REVISION,
            digest(&tokens)
        );
        Self { path: dir.join(format!("{}-{weight_type}.keymeans", dims::MODEL)), name }
    }

    /// The means, if they are there and whole.
    pub fn read(&self) -> Option<KeyMeans> {
        let want = self.name.len() + KeyMeans::BYTES + SUM;
        let meta = fs::metadata(&self.path).ok()?;
        if !meta.is_file() || meta.len() != want as u64 {
            return None;
        }
        let mut bytes = Vec::with_capacity(want);
        File::open(&self.path).ok()?.take(want as u64).read_to_end(&mut bytes).ok()?;
        let rest = bytes.strip_prefix(self.name.as_bytes())?;
        let (means, sum) = rest.split_at_checked(KeyMeans::BYTES)?;
        let means = KeyMeans::from_bytes(means)?;
        (sum == Self::sum(&means)).then_some(means)
    }

    /// Keeps them, in place of what is there.
    pub fn write(&self, means: &KeyMeans) -> io::Result<()> {
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        let bytes = [self.name.as_bytes(), &means.to_bytes(), &Self::sum(means)].concat();
        atomic_file::write(&self.path, &bytes)
    }

    fn sum(means: &KeyMeans) -> [u8; SUM] {
        means.checksum().to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_other_weights_are_not_taken() {
        let dir = std::env::temp_dir().join(format!("antigravity-kept-{}", std::process::id()));
        let kept = |name: &str| Kept { path: dir.join("model.keymeans"), name: format!("{name}\n") };
        let floats = (0..KeyMeans::BYTES / 4).map(|i| i as f32 - 7.5).collect();
        let means = KeyMeans::new(floats);
        assert!(kept("a").read().is_none());
        kept("a").write(&means).expect("written");
        assert_eq!(kept("a").read(), Some(means.clone()));
        assert!(kept("b").read().is_none() && kept("longer").read().is_none());
        kept("b").write(&means).expect("written");
        assert!(kept("b").read().is_some() && kept("a").read().is_none());
        // Right length and sum, but no numbers.
        let nan = [f32::NAN; KeyMeans::BYTES / 4];
        let sum = digest(&nan).to_le_bytes();
        let bytes: Vec<u8> = nan.iter().flat_map(|x| x.to_le_bytes()).collect();
        fs::write(&kept("b").path, [&b"b\n"[..], &bytes, &sum].concat()).expect("written");
        assert!(kept("b").read().is_none());
        let _ = fs::remove_dir_all(dir);
    }
}
