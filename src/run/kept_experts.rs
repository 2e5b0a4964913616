//! Experts that stay in memory: how often tokens chose each one, saved at the end of every run, and the most used ones,
//! whose pages are locked.

use super::options::{BackendKind, EngineOptions, Notice};
use super::plan::format_mib;
use super::split::{SplitStage, StageDevice};
use super::state_file::StateFile;
use crate::dims::{EXPERT_LAYERS, EXPERTS, HAS_EXPERTS};
use crate::model::weights::{WeightType, Weights};
use files::mapped::MappedSlice;
use files::{Error, Result};
use rustix::process::{Resource, getrlimit};
use std::cmp::Reverse;
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Version of the counts in the file.
const REVISION: &str = "1";

/// Bytes of experts that are kept in memory, and of all that are mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptBytes {
    /// The part whose pages are locked.
    pub kept: u64,
    /// All.
    pub all: u64,
}

/// The file of the counts of some weights: `[layer with experts][expert]`
struct CountsFile(StateFile);

impl CountsFile {
    fn new(fingerprint: &str, weight_type: WeightType) -> Option<Self> {
        StateFile::new("experts", fingerprint, weight_type, REVISION).map(Self)
    }

    fn read(&self) -> io::Result<Vec<u64>> {
        let experts = EXPERT_LAYERS.iter().filter(|has_experts| **has_experts).count() * EXPERTS.count;
        let bytes = self.0.read(8 * experts)?;
        Ok(bytes.as_chunks().0.iter().map(|count| u64::from_le_bytes(*count)).collect())
    }

    /// Adds counts to those of the file.
    fn add(&self, counts: &[u64]) -> io::Result<()> {
        let before = self.read().unwrap_or_else(|_| vec![0; counts.len()]);
        let sums = before.iter().zip(counts).map(|(before, count)| before.saturating_add(*count));
        self.0.write(&sums.flat_map(u64::to_le_bytes).collect::<Vec<u8>>())
    }
}

/// Counts the uses of experts and keeps the most used ones in memory.
pub struct ExpertKeeper {
    weights: Arc<Weights>,
    file: Option<CountsFile>,
    notice: Option<Notice>,
    kept: Option<KeptBytes>,
}

/// Checks the options.
///
/// # Errors
///
/// `Usage` for experts to be kept of a model without any.
pub fn check_options(o: &EngineOptions) -> Result<()> {
    if o.keep_experts > 0 && !HAS_EXPERTS {
        let why = "`EngineOptions::keep_experts`: this model has no experts; leave it out";
        return Err(Error::Usage(why.into()));
    }
    Ok(())
}

/// Bytes of experts that a run with these options may keep; 0 without counts of an earlier run.
pub fn planned_bytes(o: &EngineOptions, fingerprint: &str) -> u64 {
    let is_wanted = o.keep_experts > 0 && (0..EXPERT_LAYERS.len()).any(|layer| is_on_cpu(o, layer));
    let file = CountsFile::new(fingerprint, o.weight_type).filter(|_| is_wanted);
    file.and_then(|file| file.read().ok()).map_or(0, |_| o.keep_experts)
}

/// True if the CPU computes the experts of a layer, at least at times.
fn is_on_cpu(o: &EngineOptions, layer: usize) -> bool {
    let stage = o.split_stages().iter().find(|stage| stage.layers.contains(&layer));
    let has_experts = |stage: &SplitStage| stage.experts_on_cpu || stage.device == StageDevice::Cpu;
    stage.map_or(o.backend != BackendKind::OpenCl, has_experts)
}

impl ExpertKeeper {
    /// Begins to count, and locks the pages of the experts that earlier runs used most. What is not as asked for is
    /// reported.
    pub fn new(weights: &Arc<Weights>, o: &EngineOptions) -> Self {
        // What was computed while loading is no text.
        weights.take_expert_uses();
        let file = CountsFile::new(&weights.fingerprint, weights.weight_type);
        let notice = (o.keep_experts > 0).then(|| o.notice.clone());
        let mut keeper = Self { weights: Arc::clone(weights), file, notice, kept: None };
        if let Some(notice) = &keeper.notice {
            match keeper.lock_most_used(o) {
                Ok(kept) => keeper.kept = Some(kept),
                Err(why) => notice.warn(&format!("`EngineOptions::keep_experts`: {why}")),
            }
        }
        keeper
    }

    /// Locks the most used experts, as many as may be kept.
    fn lock_most_used(&self, o: &EngineOptions) -> std::result::Result<KeptBytes, String> {
        let Some(file) = &self.file else {
            return Err("no experts are kept: there is no home folder with counts of earlier runs".into());
        };
        let counts = file.read().map_err(|e| match e.kind() {
            ErrorKind::NotFound => "no experts are kept in this run: it is the first one that counts".into(),
            _ => format!(
                "{}: {e}; no experts are kept in this run, and it counts anew",
                file.0.path().display()
            ),
        })?;
        let experts: Vec<_> = self.weights.expert_planes().collect();
        let all = experts.iter().map(|(_, planes)| mapped_bytes(planes)).sum();
        if all == 0 {
            return Err("no experts are kept: none is mapped from a file; use antigravity pack".into());
        }
        let mut locked = 0;
        let ranked = rank_experts(&counts).into_iter().map(|i| &experts[i]);
        let chosen: Vec<&MappedSlice> = ranked
            .filter(|(layer, _)| is_on_cpu(o, *layer))
            .take_while(|(_, planes)| {
                locked += lockable_bytes(planes);
                locked <= o.keep_experts
            })
            .flat_map(|(_, planes)| planes)
            .collect();
        lock_all(&chosen)?;
        Ok(KeptBytes { kept: mapped_bytes(chosen), all })
    }

    /// Bytes of the experts that are kept, if any were asked for and could be.
    pub fn kept_bytes(&self) -> Option<KeptBytes> {
        self.kept
    }

    /// From now on, saves no counts.
    pub fn discard_counts(&mut self) {
        self.file = None;
    }

    /// Adds the counts since the last call to the file.
    pub fn save_counts(&self) {
        let counts = self.weights.take_expert_uses();
        let Some(file) = self.file.as_ref().filter(|_| counts.iter().any(|count| *count > 0)) else { return };
        if let (Err(e), Some(notice)) = (file.add(&counts), &self.notice) {
            notice.warn(&format!("{}: {e}; the uses of experts are not saved", file.0.path().display()));
        }
    }
}

impl Drop for ExpertKeeper {
    fn drop(&mut self) {
        self.save_counts();
    }
}

/// The experts in descending order of their counts; of equal ones, those of lower layers first, then of lower index.
fn rank_experts(counts: &[u64]) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..counts.len()).collect();
    ranked.sort_by_key(|&i| Reverse(counts[i]));
    ranked
}

/// Bytes of the planes that are mapped from a file.
fn mapped_bytes<'a>(planes: impl IntoIterator<Item = &'a MappedSlice>) -> u64 {
    let mapped = planes.into_iter().filter(|plane| plane.lockable_bytes() > 0);
    mapped.map(|plane| plane.bytes().len() as u64).sum()
}

/// Bytes of their pages, which are more.
fn lockable_bytes<'a>(planes: impl IntoIterator<Item = &'a MappedSlice>) -> u64 {
    planes.into_iter().map(|plane| plane.lockable_bytes() as u64).sum()
}

/// Locks all pages or, if the system refuses some, none.
fn lock_all(planes: &[&MappedSlice]) -> std::result::Result<(), String> {
    planes.iter().take(1).for_each(|plane| plane.drop_file_cache());
    planes.iter().try_for_each(|plane| plane.lock_pages()).map_err(|e| {
        planes.iter().for_each(|plane| plane.unlock_pages());
        let limit = getrlimit(Resource::Memlock).current.map_or("unlimited".into(), format_mib);
        let bytes = lockable_bytes(planes.iter().copied());
        format!(
            "no experts are kept: {} cannot be locked ({e}); RLIMIT_MEMLOCK is {limit}, raise it with ulimit -l",
            format_mib(bytes)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_ranked_by_count_then_layer_then_index() {
        assert_eq!(rank_experts(&[0, 7, 3, 7, 0, 9]), [5, 1, 3, 2, 0, 4]);
        assert_eq!(rank_experts(&[0; 40]), (0..40).collect::<Vec<_>>());
    }

    #[test]
    fn experts_of_a_model_without_any_cannot_be_kept() {
        let options = |keep_experts| EngineOptions { keep_experts, ..EngineOptions::new("none") };
        assert_eq!(check_options(&options(1)).is_err(), !HAS_EXPERTS);
        assert_eq!(check_options(&options(0)), Ok(()));
    }
}
