//! The cached calibration of one model in the user's state directory: a line that names it, its bytes, a checksum.

use crate::dims;
use crate::model::trace::fnv1a_digest;
use crate::model::weights::{Calibration, Weights};
use files::atomic_file;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Bytes of the checksum.
const SUM: usize = 8;

/// File for the calibration of some weights.
pub(super) struct CalibrationFile {
    path: PathBuf,
    /// First line: everything that the calibration depends on.
    name: String,
}

impl CalibrationFile {
    /// The file in `dir`: one per model and weight type, replaced when the weights change.
    pub fn new(dir: &Path, weights: &Weights, tokens: &[u32]) -> Self {
        let tokens: Vec<f32> = tokens.iter().map(|&id| f32::from_bits(id)).collect();
        let Weights { fingerprint, weight_type, .. } = weights;
        let name = format!(
            "antigravity calibration {} {fingerprint} {weight_type} {:016x}\n",
            Calibration::REVISION,
            fnv1a_digest(&tokens)
        );
        Self { path: dir.join(format!("{}-{weight_type}.calibration", dims::MODEL)), name }
    }

    /// Reads the calibration, if it is there, intact and of these weights.
    pub fn read(&self) -> Option<Calibration> {
        let want = self.name.len() + Calibration::FILE_BYTES + SUM;
        let meta = fs::metadata(&self.path).ok()?;
        if !meta.is_file() || meta.len() != want as u64 {
            return None;
        }
        let mut bytes = Vec::with_capacity(want);
        File::open(&self.path).ok()?.take(want as u64).read_to_end(&mut bytes).ok()?;
        let rest = bytes.strip_prefix(self.name.as_bytes())?;
        let (calibration, sum) = rest.split_at_checked(Calibration::FILE_BYTES)?;
        let calibration = Calibration::from_bytes(calibration)?;
        (sum == Self::checksum_bytes(&calibration)).then_some(calibration)
    }

    /// Writes the calibration, replacing the file.
    pub fn write(&self, calibration: &Calibration) -> io::Result<()> {
        if let Some(dir) = self.path.parent() {
            fs::create_dir_all(dir)?;
        }
        let bytes =
            [self.name.as_bytes(), &calibration.to_bytes(), &Self::checksum_bytes(calibration)].concat();
        atomic_file::write_file(&self.path, &bytes)
    }

    fn checksum_bytes(calibration: &Calibration) -> [u8; SUM] {
        calibration.checksum().to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_of_other_weights_is_ignored() {
        let dir = std::env::temp_dir().join(format!("antigravity-kept-{}", std::process::id()));
        let kept =
            |name: &str| CalibrationFile { path: dir.join("model.calibration"), name: format!("{name}\n") };
        let means: Vec<f32> = (0..Calibration::FILE_BYTES / 8).map(|i| i as f32 - 7.5).collect();
        let ours = Calibration::new(&means, &vec![0.75; means.len()]);
        assert!(kept("a").read().is_none());
        kept("a").write(&ours).expect("written");
        assert_eq!(kept("a").read(), Some(ours.clone()));
        assert!(kept("b").read().is_none() && kept("longer").read().is_none());
        kept("b").write(&ours).expect("written");
        assert!(kept("b").read().is_some() && kept("a").read().is_none());
        // Right length and sum, but no numbers.
        let mut bytes = ours.to_bytes();
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let sum = CalibrationFile::checksum_bytes(&ours);
        fs::write(&kept("b").path, [&b"b\n"[..], &bytes, &sum].concat()).expect("written");
        assert!(kept("b").read().is_none());
        let _ = fs::remove_dir_all(dir);
    }
}
