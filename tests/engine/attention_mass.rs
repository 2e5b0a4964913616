//! The cache as eviction uses it: the attention that slots receive, the same bits however it is computed, and rows and
//! mass that move.

use crate::support::cpu_sequence::CpuSequence;
use crate::support::paths;
use crate::support::random::{Random, ids};
use antigravity::dims::{ATTENTION_SINKS, GROUP, HEAD_DIM, HEADS, KV_HEADS, LAYERS, Q_DIM, VOCAB};
use antigravity::model::cpu::CpuOptions;
use antigravity::model::cpu::attention::attention_for_device;
use antigravity::model::device::{AttentionJob, AttentionMass, Logits};
use antigravity::model::weights::Weights;
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::attend::{
    CHUNK, FULL_ATTENTION, KvChunk, ObservedQueries, Partial, SoftmaxState, add_attention_mass, attend,
    merge_partial,
};
use numeric::simd::{Isa, kv_row, ops};
use std::sync::{Arc, OnceLock};

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Rows of one KV head and the queries of tokens that came last.
struct Head<const HD: usize> {
    kind: KvType,
    slots: usize,
    floats: Vec<f32>,
    rows: Vec<u8>,
    group: usize,
    /// `[token][query head of the group]`
    queries: Vec<[f32; HD]>,
}

impl<const HD: usize> Head<HD> {
    fn new(kind: KvType, slots: usize, (tokens, group): (usize, usize)) -> Self {
        let mut r = Random((HD + group) as u64);
        let (floats, row_bytes) = (r.floats(slots * HD), kind.row_bytes(HD));
        let mut rows = vec![0; slots * row_bytes];
        for (x, row) in floats.chunks(HD).zip(rows.chunks_mut(row_bytes)) {
            kv_row::encode_row(Isa::Scalar, kind, x, row);
        }
        let queries = r.floats(tokens * group * HD);
        let queries = queries.as_chunks().0.iter().map(|q| q.map(|x| 2.0 * x / (HD as f32).sqrt())).collect();
        Self { kind, slots, floats, rows, group, queries }
    }

    fn tokens(&self) -> usize {
        self.queries.len() / self.group
    }

    /// Slots that the token sees.
    fn sees(&self, token: usize) -> usize {
        self.slots - self.tokens() + token + 1
    }

    fn from(&self, slot: usize) -> &[u8] {
        &self.rows[slot * self.kind.row_bytes(HD)..]
    }

    /// Computes the attention of one query over some slots.
    fn attend(&self, query: usize, first: usize, slots: usize) -> Partial<HD> {
        let (k, mut out) = (self.from(first), [Partial::EMPTY]);
        let kv = KvChunk { k, v: k, types: KvTypes::same(self.kind), window: FULL_ATTENTION };
        attend::<HD>(Isa::Scalar, kv, &self.queries[query..=query], &[slots], &mut out);
        out[0]
    }

    fn softmax(&self) -> Vec<SoftmaxState> {
        let of = |query: usize| {
            let (sees, mut state) = (self.sees(query / self.group), Partial::EMPTY);
            for first in (0..sees).step_by(CHUNK) {
                merge_partial(Isa::Scalar, &mut state, &self.attend(query, first, CHUNK.min(sees - first)));
            }
            SoftmaxState { m: state.m, l: state.l }
        };
        (0..self.queries.len()).map(of).collect()
    }

    /// The mass as it is defined, slot by slot; a score is what attention over one slot alone calls the largest.
    fn defined(&self, softmax: &[SoftmaxState]) -> Vec<f32> {
        let mut mass = vec![0.0f32; self.slots];
        for token in 0..self.tokens() {
            for (slot, mass) in mass[..self.sees(token)].iter_mut().enumerate() {
                let weight = |head: usize| {
                    let query = token * self.group + head;
                    let mut e = [self.attend(query, slot, 1).m - softmax[query].m];
                    ops::exp_in_place(Isa::Scalar, &mut e);
                    e[0] / softmax[query].l
                };
                *mass += (1..self.group).fold(weight(0), |sum, head| sum + weight(head));
            }
        }
        mass
    }

    /// Computes the mass with the kernel, `at_once` tokens a call.
    fn observed<const N: usize>(&self, isa: Isa, softmax: &[SoftmaxState], at_once: usize) -> Vec<f32> {
        let mut mass = vec![0.0f32; self.slots];
        for first in (0..self.tokens()).step_by(at_once) {
            let tokens = first..self.tokens().min(first + at_once);
            let of_group = tokens.start * self.group..tokens.end * self.group;
            for (chunk, mass) in mass.chunks_mut(CHUNK).enumerate() {
                let seen = |t| self.sees(t).saturating_sub(chunk * CHUNK).min(CHUNK);
                let looks = ObservedQueries {
                    queries: &self.queries[of_group.clone()],
                    softmax: &softmax[of_group.clone()],
                    visible: &tokens.clone().map(seen).collect::<Vec<_>>(),
                };
                add_attention_mass::<HD, N>(isa, (self.kind, self.from(chunk * CHUNK)), looks, mass);
            }
        }
        mass
    }

    /// In f64, of what was stored: exact for f32.
    fn exact(&self) -> Vec<f64> {
        let mut mass = vec![0.0; self.slots];
        for (i, q) in self.queries.iter().enumerate() {
            let score = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
            let rows = self.floats.chunks(HD).take(self.sees(i / self.group));
            let weights: Vec<f64> = rows.map(|k| libm::exp(score(k))).collect();
            let sum: f64 = weights.iter().sum();
            mass.iter_mut().zip(weights).for_each(|(m, w)| *m += w / sum);
        }
        mass
    }
}

fn kernel<const HD: usize>() {
    for kind in KvType::ALL {
        for group in [1, 3, 8] {
            let head = Head::<HD>::new(kind, 2 * CHUNK + 19, (11, group));
            let softmax = head.softmax();
            let want = head.defined(&softmax);
            for isa in Isa::available() {
                let what = format!("{} head {HD} group {group} on {}", kind.name(), isa.name());
                assert_eq!(bits(&head.observed::<8>(isa, &softmax, 1)), bits(&want), "{what}, one by one");
                assert_eq!(bits(&head.observed::<64>(isa, &softmax, 8)), bits(&want), "{what}, eight");
            }
            if kind == KvType::F32 {
                let near = |(got, want): (&f32, f64)| (f64::from(*got) - want).abs() < 2e-6;
                assert!(want.iter().zip(head.exact()).all(near), "head {HD} group {group}");
            }
            let sum: f64 = want.iter().map(|&m| f64::from(m)).sum();
            assert!((sum - head.queries.len() as f64).abs() < 1e-3, "{sum}");
        }
    }
}

#[test]
fn mass_is_what_it_is_defined_to_be_on_every_instruction_set() {
    // Of no whole run of sixteen, of whole runs of 64, and of neither.
    kernel::<12>();
    kernel::<64>();
    kernel::<80>();
}

fn weights() -> &'static Arc<Weights> {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::load(EngineOptions::new(paths::model())).unwrap()).weights()
}

const CAPACITY: usize = 400;

fn alone(kv: KvType, threads: usize, isa: Isa) -> CpuSequence {
    let kv_types = KvTypes::same(kv);
    let options = CpuOptions { threads, isa, kv_types, slots: CAPACITY, max_tokens: 256 };
    CpuSequence::new(Arc::clone(weights()), options)
}

fn fastest() -> Isa {
    Isa::detect().unwrap()
}

fn feed(alone: &mut CpuSequence, ids: &[u32], chunk: usize) {
    ids.chunks(chunk).for_each(|ids| alone.forward(ids, Logits::None));
}

#[test]
fn mass_has_the_same_bits_for_all_chunks_threads_and_instruction_sets() {
    let ids = ids(300);
    for kv in [KvType::F32, KvType::Q4] {
        let observed = |threads, chunk, isa| {
            let mut alone = alone(kv, threads, isa);
            alone.observe(usize::MAX);
            feed(&mut alone, &ids, chunk);
            alone.mass()
        };
        let want = observed(1, 256, fastest());
        for of_head in want.chunks(ids.len()) {
            let sum: f64 = of_head.iter().map(|&m| f64::from(m)).sum();
            assert!((sum - (ids.len() * GROUP) as f64).abs() < 1e-3, "{sum}");
        }
        for (threads, chunk) in [1, 2, 3].into_iter().flat_map(|t| [1, 7, 64, 256].map(|c| (t, c))) {
            let found = observed(threads, chunk, fastest());
            assert_eq!(bits(&found), bits(&want), "{} {threads} threads, chunks of {chunk}", kv.name());
        }
        for isa in Isa::available() {
            assert_eq!(bits(&observed(2, 100, isa)), bits(&want), "{} on {}", kv.name(), isa.name());
        }
    }
}

#[test]
fn only_the_last_tokens_of_a_pass_are_observed() {
    let ids = ids(300);
    let mut at_once = alone(KvType::F32, 2, fastest());
    feed(&mut at_once, &ids[..100], 100);
    at_once.observe(32);
    feed(&mut at_once, &ids[100..], 200);

    let mut one_by_one = alone(KvType::F32, 1, fastest());
    feed(&mut one_by_one, &ids[..268], 90);
    one_by_one.observe(1);
    feed(&mut one_by_one, &ids[268..], 1);
    let want = one_by_one.mass();
    assert_eq!(bits(&at_once.mass()), bits(&want));
    for of_head in want.chunks(ids.len()) {
        let sum: f64 = of_head.iter().map(|&m| f64::from(m)).sum();
        assert!((sum - (32 * GROUP) as f64).abs() < 1e-3, "{sum}");
    }
}

#[test]
fn observing_changes_nothing_but_the_mass() {
    let ids = ids(200);
    let run = |tokens: usize| {
        let mut alone = alone(KvType::Q4, 2, fastest());
        alone.observe(tokens);
        let mut logits = vec![0.0; VOCAB];
        feed(&mut alone, &ids[..150], 64);
        alone.forward(&ids[150..], Logits::Last(&mut logits));
        (bits(&logits), alone.rows())
    };
    assert!(run(0) == run(usize::MAX));
    let mut never = alone(KvType::Q4, 1, fastest());
    feed(&mut never, &ids[..9], 9);
    assert!(never.mass().iter().all(|m| m.to_bits() == 0));
}

/// Slots of one head to keep: every one with a digit of its own.
fn chosen(layer: usize, kv_head: usize) -> Vec<u32> {
    (0..150).map(|i| 2 * i + ((layer + kv_head + i as usize) % 2) as u32).collect()
}

#[test]
fn kept_slots_take_rows_and_mass_along() {
    for kv in KvType::ALL {
        let mut alone = alone(kv, 1, fastest());
        alone.observe(7);
        feed(&mut alone, &ids(300), 100);
        let (all, all_mass) = (alone.rows(), alone.mass());
        for (layer, kv_head) in (0..LAYERS).flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
            assert!(
                alone.cache.retain_slots(layer, kv_head, &[3, 2]).is_err()
                    && alone.cache.retain_slots(layer, kv_head, &[300]).is_err()
            );
            alone.cache.retain_slots(layer, kv_head, &chosen(layer, kv_head)).unwrap();
        }
        alone.cache.set_len(150);
        let row_bytes = kv.row_bytes(HEAD_DIM);
        let (left, left_mass) = (alone.rows(), alone.mass());
        for (layer, kv_head) in (0..LAYERS).flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
            for (to, &from) in chosen(layer, kv_head).iter().enumerate() {
                let (from, head) = (from as usize, layer * KV_HEADS + kv_head);
                assert_eq!(left_mass[head * 150 + to].to_bits(), all_mass[head * 300 + from].to_bits());
                let row = |rows: &[u8], slot: usize| rows[slot * row_bytes..][..row_bytes].to_vec();
                let (to, from) = (kv_head * 150 + to, kv_head * 300 + from);
                assert_eq!(row(&left[layer].k, to), row(&all[layer].k, from));
                assert_eq!(row(&left[layer].v, to), row(&all[layer].v, from));
            }
        }
    }
}

#[test]
fn slots_filled_anew_have_no_mass_and_the_others_keep_theirs() {
    let ids = ids(300);
    let mut b = alone(KvType::F32, 2, fastest());
    b.observe(usize::MAX);
    feed(&mut b, &ids, 100);
    b.cache.set_len(120);
    let before = b.mass();
    b.observe(0);
    feed(&mut b, &ids[120..150], 8);
    for (now, before) in b.mass().chunks(150).zip(before.chunks(120)) {
        assert_eq!(bits(&now[..120]), bits(before));
        assert!(now[120..].iter().all(|&m| m.to_bits() == 0));
    }
    // Rows that are written count from `set_len` on, and have no mass until it is written.
    let (all, old) = (b.rows(), b.mass());
    b.cache.set_len(100);
    (0..LAYERS).for_each(|layer| b.cache.write_rows(layer, 0..150, &all[layer]).unwrap());
    b.cache.set_len(150);
    for (now, old) in b.mass().chunks(150).zip(old.chunks(150)) {
        assert_eq!(bits(&now[..100]), bits(&old[..100]));
        assert!(now[100..].iter().all(|&m| m.to_bits() == 0));
    }
    let of_layers = old.chunks(KV_HEADS * 150).enumerate();
    of_layers.for_each(|(layer, mass)| b.cache.write_mass(layer, mass).unwrap());
    assert_eq!(bits(&b.mass()), bits(&old));
}

#[test]
fn a_cache_that_grows_keeps_the_mass() {
    let ids = ids(200);
    let observed = |resized: Option<usize>| {
        let mut alone = alone(KvType::Q8, 1, fastest());
        alone.observe(usize::MAX);
        feed(&mut alone, &ids[..150], 150);
        if let Some(slots) = resized {
            alone.cache.resize(slots).unwrap();
            assert!(alone.cache.resize(149).is_err());
            assert_eq!(alone.cache.extent().slots, slots);
        }
        feed(&mut alone, &ids[150..], 9);
        alone.mass()
    };
    let want = observed(None);
    assert!([200, 1000].into_iter().all(|slots| bits(&observed(Some(slots))) == bits(&want)));
}

#[test]
fn attention_done_for_another_backend_gives_the_same_mass() {
    let (slots, capacity, types) = (300, 310, KvTypes::same(KvType::Q4));
    let mut r = Random(5);
    let row_bytes = types.k.row_bytes(HEAD_DIM);
    let mut k = vec![0; KV_HEADS * capacity * row_bytes];
    for row in k.chunks_mut(row_bytes) {
        kv_row::encode_row(Isa::Scalar, types.k, &r.floats(HEAD_DIM), row);
    }
    let queries = r.floats(40 * Q_DIM);
    let run = |threads, at_once: usize, observed: usize| {
        let mut attention = attention_for_device(threads, fastest(), capacity).unwrap();
        let mut sums = vec![0.0; KV_HEADS * capacity];
        for (i, queries) in queries.chunks(at_once * Q_DIM).enumerate() {
            let tokens = queries.len() / Q_DIM;
            attention(AttentionJob {
                tokens,
                before: slots - 40 + i * at_once,
                window: None,
                queries,
                stride: HEADS * HEAD_DIM,
                k: &k,
                v: &k,
                capacity,
                types,
                sinks: [&vec![0.0; HEADS * ATTENTION_SINKS as usize], &[]],
                att: &mut vec![0.0; tokens * Q_DIM],
                mass: Some(AttentionMass { sums: &mut sums, tokens: observed }),
            });
        }
        sums
    };
    let want = run(1, 40, 40);
    for (threads, at_once) in [(1, 1), (2, 1), (3, 7), (2, 40)] {
        assert_eq!(
            bits(&run(threads, at_once, usize::MAX)),
            bits(&want),
            "{threads} threads, {at_once} tokens"
        );
    }
    assert!(run(2, 40, 0).iter().all(|&m| m == 0.0));
    let sum = |sums: Vec<f32>| sums.iter().map(|&m| f64::from(m)).sum::<f64>();
    assert!((sum(want) - (40 * HEADS) as f64).abs() < 1e-3);
    assert!((sum(run(1, 40, 3)) - (3 * HEADS) as f64).abs() < 1e-3);
}
