//! Mixtures of experts: a router chooses some experts for each token, and the rows of each expert are read once for all
//! its tokens.
//!
//! The result of a token does not depend on the other tokens of a pass: its experts are chosen by its own scores, and
//! their outputs are added in ascending order of the experts' indices, the shared expert's last.

use super::acts::{Activations, try_vec};
use super::matmul::{self, GateUp, MatmulOutput, OutputColumns};
use super::projections::ProjectionPart;
use super::steps::{Scratch, add_to_residual, norm_row, put_blocks, put_floats, task_cols};
use crate::device::ExpertsFn;
use crate::dims::*;
use crate::weights::{ActivationForms, MixtureOfExperts, Weights};
use files::Result;
use files::blocks::BLOCK;
use files::config::Router;
use numeric::pool::Pool;
use numeric::quant::activations::ActTile;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::recurrent::apply_sigmoid;
use numeric::simd::{Isa, ops};
use std::ops::Range;
use std::sync::Arc;

const COUNT: usize = EXPERTS.count;
const USED: usize = EXPERTS.used;
/// Column of the shared expert's gate behind the scores of the experts.
const GATE_AT: usize = COUNT.next_multiple_of(GROUP_ROWS);
const SCORES: usize = GATE_AT + HAS_SHARED_EXPERT_GATE as usize;
/// Lengths of chunks, which must not be 0 in models without experts.
const SCORES_CHUNK: usize = if HAS_EXPERTS { SCORES } else { 1 };
const USED_CHUNK: usize = if HAS_EXPERTS { USED } else { 1 };
/// Term of the sum that divides sigmoids, as in transformers' `Lfm2MoeSparseMoeBlock`.
const SIGMOID_EPS: f32 = 1e-6;

/// Experts on the CPU for a device that leaves them to it, with threads and scratch of their own for passes of
/// `max_tokens` tokens.
pub fn experts_for_device(
    weights: Arc<Weights>,
    threads: usize,
    isa: Isa,
    max_tokens: usize,
) -> Result<ExpertsFn> {
    let (pool, mut s) = (Pool::new(threads), Scratch::new(isa, &weights, 0, max_tokens)?);
    Ok(Box::new(move |layer, residual| {
        let (n, layer) = (residual.len() / DIM, &weights.layers[layer]);
        s.x[..residual.len()].copy_from_slice(residual);
        s.norm_tokens(&layer.ffn_norm, &pool, isa, n);
        s.gate_up(layer, &pool, isa, n);
        s.project_down(layer, &pool, isa, n);
        residual.copy_from_slice(&s.x[..residual.len()]);
    }))
}

/// An expert chosen for a token.
#[derive(Clone, Copy, Default)]
struct Choice {
    expert: u32,
    weight: f32,
    /// Row of its input and output in the buffers.
    row: u32,
}

/// Buffers of the layers with experts; empty if there are none.
pub(super) struct ExpertScratch {
    /// Scores of the experts, and of the shared expert's gate: `[token][SCORES]`
    scores: Vec<f32>,
    /// `[token][USED]`, in ascending order of the experts.
    choices: Vec<Choice>,
    /// Number of tokens of each expert, then its next free row: `[COUNT]`
    counts: Vec<usize>,
    /// The experts that any token has chosen, in ascending order.
    chosen: Vec<usize>,
    /// Rows of each of them in the buffers below.
    rows: Vec<Range<usize>>,
    /// Token of each row.
    tokens: Vec<u32>,
    /// Normed residual of each row's token.
    input: Activations,
    /// silu(gate) * up of each row.
    pub(super) ffn: Activations,
    /// Output of each row's expert, `[row][DIM]`; then that of the shared expert, `[token][DIM]`
    out: Vec<f32>,
}

/// Maximum number of rows for `tokens`. Those of an expert with whole tiles begin at a tile.
fn max_rows(isa: Isa, tokens: usize) -> usize {
    let rows = tokens * USED;
    rows + isa.act_tiles(rows) * (ActTile::TOKENS - 1)
}

impl ExpertScratch {
    /// Buffers for passes of `max_tokens` tokens. Gates and ups read `of_input`, downs `of_ffn`.
    pub(super) fn new(isa: Isa, max_tokens: usize, [of_input, of_ffn]: [ActivationForms; 2]) -> Result<Self> {
        let max_tokens = if HAS_EXPERTS { max_tokens } else { 0 };
        let (rows, shared) = (max_rows(isa, max_tokens), if HAS_FFN_BESIDE { max_tokens } else { 0 });
        Ok(Self {
            scores: try_vec(max_tokens * SCORES, 0.0)?,
            choices: try_vec(max_tokens * USED, Choice::default())?,
            counts: try_vec(COUNT, 0)?,
            chosen: Vec::with_capacity(COUNT),
            rows: Vec::with_capacity(COUNT),
            tokens: try_vec(rows, 0)?,
            input: Activations::new(isa, rows, DIM, of_input)?,
            ffn: Activations::new(isa, rows, EXPERTS.dim, of_ffn)?,
            out: try_vec((rows + shared) * DIM, 0.0)?,
        })
    }

    /// Bytes of the buffers for passes of `max_tokens` tokens; `acts(rows, width)` are those of activations.
    pub(super) fn count_bytes(isa: Isa, max_tokens: usize, acts: impl Fn(usize, usize) -> usize) -> usize {
        if !HAS_EXPERTS {
            return 0;
        }
        let rows = max_rows(isa, max_tokens);
        let shared = if HAS_FFN_BESIDE { max_tokens } else { 0 };
        let of_tokens = max_tokens * (4 * SCORES + USED * size_of::<Choice>());
        let of_experts = COUNT * (2 * size_of::<usize>() + size_of::<Range<usize>>());
        of_tokens
            + of_experts
            + acts(rows, DIM)
            + acts(rows, EXPERTS.dim)
            + 4 * (rows + (rows + shared) * DIM)
    }

    /// Rows that hold a token's values for one of its experts.
    pub(super) fn used_rows(&self) -> impl Iterator<Item = usize> {
        self.rows.iter().flat_map(Range::clone)
    }

    /// Number of rows in use, those between experts included.
    fn row_count(&self) -> usize {
        self.rows.last().map_or(0, |rows| rows.end)
    }

    /// Gives each choice of the first `n` tokens a row, so that those of an expert follow each other.
    fn sort_by_expert(&mut self, isa: Isa, n: usize) {
        let choices = &mut self.choices[..n * USED];
        self.counts.fill(0);
        choices.iter().for_each(|choice| self.counts[choice.expert as usize] += 1);
        self.chosen.clear();
        self.rows.clear();
        let mut next = 0usize;
        for (expert, count) in self.counts.iter_mut().enumerate().filter(|(_, count)| **count > 0) {
            if isa.act_tiles(*count) > 0 {
                next = next.next_multiple_of(ActTile::TOKENS);
            }
            self.chosen.push(expert);
            self.rows.push(next..next + *count);
            (next, *count) = (next + *count, next);
        }
        for (i, choice) in choices.iter_mut().enumerate() {
            let row = &mut self.counts[choice.expert as usize];
            choice.row = *row as u32;
            self.tokens[*row] = (i / USED_CHUNK) as u32;
            *row += 1;
        }
    }
}

impl Scratch {
    /// Chooses experts for the first `n` tokens by the normed residual. Computes silu(gate) * up of each token's experts,
    /// and of the feed-forward beside them.
    pub(super) fn compute_experts(&mut self, w: &MixtureOfExperts, pool: &Pool, isa: Isa, n: usize) {
        let branches = w.branches.as_ref().filter(|_| HAS_BRANCHES);
        if let Some(branches) = branches {
            self.compute_gate_up(&branches.shared, pool, isa, n);
            self.norm_tokens(&branches.router_norm, pool, isa, n);
        }
        self.choose_experts(w, pool, isa, n);
        if let Some(branches) = branches {
            self.norm_tokens(&branches.experts_norm, pool, isa, n);
        }
        let used = self.experts.row_count();
        let ExpertScratch { chosen, rows, tokens, input, ffn, .. } = &mut self.experts;
        input.copy_rows::<DIM>(&self.h, &tokens[..used], pool, isa);
        let gate_up = GateUp { gate: Some(&w.gate), gate_bias: &w.gate_bias, up: &w.up, up_bias: &w.up_bias };
        let tile = task_cols(n, (EXPERTS.dim, 2 * DIM), matmul::RUN, pool.thread_count());
        let input_of = |i: usize| input.rows_as_input::<DIM>(isa, rows[i].clone());
        if !ffn.floats.is_empty() {
            let floats = &mut ffn.floats[..used * EXPERTS.dim];
            pool.run_row_ranges(floats, (EXPERTS.dim, tile), rows, |i, mut tile| {
                let columns = OutputColumns { first: chosen[i] * EXPERTS.dim + tile.col, width: tile.cols };
                matmul::gate_up(isa, gate_up, input_of(i), columns, |first, at, products| {
                    put_floats(&mut tile, (first, at), products);
                });
            });
            ffn.quantise_rows::<{ EXPERTS.dim }>(pool, isa, used);
        } else {
            let width = EXPERTS.dim / BLOCK;
            let blocks = &mut ffn.blocks[..used * width];
            pool.run_row_ranges(blocks, (width, tile / BLOCK), rows, |i, mut tile| {
                let first = chosen[i] * EXPERTS.dim + tile.col * BLOCK;
                let columns = OutputColumns { first, width: tile.cols * BLOCK };
                matmul::gate_up(isa, gate_up, input_of(i), columns, |first, at, products| {
                    put_blocks(isa, &mut tile, (first, at), products);
                });
            });
            ffn.arrange_tiles::<{ EXPERTS.dim }>(pool, isa, used);
        }
        if let Some((shared, _)) = w.shared.as_ref().filter(|_| HAS_SHARED_EXPERT) {
            self.compute_gate_up(shared, pool, isa, n);
        }
    }

    /// Scores the experts, chooses those of each token, and gives them rows.
    fn choose_experts(&mut self, w: &MixtureOfExperts, pool: &Pool, isa: Isa, n: usize) {
        let x = self.h.as_input::<DIM>(isa, n);
        let experts = &mut self.experts;
        let scores = &mut experts.scores[..n * SCORES];
        let tile = task_cols(n, (SCORES, DIM), GROUP_ROWS, pool.thread_count());
        pool.run_columns(scores, SCORES_CHUNK, tile, |mut tile| {
            ProjectionPart { start: 0, w: &w.router, bias: &w.router_bias }.project(
                isa,
                x,
                &mut tile,
                0..SCORES,
            );
            if let Some((_, Some(gate))) = w.shared.as_ref().filter(|_| HAS_SHARED_EXPERT_GATE) {
                ProjectionPart { start: GATE_AT, w: gate, bias: &[] }.project(isa, x, &mut tile, 0..SCORES);
            }
        });
        let scores = &*scores;
        let expert_scale = w.branches.as_ref().map_or(&[][..], |branches| &branches.expert_scale);
        let rows = n.div_ceil(4 * pool.thread_count());
        pool.run_tiles(&mut experts.choices[..n * USED], USED_CHUNK, (rows, USED_CHUNK), |mut tile| {
            for r in 0..tile.rows {
                let of_token = &scores[(tile.row + r) * SCORES..][..COUNT];
                let choices = tile.row_mut(r);
                choose_best(isa, of_token, &w.choice_bias, choices);
                if HAS_BRANCHES {
                    choices.iter_mut().for_each(|c| c.weight *= expert_scale[c.expert as usize]);
                }
            }
        });
        experts.sort_by_expert(isa, n);
        for (expert, rows) in experts.chosen.iter().zip(&experts.rows) {
            w.uses.count_tokens(*expert, rows.len());
        }
    }

    /// Adds the weighted outputs of each token's experts, and of the feed-forward beside them, to the residual.
    pub(super) fn project_experts(&mut self, w: &MixtureOfExperts, pool: &Pool, isa: Isa, n: usize) {
        let used = self.experts.row_count();
        let ExpertScratch { scores, choices, chosen, rows, ffn, out, .. } = &mut self.experts;
        let tile = task_cols(n, (DIM, EXPERTS.dim), GROUP_ROWS, pool.thread_count());
        let (of_experts, of_shared) = out.split_at_mut(used * DIM);
        pool.run_row_ranges(of_experts, (DIM, tile), rows, |i, mut tile| {
            let columns = OutputColumns { first: chosen[i] * DIM + tile.col, width: tile.cols };
            let x = ffn.rows_as_input::<{ EXPERTS.dim }>(isa, rows[i].clone());
            let to = MatmulOutput { tile: &mut tile, at: 0, columns };
            matmul::project(isa, &w.down, x, to, |to, y, row| {
                to.copy_from_slice(y);
                if EXPERT_BIAS {
                    to.iter_mut().zip(&w.down_bias[row..]).for_each(|(to, bias)| *to += bias);
                }
            });
        });
        let branches = w.branches.as_ref();
        let shared =
            w.shared.as_ref().map(|(shared, _)| shared).or(branches.map(|branches| &branches.shared));
        if let Some(shared) = shared.filter(|_| HAS_FFN_BESIDE) {
            let x = self.ffn.as_input::<{ EXPERTS.shared_dim }>(isa, n);
            pool.run_columns(&mut of_shared[..n * DIM], DIM, tile, |mut tile| {
                matmul::project(isa, &shared.down, x, MatmulOutput::whole_tile(&mut tile), |to, y, _| {
                    to.copy_from_slice(y);
                });
            });
        }
        let (of_experts, of_shared) = (&*of_experts, &*of_shared);
        let to = if POST_NORMS { &mut self.post } else { &mut self.x };
        let tasks = n.div_ceil(4 * pool.thread_count());
        pool.run_tiles(&mut to[..n * DIM], DIM, (tasks, DIM), |mut tile| {
            for r in 0..tile.rows {
                let (t, mut sum) = (tile.row + r, [0.0; DIM]);
                for choice in &choices[t * USED..][..USED] {
                    let from = choice.row as usize * DIM;
                    ops::add_scaled(isa, &mut sum, &of_experts[from..][..DIM], choice.weight);
                }
                if HAS_SHARED_EXPERT {
                    let mut gate = [1.0];
                    if HAS_SHARED_EXPERT_GATE {
                        gate = [scores[t * SCORES + GATE_AT]];
                        apply_sigmoid(isa, &mut gate);
                    }
                    ops::add_scaled(isa, &mut sum, &of_shared[t * DIM..][..DIM], gate[0]);
                }
                if let Some(branches) = branches.filter(|_| HAS_BRANCHES) {
                    let mut of_branch = [0.0; DIM];
                    norm_row(isa, &of_shared[t * DIM..][..DIM], &branches.shared_post_norm, &mut of_branch);
                    let row = tile.row_mut(r);
                    norm_row(isa, &sum, &branches.experts_post_norm, row);
                    sum.iter_mut().zip(row).zip(of_branch).for_each(|((sum, x), y)| *sum = y + *x);
                }
                tile.row_mut(r).iter_mut().zip(sum).for_each(|(to, y)| add_to_residual(to, y));
            }
        });
    }
}

/// Chooses the experts with the highest scores, of equal ones those of lower index, and weighs them. `choices` are then
/// in ascending order.
fn choose_best(isa: Isa, scores: &[f32], choice_bias: &[f32], choices: &mut [Choice]) {
    let mut weights = [0.0; COUNT];
    weights.copy_from_slice(scores);
    if EXPERTS.router != Router::Softmax {
        apply_sigmoid(isa, &mut weights);
    }
    let mut ranks = weights;
    ranks.iter_mut().zip(choice_bias).for_each(|(rank, bias)| *rank += bias);
    let mut is_free = [true; COUNT];
    for choice in choices.iter_mut() {
        let mut free = (0..COUNT).filter(|expert| is_free[*expert]);
        let first = free.next().expect("invariant: not more are used than there are");
        let best = free.fold(first, |best, expert| if ranks[expert] > ranks[best] { expert } else { best });
        is_free[best] = false;
        choice.expert = best as u32;
    }
    if EXPERTS.router == Router::Softmax {
        let largest = ranks[choices[0].expert as usize];
        weights.iter_mut().for_each(|x| *x -= largest);
        ops::exp_in_place(isa, &mut weights);
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
    let mut used = [0.0; USED];
    used.iter_mut().zip(&*choices).for_each(|(x, choice)| *x = weights[choice.expert as usize]);
    let divisor = match (EXPERTS.router, EXPERTS.renormalised) {
        (Router::Softmax, true) => ops::sum(isa, &used),
        (Router::Softmax, false) => ops::sum(isa, &weights),
        (_, true) => ops::sum(isa, &used) + SIGMOID_EPS,
        (_, false) => 1.0,
    };
    for (choice, x) in choices.iter_mut().zip(used) {
        choice.weight = x / divisor * EXPERTS.scale as f32;
    }
}
