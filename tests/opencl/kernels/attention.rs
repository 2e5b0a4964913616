//! `rope`, `attend`, `attend_one`, `merge` and `observe` against the CPU's rows, its attention and what slots receive
//! of it.

use super::{Dims, EPS, SMALL, buffer, floats, kernel, read, same, state};
use crate::device;
use crate::support::random::Random;
use antigravity::opencl::{Buffer, Device};
use numeric::kv::{self, KvType, KvTypes};
use numeric::simd::attend::{CHUNK, FULL_ATTENTION, KvChunk, Partial, attend, merge_partial};
use numeric::simd::{Isa, kv_row, ops};

const ROPE: &str = include_str!("../../../kernels/rope.cl");
const ATTEND: &str = include_str!("../../../kernels/attend.cl");
const ATTEND_ONE: &str = include_str!("../../../kernels/attend_one.cl");
const MERGE: &str = include_str!("../../../kernels/merge.cl");
const OBSERVE: &str = include_str!("../../../kernels/observe.cl");

/// Inputs of the kernels, from which the expected outputs are computed.
struct Case<const HD: usize> {
    dims: Dims,
    types: KvTypes,
    capacity: usize,
    /// Filled slots before the new tokens.
    before: usize,
    /// `[token][x | cos | sin]`
    rows: Vec<Vec<f32>>,
    /// `[token][QKV]`
    qkv: Vec<Vec<f32>>,
    /// `[q | k][HD]`
    norms: Vec<f32>,
    /// Of keys and queries of a rotated type: `[kv_head][mean | scale | inverse][HD]`
    calibration: Vec<f32>,
    /// The cache before: `[kv_head][slot][row bytes]`
    k: Vec<u8>,
    v: Vec<u8>,
    /// Last tokens whose attention is observed.
    observed: usize,
    /// The mass before, of the first so many slots: `[kv_head][slot]`; what follows is nothing yet.
    mass: Vec<f32>,
    massed: usize,
}

impl<const HD: usize> Case<HD> {
    fn new(types: KvTypes, before: usize, n: usize) -> Self {
        let (dims, r) = (Dims { head_dim: HD, ..SMALL }, &mut Random(7));
        let capacity = before + n + 3;
        let mut cache = |kind: KvType| {
            let rows = (0..dims.kv_heads * capacity).map(|_| {
                let mut row = vec![0; kind.row_bytes(HD)];
                kv_row::encode_row(Isa::Scalar, kind, &r.floats(HD), &mut row);
                row
            });
            rows.collect::<Vec<_>>().concat()
        };
        let (k, v) = (cache(types.k), cache(types.v));
        let rows = (0..n).map(|_| r.floats(dims.dim + HD)).collect();
        let qkv = (0..n).map(|_| r.floats(dims.qkv())).collect();
        let (norms, mass) = (r.floats(2 * HD), r.floats(dims.kv_heads * capacity));
        let calibration = r.floats(dims.kv_heads * 3 * HD);
        let (observed, massed) = (n.div_ceil(2), before - before / 3);
        Self { dims, types, capacity, before, rows, qkv, norms, calibration, k, v, observed, mass, massed }
    }

    fn calibration(&self, kv_head: usize) -> [&[f32]; 3] {
        std::array::from_fn(|i| &self.calibration[(3 * kv_head + i) * HD..][..HD])
    }

    /// Normed and positioned head of token `t` at `start` of its row.
    fn head(&self, t: usize, start: usize, norm: &[f32]) -> [f32; HD] {
        let mut x = [0.0; HD];
        ops::rms_norm(Isa::Scalar, &self.qkv[t][start..start + HD], norm, EPS, &mut x);
        let angles = &self.rows[t][self.dims.dim..];
        ops::apply_rope(Isa::Scalar, &mut x, &angles[..HD / 2], &angles[HD / 2..]);
        x
    }

    /// The CPU's cache after, and attention `[token][head][HD]`.
    fn expected(&self) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
        let (mut k, mut v, mut att) = (self.k.clone(), self.v.clone(), Vec::new());
        let (dims, types) = (self.dims, self.types);
        let (k_row, v_row) = (types.k.row_bytes(HD), types.v.row_bytes(HD));
        for t in 0..self.qkv.len() {
            for head in 0..dims.kv_heads {
                let slot = head * self.capacity + self.before + t;
                let mut x = self.head(t, dims.q_pad() + head * HD, &self.norms[HD..]);
                if types.k.is_rotated() {
                    let [mean, scale, _] = self.calibration(head);
                    x.iter_mut().zip(mean.iter().zip(scale)).for_each(|(x, (m, s))| *x = (*x - m) * s);
                    kv::hadamard_transform(&mut x);
                }
                kv_row::encode_row(Isa::Scalar, types.k, &x, &mut k[slot * k_row..][..k_row]);
                let mut x: [f32; HD] =
                    std::array::from_fn(|i| self.qkv[t][dims.q_pad() + dims.kv_pad() + head * HD + i]);
                if types.v.is_rotated() {
                    kv::hadamard_transform(&mut x);
                }
                kv_row::encode_row(Isa::Scalar, types.v, &x, &mut v[slot * v_row..][..v_row]);
            }
            for head in 0..dims.heads {
                let start = head / (dims.heads / dims.kv_heads) * self.capacity;
                let rows = (&k[start * k_row..], &v[start * v_row..]);
                let (sum, _) = self.attention(t, head, rows);
                let mut out = sum.o.map(|o| o / sum.l);
                if self.types.v.is_rotated() {
                    kv::hadamard_transform(&mut out);
                }
                att.extend_from_slice(&out);
            }
        }
        (k, v, att)
    }

    /// The CPU's mass after, with its cache after.
    fn expected_mass(&self, (k, v): (&[u8], &[u8])) -> Vec<f32> {
        let (k_row, v_row) = (self.types.k.row_bytes(HD), self.types.v.row_bytes(HD));
        let (n, group, mut mass) = (self.qkv.len(), self.dims.heads / self.dims.kv_heads, self.mass.clone());
        for (kv_head, mass) in mass.chunks_mut(self.capacity).enumerate() {
            mass[self.massed..self.before + n].fill(0.0);
            let rows = (&k[kv_head * self.capacity * k_row..], &v[kv_head * self.capacity * v_row..]);
            for t in n - self.observed..n {
                let heads = kv_head * group..(kv_head + 1) * group;
                let of_heads: Vec<_> = heads.map(|head| self.attention(t, head, rows)).collect();
                for (slot, mass) in mass[..self.before + t + 1].iter_mut().enumerate() {
                    // The largest of one score is the score.
                    let weigh = |(all, q): &(Partial<HD>, [f32; HD])| {
                        let mut part = [Partial::EMPTY];
                        let kv = KvChunk {
                            k: &rows.0[slot * k_row..],
                            v: &rows.1[slot * v_row..],
                            types: self.types,
                            window: FULL_ATTENTION,
                        };
                        attend::<HD>(Isa::Scalar, kv, &[*q], &[1], &mut part);
                        let mut e = [part[0].m - all.m];
                        ops::exp_in_place(Isa::Scalar, &mut e);
                        e[0] / all.l
                    };
                    *mass += of_heads.iter().map(weigh).reduce(|a, b| a + b).unwrap();
                }
            }
        }
        mass
    }

    /// Computes the attention of a query before the division, and the query.
    fn attention(&self, t: usize, head: usize, (k, v): (&[u8], &[u8])) -> (Partial<HD>, [f32; HD]) {
        let mut q = self.head(t, head * HD, &self.norms[..HD]);
        q.iter_mut().for_each(|x| *x *= 1.0 / (HD as f32).sqrt());
        if self.types.k.is_rotated() {
            let [_, _, inverse] = self.calibration(head / (self.dims.heads / self.dims.kv_heads));
            q.iter_mut().zip(inverse).for_each(|(q, inverse)| *q *= inverse);
            kv::hadamard_transform(&mut q);
        }
        let (slots, mut sum) = (self.before + t + 1, Partial::EMPTY);
        for first in (0..slots).step_by(CHUNK) {
            let mut part = [Partial::EMPTY];
            let (k, v) = (&k[first * self.types.k.row_bytes(HD)..], &v[first * self.types.v.row_bytes(HD)..]);
            let seen = (slots - first).min(CHUNK);
            attend::<HD>(
                Isa::Scalar,
                KvChunk { k, v, types: self.types, window: FULL_ATTENTION },
                &[q],
                &[seen],
                &mut part,
            );
            merge_partial(Isa::Scalar, &mut sum, &part[0]);
        }
        (sum, q)
    }

    fn options(&self, items: usize, more: &str) -> String {
        let index = |t: KvType| KvType::ALL.iter().position(|&x| x == t).unwrap();
        let KvTypes { k, v } = self.types;
        let cache = format!(
            "-DK_TYPE={} -DV_TYPE={} -DK_ROW={} -DV_ROW={} -DKV_BLOCK={} {more}",
            index(k),
            index(v),
            k.row_bytes(HD),
            v.row_bytes(HD),
            KvType::block_len(HD)
        );
        self.dims.options(items, &cache)
    }

    /// Buffers of state, qkv, norms, keys, values, attention.
    fn buffers(&self, device: &Device) -> [Buffer; 6] {
        let n = self.qkv.len();
        // A token of another sequence comes first in the pass.
        let r = &mut Random(8);
        let (row, other) = (r.floats(self.dims.dim + HD), r.floats(self.dims.qkv()));
        [
            floats(device, &state([0, 0], &[vec![row], self.rows.clone()].concat())),
            floats(device, &[other, self.qkv.concat()].concat()),
            floats(device, &self.norms),
            buffer(device, &self.k),
            buffer(device, &self.v),
            floats(device, &vec![0.0; (1 + n) * self.dims.heads * HD]),
        ]
    }

    /// The run, as kernels are told it.
    fn run(&self) -> [i32; 4] {
        [1, self.qkv.len(), self.before, self.capacity].map(|n| n as i32)
    }

    fn check(&self, what: &str, [_, _, _, k, v, att]: &[Buffer; 6]) {
        let what = format!("{what}, heads of {HD}, {}", self.types);
        let (want_k, want_v, want) = self.expected();
        let bytes = |b: &Buffer| {
            let mut bytes = vec![0; b.len()];
            b.read(0, &mut bytes).unwrap();
            bytes
        };
        for (part, found, want) in [("keys", bytes(k), want_k), ("values", bytes(v), want_v)] {
            let other = found.iter().zip(&want).filter(|(a, b)| a != b).count();
            let first = found.iter().zip(&want).position(|(a, b)| a != b);
            assert!(
                other == 0,
                "{what}: {other} bytes of {} of {part} differ, from {first:?} on",
                want.len()
            );
        }
        let att = read(att);
        let (other, found) = att.split_at(self.dims.heads * HD);
        same(&what, found, &want);
        assert!(other.iter().all(|&x| x == 0.0), "{what}: another sequence's attention");
    }

    /// Observes what attention has just left in `softmax`.
    fn observe(&self, device: &Device, [s, qkv, norms, k, v, _]: &[Buffer; 6], softmax: &Buffer) {
        let (n, mass) = (self.qkv.len(), floats(device, &self.mass));
        let options = self.options(64, if n == 1 { "-DONE" } else { "" });
        let calibration = &floats(device, &self.calibration);
        let buffers = [s, qkv, norms, calibration, k, softmax, &mass];
        let mut observe = kernel(device, ("observe", OBSERVE), &options, &buffers);
        let observed = [self.observed as i32, self.massed as i32];
        observe.set_ints(7, &self.run()).unwrap().set_ints(8, &observed).unwrap();
        let items = (self.before + n).next_multiple_of(64);
        device.launch(&observe, &[items, self.dims.kv_heads], &[64, 1]).unwrap();
        let [k, v] = [k, v].map(|b| {
            let mut bytes = vec![0; b.len()];
            b.read(0, &mut bytes).unwrap();
            bytes
        });
        let what = format!("mass, heads of {HD}, {}, {n} tokens", self.types);
        same(&what, &read(&mass), &self.expected_mass((&k, &v)));
    }

    /// With tiles of so many queries, slots, and queries of an item.
    fn many(&self, device: &Device, [queries, slots, each]: [usize; 3]) {
        let all @ [s, qkv, norms, k, v, att] = &self.buffers(device);
        let (n, d) = (self.qkv.len(), self.dims);
        let calibration = &floats(device, &self.calibration);
        let mut rope =
            kernel(device, ("rope", ROPE), &self.options(32, ""), &[s, qkv, norms, calibration, k, v]);
        rope.set_ints(6, &self.run()).unwrap();
        device.launch(&rope, &[(d.heads + 2 * d.kv_heads) * 32, n], &[32, 1]).unwrap();
        let items = queries / each * (slots / 4);
        let options = format!("-DQUERIES={queries} -DSLOTS={slots} -DQUERIES_PER_ITEM={each}");
        let options = self.options(items, &options);
        let softmax = floats(device, &vec![f32::NAN; n * d.heads * 2]);
        let mut attend = kernel(device, ("attend", ATTEND), &options, &[qkv, k, v, att, &softmax]);
        attend.set_ints(5, &self.run()).unwrap().set_int(6, self.observed as i32).unwrap();
        let tiles = (n * d.heads / d.kv_heads).div_ceil(queries);
        device.launch(&attend, &[tiles * items, d.kv_heads], &[items, 1]).unwrap();
        self.check("many tokens", all);
        self.observe(device, all, &softmax);
    }

    fn one(&self, device: &Device) {
        let all @ [s, qkv, norms, k, v, att] = &self.buffers(device);
        let (d, chunks) = (self.dims, self.before / CHUNK + 1);
        // At least one for each element that is summed at once.
        let items = if HD > 64 { 256 } else { 64 };
        let parts = floats(device, &vec![0.0; chunks * d.heads * HD]);
        let ml = floats(device, &vec![0.0; chunks * d.heads * 2]);
        let args = [s, qkv, norms, &floats(device, &self.calibration), k, v, &parts, &ml];
        let mut attend = kernel(device, ("attend_one", ATTEND_ONE), &self.options(items, ""), &args);
        attend.set_ints(8, &self.run()).unwrap();
        device.launch(&attend, &[chunks * d.kv_heads * items], &[items]).unwrap();
        let mut merge = kernel(device, ("merge", MERGE), &self.options(64, ""), &[&parts, &ml, att]);
        merge.set_ints(3, &[1, chunks as i32]).unwrap();
        device.launch(&merge, &[d.heads * 64], &[64]).unwrap();
        self.check("one token", all);
        self.observe(device, all, &ml);
    }
}

fn every_type<const HD: usize>(device: &Device, before: usize, n: usize) {
    let mixed = KvTypes { k: KvType::F16, v: KvType::Q4 };
    for types in KvType::ALL.map(KvTypes::same).into_iter().chain([mixed]) {
        let tiles = [[8, 16, 2], [32, 64, 4], [16, 64, 2]];
        // One of a device's tiles with every type, all with one.
        for tile in tiles.into_iter().take(if types == mixed { 3 } else { 1 }) {
            Case::<HD>::new(types, before, n).many(device, tile);
        }
        Case::<HD>::new(types, before, 1).one(device);
    }
}

/// One, two and three chunks of the context, the first token of all, heads of whole and of odd blocks.
#[test]
fn attention_has_the_cpus_bits_with_every_cache() {
    let Some(device) = device::device() else { return };
    every_type::<16>(&device, 0, 3);
    every_type::<20>(&device, 126, 5);
    every_type::<64>(&device, 256, 70);
}

#[test]
fn heads_wider_than_a_work_group_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    for kind in [KvType::F16, KvType::Q4] {
        Case::<512>::new(KvTypes::same(kind), 130, 3).many(&device, [4, 16, 2]);
        Case::<512>::new(KvTypes::same(kind), 130, 1).one(&device);
    }
}

/// As much as oclgrind runs in a while.
#[test]
fn attention_has_the_cpus_bits_on_small_shapes() {
    let Some(device) = device::device() else { return };
    for kind in [KvType::F32, KvType::Q8, KvType::Q4] {
        Case::<32>::new(KvTypes::same(kind), 4, 2).many(&device, [8, 16, 2]);
        Case::<32>::new(KvTypes::same(kind), 129, 1).one(&device);
        // Rows of whole words, of which sixteen bytes may begin in the middle of one.
        Case::<64>::new(KvTypes::same(kind), 6, 1).one(&device);
    }
}
