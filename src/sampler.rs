//! Chooses the next token from the logits: repetition penalty over the window -> (temperature 0:
//! the largest) -> temperature -> softmax -> top-k -> top-p -> min-p -> draw in proportion.
//!
//! The same logits, history and seed give the same token on every machine: `exp` is our own, sums
//! run in f64 in a fixed order, ties go to the lower id.

mod rng;
#[cfg(test)]
mod tests;

pub use rng::Rng;

use crate::{Error, Result};

/// How to choose.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerOptions {
    /// Divides the logits; 0 takes the largest.
    pub temperature: f32,
    /// Running probability after which the tail is cut.
    pub top_p: f32,
    /// How many of the most probable tokens stay; 0 is all.
    pub top_k: usize,
    /// Smallest probability that stays, relative to the largest; 0 is off.
    pub min_p: f32,
    /// What the logit of a recent token is divided by (multiplied, if negative), once for every
    /// time that it occurs in the window.
    pub repetition_penalty: f32,
    /// How many of the last tokens are penalised.
    pub repetition_window: usize,
    pub seed: u64,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.0,
            repetition_penalty: 1.1,
            repetition_window: 64,
            seed: 0,
        }
    }
}

impl SamplerOptions {
    /// Refuses values that make no distribution, naming the flag.
    pub fn validate(&self) -> Result<()> {
        let check = |flag: &str, value: f32, ok: bool, range: &str| {
            if ok { Ok(()) } else { Err(Error::Usage(format!("{flag} {value}: use a number {range}"))) }
        };
        let t = self.temperature;
        check("--temperature", t, t.is_finite() && t >= 0.0, "from 0 (greedy) up, usually below 2")?;
        let unit = |x: f32| (0.0..=1.0).contains(&x);
        check("--top-p", self.top_p, unit(self.top_p), "from 0 to 1 (1 is off)")?;
        check("--min-p", self.min_p, unit(self.min_p), "from 0 (off) to 1")?;
        let r = self.repetition_penalty;
        check("--repetition-penalty", r, r.is_finite() && r > 0.0, "above 0 (1 is off), usually 1 to 1.5")
    }
}

/// Stage 1: penalises the last `window` entries of `recent`, each occurrence anew. Ids beyond the
/// vocabulary are ignored.
pub fn penalise(logits: &mut [f32], recent: &[u32], penalty: f32, window: usize) {
    for &id in &recent[recent.len().saturating_sub(window)..] {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
        }
    }
}

/// Stage 2 at temperature 0: the first of the largest logits. NaN counts as the smallest.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    best.0 as u32
}

/// Stage 3: divides by a positive temperature.
pub fn scale(logits: &mut [f32], temperature: f32) {
    // Softmax does not mind a shift; near 0 it keeps the quotients of the largest from overflowing.
    let shift = if temperature < 1e-3 { largest(logits) } else { 0.0 };
    for logit in logits {
        *logit = (*logit - shift) / temperature;
    }
}

/// Reductions run over this many lanes, so that the compiler can vectorise them and the order of the
/// additions is the same everywhere: element `i` belongs to lane `i % LANES`.
const LANES: usize = 16;

fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (rows, tail) = logits.as_chunks::<LANES>();
    let mut take = |lane: usize, x: f32| lanes[lane] = if x > lanes[lane] { x } else { lanes[lane] };
    for row in rows {
        (0..LANES).for_each(|i| take(i, row[i]));
    }
    tail.iter().enumerate().for_each(|(i, &x)| take(i, x));
    lanes.into_iter().fold(f32::NEG_INFINITY, f32::max).min(f32::MAX)
}

/// `e^x` for `x <= 0`, within 2 ulp where the result is a normal number, 0 below and for NaN. Only
/// additions, multiplications and bit patterns, so it has the same bits everywhere and vectorises
/// (`libm::expf` is as portable and eight times slower, which shows with 128k logits).
#[inline]
fn exp(x: f32) -> f32 {
    // The smallest normal f32 is e^-87.3.
    let inside = x > -87.3;
    let x = if inside { x } else { 0.0 };
    // x = n ln 2 + r; adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts (Cody and Waite); the product with the first is exact.
    let r = x - n * 0.693_359_4 - n * -2.121_944_4e-4;
    // Taylor on |r| <= ln 2 / 2, Horner.
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5] {
        p = p * r + c;
    }
    let e = (p * r) * r + r + 1.0;
    // 2^n: the low bits of `shifted` hold n.
    let scale = f32::from_bits(shifted.to_bits().wrapping_shl(23).wrapping_add(1.0f32.to_bits()));
    if inside { e * scale } else { 0.0 }
}

/// Stage 4: logits to probabilities, over the whole vocabulary. NaN gets 0; infinity counts as the
/// largest finite number; where nothing is left, all are 0.
pub fn softmax(logits: &mut [f32]) {
    let max = largest(logits);
    let mut lanes = [0.0f64; LANES];
    let mut take = |lane: usize, x: &mut f32| {
        // `f32::min` would turn NaN into a number.
        let capped = if *x > f32::MAX { f32::MAX } else { *x };
        *x = exp(capped - max);
        lanes[lane] += f64::from(*x);
    };
    let (rows, tail) = logits.as_chunks_mut::<LANES>();
    for row in rows {
        row.iter_mut().enumerate().for_each(|(i, x)| take(i, x));
    }
    tail.iter_mut().enumerate().for_each(|(i, x)| take(i, x));
    let sum = lanes.iter().sum::<f64>() as f32;
    if sum > 0.0 {
        for p in logits {
            *p /= sum;
        }
    }
}

/// A token and its probability.
type Ranked = (u32, f32);

/// More probable first, then lower ids first.
fn by_rank(a: &Ranked, b: &Ranked) -> std::cmp::Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Where the ranking stops being worth extending.
#[derive(Clone, Copy)]
enum Until {
    /// Top-p or min-p cuts, or the top-k are exhausted.
    Cut,
    /// The running sum reaches this. For a draw from an uncut vocabulary.
    Sum(f64),
}

/// Draws tokens. All memory is allocated at construction.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    vocab: usize,
    rng: Rng,
    /// The most probable tokens, best first; room for the vocabulary.
    ranked: Vec<Ranked>,
}

impl Sampler {
    /// A sampler over `vocab` tokens; `options` are validated.
    pub fn new(options: SamplerOptions, vocab: usize) -> Result<Self> {
        options.validate()?;
        assert!(vocab > 0 && u32::try_from(vocab).is_ok(), "a vocabulary has 1 to 2^32 - 1 tokens");
        let rng = Rng::new(options.seed);
        Ok(Self { options, vocab, rng, ranked: Vec::with_capacity(vocab) })
    }

    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The random state, to be saved with a session.
    pub fn rng(&self) -> &Rng {
        &self.rng
    }

    /// Continues from a saved random state.
    pub fn set_rng(&mut self, rng: Rng) {
        self.rng = rng;
    }

    /// The next token. `logits` is scratch afterwards; `recent` is the history, oldest first.
    pub fn sample(&mut self, logits: &mut [f32], recent: &[u32]) -> u32 {
        assert_eq!(logits.len(), self.vocab, "one logit a token");
        let o = &self.options;
        if o.repetition_penalty != 1.0 {
            penalise(logits, recent, o.repetition_penalty, o.repetition_window);
        }
        if o.temperature == 0.0 {
            return argmax(logits);
        }
        if o.temperature != 1.0 {
            scale(logits, o.temperature);
        }
        softmax(logits);
        let uniform = f64::from(self.rng.uniform());
        let uncut = self.limit() == self.vocab && self.options.top_p >= 1.0 && self.options.min_p == 0.0;
        let total = if uncut {
            // Everything stays: rank only as far as the draw reaches.
            let total: f64 = logits.iter().map(|&p| f64::from(p)).sum();
            self.rank(logits, Until::Sum(uniform * total));
            total
        } else {
            self.rank(logits, Until::Cut);
            self.ranked.iter().map(|r| f64::from(r.1)).sum()
        };
        let mut rest = uniform * total;
        for &(id, p) in &self.ranked {
            rest -= f64::from(p);
            if rest <= 0.0 {
                return id;
            }
        }
        self.ranked.last().map_or(0, |r| r.0)
    }

    /// Stages 5 and 6: what top-k, top-p and min-p leave of `probs`, best first, not renormalised.
    pub fn keep(&mut self, probs: &[f32]) -> &[(u32, f32)] {
        self.rank(probs, Until::Cut);
        &self.ranked
    }

    /// How many tokens top-k leaves.
    fn limit(&self) -> usize {
        if self.options.top_k == 0 { self.vocab } else { self.options.top_k.min(self.vocab) }
    }

    /// Fills `ranked`. Starts with a few of the most probable and takes more only while the cut has
    /// not been met, so that a vocabulary of 128k is hardly ever sorted as a whole.
    fn rank(&mut self, probs: &[f32], until: Until) {
        let limit = self.limit();
        let mut count = limit.min(256);
        loop {
            self.select(probs, count);
            match self.cut(until) {
                Some(kept) => return self.ranked.truncate(kept),
                None if count == limit => return,
                None => count = (count * 8).min(limit),
            }
        }
    }

    /// The length at which `ranked` is cut, if that is certain.
    fn cut(&self, until: Until) -> Option<usize> {
        let floor = self.options.min_p * self.ranked.first().map_or(0.0, |r| r.1);
        let mut sum = 0.0f64;
        for (i, &(_, p)) in self.ranked.iter().enumerate() {
            // The most probable always stays.
            if p < floor && i > 0 {
                return Some(i);
            }
            sum += f64::from(p);
            let full = match until {
                Until::Cut => self.options.top_p < 1.0 && sum > f64::from(self.options.top_p),
                Until::Sum(target) => sum >= target,
            };
            if full {
                return Some(i + 1);
            }
        }
        None
    }

    /// The `count` most probable tokens, sorted, in one pass: a buffer of candidates above a rising
    /// threshold, thinned out whenever it is full.
    fn select(&mut self, probs: &[f32], count: usize) {
        let room = (2 * count).max(1024).min(self.vocab);
        let best = &mut self.ranked;
        best.clear();
        // A later token has a higher id, so with equal probability it ranks behind.
        let mut threshold = f32::NEG_INFINITY;
        for (id, &p) in probs.iter().enumerate() {
            if p > threshold {
                if best.len() == room && count < room {
                    best.select_nth_unstable_by(count - 1, by_rank);
                    best.truncate(count);
                    threshold = best[count - 1].1;
                    if p <= threshold {
                        continue;
                    }
                }
                best.push((id as u32, p));
            }
        }
        if best.len() > count {
            best.select_nth_unstable_by(count - 1, by_rank);
            best.truncate(count);
        }
        best.sort_unstable_by(by_rank);
    }
}
