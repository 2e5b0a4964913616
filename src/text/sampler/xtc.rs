//! XTC, "exclude top choices": sometimes the most obvious tokens are left out (p-e-w, pull request 6335 of
//! text-generation-webui).

use super::rank::Ranked;

/// How many of `best` (most probable first) are excluded: of those at least as probable as `threshold`, all but the
/// last. Tokens without a probability are no choices.
pub(super) fn excluded(best: &[Ranked], threshold: f32) -> usize {
    best.partition_point(|r| r.1 >= threshold && r.1 > 0.0).saturating_sub(1)
}
