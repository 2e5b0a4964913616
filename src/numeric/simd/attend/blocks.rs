//! Attention of blocks of queries with sixteen rows, for head sizes that are a multiple of sixteen. Each loaded row
//! serves all queries of the block, whose sums stay in registers. Products and sums are those of one query at a time.
//!
//! With 64 queries, heads of 64 and AVX-512 on a Zen 4 EPYC, all of attention, including exponentials and widening,
//! runs at 74 to 75 % of the f32 FMA peak for every cache type. Tried there, no faster: spans of 64 rows instead of 16,
//! which keep sums in registers for longer, with two queries against two runs of keys instead of four against one.

#![allow(clippy::needless_range_loop, reason = "unrolled over several arrays at once")]

use super::{Aligned, CHUNK, Partial, ROWS};
use crate::simd::lanes::Lanes;
use std::array::from_fn;
use std::hint::black_box;
use std::mem::MaybeUninit;

/// Minimum number of queries for which keys are transposed. For fewer, adding up the lanes of each product is cheaper.
/// For heads of 32 elements the adding is most of the work: with 4 instead of 10 there,
/// `antigravity bench -d 3000 -p 2,3,4` of the story model is 1.3, 1.4 and 1.5 times as fast; with 2, decode is 4 %
/// slower.
pub(super) const fn min_queries_to_transpose(head: usize) -> usize {
    if head <= 32 { 4 } else { 10 }
}

/// Writes the scores of each query with `rows` to `scores[query][first..]`.
///
/// # Safety
///
/// `HD % 16 == 0`, `first + 16 <= CHUNK`; the CPU has the set of `L`.
#[inline(always)]
pub(super) unsafe fn scores<L: Lanes, const HD: usize>(
    rows: &[[f32; HD]; ROWS],
    first: usize,
    (queries, fours): (&[[f32; HD]], &[Four<HD>]),
    scores: &mut [[f32; CHUNK]],
) {
    let Aligned(columns) = &mut Aligned([[0.0f32; ROWS]; HD]);
    transpose::<L, HD>(rows.as_ptr().cast(), columns);
    if const { !L::BY_ELEMENT } {
        return if const { L::WIDE } {
            scores_by_column::<L, HD, 4>(columns, first, queries, scores)
        } else {
            scores_by_column::<L, HD, 2>(columns, first, queries, scores)
        };
    }
    for (four, scores) in fours.iter().zip(scores.chunks_mut(4)) {
        // A repeated last query writes its scores again. All pointers come from one borrow.
        let (to, last) = (scores.as_mut_ptr().cast::<f32>(), scores.len() - 1);
        let to = from_fn(|q| to.add(q.min(last) * CHUNK + first));
        // Opaque: otherwise the columns are loaded before the loop, into more registers than there are.
        L::dots_of_four(black_box(columns), &four.0, to);
    }
}

/// Like [`scores`], for so few queries that transposing does not pay: a row at a time.
#[inline(always)]
pub(super) unsafe fn scores_by_row<L: Lanes, const HD: usize>(
    rows: &[[f32; HD]; ROWS],
    first: usize,
    queries: &[[f32; HD]],
    scores: &mut [[f32; CHUNK]],
) {
    let (fours, rest) = queries.as_chunks();
    let (of_fours, of_rest) = scores.as_chunks_mut();
    for (queries, scores) in fours.iter().zip(of_fours) {
        row_by_row::<L, HD, 4>(rows, first, queries, scores);
    }
    match rest.len() {
        3 => row_by_row::<L, HD, 3>(rows, first, &rest.as_chunks().0[0], &mut of_rest.as_chunks_mut().0[0]),
        2 => row_by_row::<L, HD, 2>(rows, first, &rest.as_chunks().0[0], &mut of_rest.as_chunks_mut().0[0]),
        1 => row_by_row::<L, HD, 1>(rows, first, &rest.as_chunks().0[0], &mut of_rest.as_chunks_mut().0[0]),
        _ => {}
    }
}

#[inline(always)]
unsafe fn row_by_row<L: Lanes, const HD: usize, const Q: usize>(
    rows: &[[f32; HD]; ROWS],
    first: usize,
    queries: &[[f32; HD]; Q],
    scores: &mut [[f32; CHUNK]; Q],
) {
    let mut products = MaybeUninit::<[[L::PartialSums; ROWS]; Q]>::uninit();
    let products: *mut [L::PartialSums; ROWS] = products.as_mut_ptr().cast();
    for r in 0..ROWS {
        // Opaque: otherwise they are loaded before the loop, into more registers than there are.
        let queries = black_box(queries);
        let mut acc = [L::splat(0.0); Q];
        for at in (0..HD).step_by(16) {
            let x = L::load(rows[r][at..].as_ptr());
            for q in 0..Q {
                acc[q] = x.fma(L::load(queries[q][at..].as_ptr()), acc[q]);
            }
        }
        for q in 0..Q {
            (*products.add(q))[r] = acc[q].fold();
        }
    }
    for q in 0..Q {
        L::folded_sums(&*products.add(q)).store(scores[q][first..].as_mut_ptr());
    }
}

/// Four queries, interleaved by element, each at its [`element_index`].
pub(super) type Four<const HD: usize> = Aligned<[[f32; 4]; HD]>;

/// Groups the queries by four, repeating the last query to fill the last group.
#[inline(always)]
pub(super) fn group_by_four<'a, L: Lanes, const HD: usize>(
    queries: &[[f32; HD]],
    room: &'a mut [MaybeUninit<Four<HD>>],
) -> &'a [Four<HD>] {
    let fours = &mut room[..queries.len().div_ceil(4)];
    for (n, four) in fours.iter_mut().enumerate() {
        let of: [_; 4] = from_fn(|i| &queries[(4 * n + i).min(queries.len() - 1)]);
        let Aligned(elements) = four.write(Aligned([[0.0; 4]; HD]));
        // Four elements at a time, which fill registers.
        for e in (0..HD).step_by(4) {
            let some: [[f32; 4]; 4] = of.map(|q| q.as_chunks().0[e / 4]);
            (0..4).for_each(|i| elements[element_index::<L, HD>(e + i)] = some.map(|q| q[i]));
        }
    }
    // SAFETY: all groups were just initialised.
    unsafe { std::slice::from_raw_parts(fours.as_ptr().cast(), fours.len()) }
}

/// Index of element `e` in `columns` and [`Four`], in the order of [`Lanes::dots_of_four`] if that is used.
const fn element_index<L: Lanes, const HD: usize>(e: usize) -> usize {
    if L::BY_ELEMENT { e % 16 * (HD / 16) + e / 16 } else { e }
}

/// Transposes sixteen rows to `columns[element_index][row]`.
#[inline(always)]
unsafe fn transpose<L: Lanes, const HD: usize>(rows: *const f32, columns: &mut [[f32; ROWS]; HD]) {
    for i in (0..HD).step_by(16) {
        let mut square = [L::splat(0.0); ROWS];
        for (r, x) in square.iter_mut().enumerate() {
            *x = L::load(rows.add(r * HD + i));
        }
        L::transpose(&mut square);
        for (r, x) in square.iter().enumerate() {
            x.store(columns[element_index::<L, HD>(i + r)].as_mut_ptr());
        }
    }
}

/// Implements [`scores`] on transposed rows, `Q` queries at a time.
#[inline(always)]
unsafe fn scores_by_column<L: Lanes, const HD: usize, const Q: usize>(
    columns: &[[f32; ROWS]; HD],
    first: usize,
    queries: &[[f32; HD]],
    scores: &mut [[f32; CHUNK]],
) {
    let (blocks, rest) = queries.as_chunks::<Q>();
    for (q, scores) in blocks.iter().zip(scores.as_chunks_mut::<Q>().0) {
        // Opaque: otherwise the columns are loaded before the loop, into more registers than there are.
        let sums = column_dots::<L, HD, Q>(black_box(columns), q);
        for n in 0..Q {
            sums[n].store(scores[n][first..].as_mut_ptr());
        }
    }
    for (q, scores) in rest.iter().zip(&mut scores[Q * blocks.len()..]) {
        let [sum] = column_dots::<L, HD, 1>(columns, std::array::from_ref(q));
        sum.store(scores[first..].as_mut_ptr());
    }
}

/// Computes the dot products of `Q` queries with sixteen rows, one per lane. Lane `i` of the sum over a row is one
/// register here, and registers are added in the order in which [`Lanes::sum`] adds lanes.
#[inline(always)]
unsafe fn column_dots<L: Lanes, const HD: usize, const Q: usize>(
    columns: &[[f32; ROWS]; HD],
    queries: &[[f32; HD]; Q],
) -> [L; Q] {
    macro_rules! lane {
        ($i:literal) => {{
            let mut acc = [L::splat(0.0); Q];
            for e in ($i..HD).step_by(16) {
                let column = L::load(columns[e].as_ptr());
                for q in 0..Q {
                    acc[q] = column.fma(L::splat(queries[q][e]), acc[q]);
                }
            }
            acc
        }};
    }
    macro_rules! add {
        ($a:expr, $b:expr) => {{
            let (mut a, b) = ($a, $b);
            for q in 0..Q {
                a[q] = a[q].add(b[q]);
            }
            a
        }};
    }
    let even = add!(
        add!(add!(lane!(0), lane!(8)), add!(lane!(4), lane!(12))),
        add!(add!(lane!(2), lane!(10)), add!(lane!(6), lane!(14)))
    );
    let odd = add!(
        add!(add!(lane!(1), lane!(9)), add!(lane!(5), lane!(13))),
        add!(add!(lane!(3), lane!(11)), add!(lane!(7), lane!(15)))
    );
    add!(even, odd)
}

/// Adds the weighted rows to the sums of all queries, `Q` queries and `RUNS` runs of sixteen at a time.
///
/// # Safety
///
/// See [`scores`]; there are as many scores and numbers of visible slots as outputs.
#[inline(always)]
pub(super) unsafe fn weighted_sum<L: Lanes, const HD: usize, const Q: usize, const RUNS: usize>(
    rows: &[[f32; HD]; ROWS],
    first: usize,
    scores: &[[f32; CHUNK]],
    visible: &[usize],
    out: &mut [Partial<HD>],
) {
    let rows = rows.as_ptr().cast();
    let seen = |q: usize| visible[q].saturating_sub(first).min(ROWS);
    let (blocks, rest) = out.as_chunks_mut::<Q>();
    let done = blocks.len() * Q;
    for (b, out) in blocks.iter_mut().enumerate() {
        let n = std::array::from_fn(|i| seen(b * Q + i));
        let weights = std::array::from_fn(|i| scores[b * Q + i][first..].as_ptr());
        add_weighted::<L, HD, Q, RUNS>(rows, n, weights, out.each_mut().map(|o| o.o.as_mut_ptr()));
    }
    for (i, out) in rest.iter_mut().enumerate() {
        let weights = scores[done + i][first..].as_ptr();
        add_weighted::<L, HD, 1, RUNS>(rows, [seen(done + i)], [weights], [out.o.as_mut_ptr()]);
    }
}

/// Adds `weight * row` to `o[query]` for each of the first `n[query]` of sixteen rows in turn.
#[inline(always)]
unsafe fn add_weighted<L: Lanes, const HD: usize, const Q: usize, const RUNS: usize>(
    rows: *const f32,
    n: [usize; Q],
    weights: [*const f32; Q],
    out: [*mut f32; Q],
) {
    let all = n.iter().copied().min().unwrap_or(0);
    let mut at = 0;
    while at + 16 * RUNS <= HD {
        panel::<L, HD, Q, RUNS>(rows.add(at), 0, all, weights, out.map(|o| o.add(at)));
        at += 16 * RUNS;
    }
    while at < HD {
        panel::<L, HD, Q, 1>(rows.add(at), 0, all, weights, out.map(|o| o.add(at)));
        at += 16;
    }
    for q in 0..Q {
        if n[q] > all {
            for at in (0..HD).step_by(16) {
                panel::<L, HD, 1, 1>(rows.add(at), all, n[q], [weights[q]], [out[q].add(at)]);
            }
        }
    }
}

/// Adds rows `from..to` for `RUNS` runs of sixteen elements; see [`add_weighted`].
#[inline(always)]
unsafe fn panel<L: Lanes, const HD: usize, const Q: usize, const RUNS: usize>(
    rows: *const f32,
    from: usize,
    to: usize,
    weights: [*const f32; Q],
    out: [*mut f32; Q],
) {
    let mut acc = [[L::splat(0.0); RUNS]; Q];
    for q in 0..Q {
        for i in 0..RUNS {
            acc[q][i] = L::load(out[q].add(16 * i));
        }
    }
    let mut first = from;
    if const { L::BY_ELEMENT } {
        // Four weights of each query in a register.
        macro_rules! add {
            ($i:literal) => {
                for i in 0..RUNS {
                    let row = L::load(rows.add((first + $i) * HD + 16 * i));
                    for q in 0..Q {
                        acc[q][i] = row.fma_one::<$i>(weights[q].add(first), acc[q][i]);
                    }
                }
            };
        }
        while first + 4 <= to {
            add!(0);
            add!(1);
            add!(2);
            add!(3);
            first += 4;
        }
    }
    for r in first..to {
        let mut row = [L::splat(0.0); RUNS];
        for i in 0..RUNS {
            row[i] = L::load(rows.add(r * HD + 16 * i));
        }
        for q in 0..Q {
            let w = L::splat(*weights[q].add(r));
            for i in 0..RUNS {
                acc[q][i] = w.fma(row[i], acc[q][i]);
            }
        }
    }
    for q in 0..Q {
        for i in 0..RUNS {
            acc[q][i].store(out[q].add(16 * i));
        }
    }
}
