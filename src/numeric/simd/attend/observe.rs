//! The attention mass of slots: the sum of the softmax weights that queries give them.

use super::{CHUNK, FEW, Prefetch, Scores, compute_scores};
use crate::kv::KvType;
use crate::simd::lanes::Lanes;
use crate::simd::ops::{exp_lanes, load, sixteens, store};
use crate::simd::{Isa, dispatch};

/// The softmax state of a query over all its slots.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SoftmaxState {
    /// Largest score.
    pub m: f32,
    /// Sum of `e^(score - m)`.
    pub l: f32,
}

/// The queries of some tokens, of one group of heads, whose weights for a chunk are added up.
#[derive(Clone, Copy)]
pub struct ObservedQueries<'a, const HD: usize> {
    /// `[token][query head of the group]`, prepared as for [`super::attend`].
    pub queries: &'a [[f32; HD]],
    /// One per query.
    pub softmax: &'a [SoftmaxState],
    /// Number of slots that each token sees, counted from the chunk's first.
    pub visible: &'a [usize],
}

/// Adds the attention mass of each token in turn to `mass[slot]`: `((p_0 + p_1) + p_2) ...` of the weights
/// `p = e^(score - m) / l` of the group's queries, at most `N` in all. `k` is `[slot][row bytes]` of the chunk's keys.
pub fn add_attention_mass<const HD: usize, const N: usize>(
    isa: Isa,
    (kind, k): (KvType, &[u8]),
    looks: ObservedQueries<'_, HD>,
    mass: &mut [f32],
) {
    let ObservedQueries { queries, softmax, visible, .. } = looks;
    let slots = visible.iter().copied().max().unwrap_or(0).min(CHUNK);
    assert!(!visible.is_empty() && queries.len().is_multiple_of(visible.len()) && queries.len() <= N);
    assert!(!queries.is_empty() && softmax.len() == queries.len());
    assert!(mass.len() >= slots && k.len() >= slots * kind.row_bytes(HD));
    if queries.len() <= FEW {
        add_mass_at_most::<HD, FEW>(isa, (kind, k), looks, mass)
    } else {
        add_mass_at_most::<HD, N>(isa, (kind, k), looks, mass)
    }
}

/// [`add_attention_mass`] of at most `N` queries.
fn add_mass_at_most<const HD: usize, const N: usize>(
    isa: Isa,
    (kind, k): (KvType, &[u8]),
    looks: ObservedQueries<'_, HD>,
    mass: &mut [f32],
) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize, const N: usize>(
        kind: KvType,
        k: &[u8],
        looks: ObservedQueries<'_, HD>,
        mass: &mut [f32],
    ) {
        let slots = looks.visible.iter().copied().max().unwrap_or(0).min(CHUNK);
        let group = looks.queries.len() / looks.visible.len();
        let mut scores = Scores::<N>::NONE;
        let ahead = if const { N <= FEW } {
            Prefetch::new(k.as_ptr(), kind.row_bytes(HD)).skip_rows(CHUNK)
        } else {
            Prefetch::NOTHING
        };
        let scores = compute_scores::<L, HD, N>((kind, k, slots), looks.queries, ahead, &mut scores);
        let of_tokens = scores.chunks_exact(group).zip(looks.softmax.chunks_exact(group));
        for ((scores, softmax), &seen) in of_tokens.zip(looks.visible) {
            let seen = seen.min(CHUNK);
            let mass = &mut mass[..seen];
            sixteens!(seen, |i, part| {
                let mut sum = softmax_weights::<L>(&scores[0], softmax[0], i);
                for (scores, &softmax) in scores.iter().zip(softmax).skip(1) {
                    sum = sum.add(softmax_weights::<L>(scores, softmax, i));
                }
                store(load::<L>(mass, i, part).add(sum), mass, i, part);
            });
        }
    }
    dispatch!(isa, body::<L, HD: usize, N: usize>(kind: KvType, k: &[u8], looks: ObservedQueries<'_, HD>,
        mass: &mut [f32]))
}

/// Computes the softmax weights of the sixteen slots from `i` on; those of hidden slots are unspecified.
#[inline(always)]
unsafe fn softmax_weights<L: Lanes>(
    scores: &[f32; CHUNK],
    SoftmaxState { m, l }: SoftmaxState,
    i: usize,
) -> L {
    exp_lanes(L::load(scores.as_ptr().add(i)).sub(L::splat(m))).div(L::splat(l))
}
