//! Changes to the logits of single tokens: bias, and penalties on recent tokens.

/// Adds to the logits of some tokens. Ids beyond the vocabulary are ignored.
pub(super) fn add_bias(logits: &mut [f32], bias: &[(u32, f32)]) {
    for &(id, more) in bias {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += more;
        }
    }
}

/// The last `window` entries of `recent`.
pub(super) fn last(recent: &[u32], window: usize) -> &[u32] {
    &recent[recent.len().saturating_sub(window)..]
}

/// The specification's repetition penalty on the last `window` entries of `recent`, once per occurrence. Ids beyond
/// the vocabulary are ignored.
pub fn penalise(logits: &mut [f32], recent: &[u32], penalty: f32, window: usize) {
    for &id in last(recent, window) {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// Penalties that are subtracted from the logits of tokens in the window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Additive {
    /// Once.
    pub presence: f32,
    /// For every occurrence.
    pub frequency: f32,
}

impl Additive {
    /// Subtracts `presence + occurrences * frequency` from the logit of every token in `recent`, as OpenAI's interface
    /// does. `counts` is scratch, `[vocab]`, all zero before and after.
    pub fn penalise(self, logits: &mut [f32], recent: &[u32], counts: &mut [u32]) {
        for &id in recent {
            if let Some(count) = counts.get_mut(id as usize) {
                *count += 1;
            }
        }
        for &id in recent {
            let Some(count) = counts.get_mut(id as usize).map(std::mem::take) else { continue };
            if count > 0 {
                logits[id as usize] -= self.presence + count as f32 * self.frequency;
            }
        }
    }
}
