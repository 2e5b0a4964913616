//! The attention that slots receive from queries whose softmax is known: the sum of their weights.

use super::{Ahead, CHUNK, FEW, Scores, scored};
use crate::kv::KvType;
use crate::simd::lanes::Lanes;
use crate::simd::ops::{exp_lanes, load, sixteens, store};
use crate::simd::{Isa, dispatch};

/// What attention of a query over all its slots ended with.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Softmax {
    /// Largest score.
    pub m: f32,
    /// Sum of `e^(score - m)`.
    pub l: f32,
}

/// Tokens that look at a chunk, by the queries of one group each.
#[derive(Clone, Copy)]
pub struct Looks<'a, const HD: usize> {
    /// `[token][query head of the group]`, as [`super::attend`] takes them.
    pub queries: &'a [[f32; HD]],
    /// Of each query.
    pub softmax: &'a [Softmax],
    /// Of each token: how many slots it sees, from the chunk's first on.
    pub visible: &'a [usize],
}

/// Adds to `mass[slot]`, for each token in turn, `((p_0 + p_1) + p_2) ...`: the weights `p = e^(score - m) / l` of the
/// group's queries, for at most `N` queries. `k` is `[slot][row bytes]` of the chunk's keys.
pub fn observe<const HD: usize, const N: usize>(
    isa: Isa,
    (kind, k): (KvType, &[u8]),
    looks: Looks<'_, HD>,
    mass: &mut [f32],
) {
    #[inline(always)]
    unsafe fn body<L: Lanes, const HD: usize, const N: usize>(
        kind: KvType,
        k: &[u8],
        looks: Looks<'_, HD>,
        mass: &mut [f32],
    ) {
        let slots = looks.visible.iter().copied().max().unwrap_or(0).min(CHUNK);
        let group = looks.queries.len() / looks.visible.len();
        let mut scores = Scores::<N>::NONE;
        let ahead = match N <= FEW {
            true => Ahead::of(k.as_ptr(), kind.row_bytes(HD)).after(CHUNK),
            false => Ahead::NOTHING,
        };
        let scores = scored::<L, HD, N>((kind, k, slots), looks.queries, ahead, &mut scores);
        let of_tokens = scores.chunks_exact(group).zip(looks.softmax.chunks_exact(group));
        for ((scores, softmax), &seen) in of_tokens.zip(looks.visible) {
            let seen = seen.min(CHUNK);
            let mass = &mut mass[..seen];
            sixteens!(seen, |i, part| {
                let mut sum = weights::<L>(&scores[0], softmax[0], i);
                for (scores, &softmax) in scores.iter().zip(softmax).skip(1) {
                    sum = sum.add(weights::<L>(scores, softmax, i));
                }
                store(load::<L>(mass, i, part).add(sum), mass, i, part);
            });
        }
    }
    let Looks { queries, softmax, visible, .. } = looks;
    let slots = visible.iter().copied().max().unwrap_or(0).min(CHUNK);
    assert!(!visible.is_empty() && queries.len().is_multiple_of(visible.len()) && queries.len() <= N);
    assert!(!queries.is_empty() && softmax.len() == queries.len());
    assert!(mass.len() >= slots && k.len() >= slots * kind.row_bytes(HD));
    dispatch!(isa, body::<L, HD: usize, N: usize>(kind: KvType, k: &[u8], looks: Looks<'_, HD>, mass: &mut [f32]))
}

/// Softmax weights of the sixteen slots from `i` on. Those of slots that are not seen mean nothing.
#[inline(always)]
unsafe fn weights<L: Lanes>(scores: &[f32; CHUNK], Softmax { m, l }: Softmax, i: usize) -> L {
    exp_lanes(L::load(scores.as_ptr().add(i)).sub(L::splat(m))).div(L::splat(l))
}
