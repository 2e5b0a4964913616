//! Every kernel against the definition of the products, bit for bit.

use super::*;
use crate::quant::format::{BlockScales, ScaleKind};
use files::blocks::BLOCK;
use half::f16;

/// One row times one token: the definition.
fn dot(format: Format, (quants, scales): (&[u8], &[u8]), row: usize, acts: &[ActBlock]) -> f32 {
    let mut acc = 0.0f32;
    for (b, act) in acts.iter().enumerate() {
        let integers =
            format.decode_integers(&quants[b * format.quant_bytes()..], row, format.code_levels().as_ref());
        let of_half = |half: usize| -> i32 {
            (16 * half..16 * half + 16).map(|c| i32::from(integers[c]) * i32::from(act.q[c])).sum()
        };
        let BlockScales { d, minimum, .. } = format.decode_scales(scales, row, b);
        if !format.has_half_scales() {
            acc = ((of_half(0) + of_half(1)) as f32).mul_add(d * act.d, acc);
            if format.has_minimum() {
                acc = minimum.mul_add(act.d * (-act.offset / 8) as f32, acc);
            }
            continue;
        }
        let run = &scales[b / 8 * format.scale_bytes()..];
        let half = |at: usize| f16::from_le_bytes([run[at], run[at + 1]]).to_f32() * format.scale_factor();
        let byte = |h: usize| scales[format.block_scales_at(b) + 16 * h + row];
        let scale = |h: usize| match format.scale_kind() {
            ScaleKind::Halves => f32::from(byte(h) as i8),
            ScaleKind::HalfMinimums => f32::from(byte(h) & 15),
            _ => f16::from_bits(u16::from(byte(h)) << 7).to_f32(),
        };
        let d = if format.half_bytes() > 0 { half(2 * row) } else { format.scale_factor() };
        let sum = (of_half(1) as f32).mul_add(scale(1), of_half(0) as f32 * scale(0));
        acc = sum.mul_add(d * act.d, acc);
        if format.has_minimum() {
            let of_acts =
                act.q.as_chunks::<16>().0.iter().map(|q| q.iter().map(|&q| i32::from(q)).sum::<i32>());
            let minimum: i32 = of_acts.enumerate().map(|(h, sum)| i32::from(byte(h) >> 4) * sum).sum();
            acc = (minimum as f32).mul_add(-(half(32 + 2 * row) * act.d), acc);
        }
    }
    acc
}

/// A seeded generator, so that failures repeat.
struct Seeded(u64);

impl Seeded {
    fn byte(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 56) as u8
    }

    /// Bytes without a pattern, all bits set, none, or the most negative i8.
    fn bytes(&mut self, into: &mut [u8]) {
        let kind = self.byte() % 6;
        for x in into {
            *x = match kind {
                0 => 0xff,
                1 => 0,
                2 => 0x80,
                _ => self.byte(),
            };
        }
    }

    /// A finite f16: of ordinary size, or any at all.
    fn half(&mut self) -> [u8; 2] {
        let x = u16::from_le_bytes([self.byte(), self.byte()]);
        let x = if self.byte() < 128 { (0x1800 + x % 0x2000) | (x & 0x8000) } else { x };
        (if x & 0x7c00 == 0x7c00 { x & 0x83ff } else { x }).to_le_bytes()
    }

    /// A group's planes: each row's bytes of a block are of one kind, and so are the scales of sixteen rows.
    fn group(&mut self, format: Format, blocks: usize) -> (Vec<u8>, Vec<u8>) {
        let (quants, scales) = format.group_bytes(blocks * BLOCK);
        let (mut quants, mut scales) = (vec![0; quants], vec![0; scales]);
        for block in quants.chunks_mut(format.quant_bytes()) {
            for row in 0..16 {
                let mut bytes = [0; 32];
                self.bytes(&mut bytes);
                for (v, vector) in block.chunks_mut(64).enumerate() {
                    vector[4 * row..][..4].copy_from_slice(&bytes[4 * v..][..4]);
                }
            }
        }
        for run in scales.chunks_mut(format.scale_bytes()) {
            let halves = format.half_bytes();
            run[..halves].as_chunks_mut().0.iter_mut().for_each(|half| *half = self.half());
            for block_scales in run[halves..].chunks_mut(16) {
                self.bytes(block_scales);
                match format.scale_kind() {
                    ScaleKind::Halves if format == Format::Q6_K => {}
                    ScaleKind::Blocks if format == Format::IQ4_XS => {}
                    ScaleKind::HalfMinimums => {}
                    ScaleKind::Exponents => block_scales.iter_mut().for_each(|x| *x = (*x).min(140)),
                    ScaleKind::Minifloats => block_scales.iter_mut().for_each(|x| *x &= 127),
                    _ => block_scales.iter_mut().for_each(|x| *x &= 63),
                }
            }
        }
        (quants, scales)
    }

    /// Activations without a pattern, or at one or at both ends, or zeros.
    fn act(&mut self) -> ActBlock {
        let kind = self.byte() % 6;
        let q: [i8; BLOCK] = std::array::from_fn(|i| match kind {
            0 => 127,
            1 => -127,
            2 => [127, -127][i / 16],
            3 => [127, -127][usize::from(self.byte() & 1)],
            _ => (self.byte() as i8).max(-127),
        });
        let d = match self.byte() % 8 {
            0 => return ActBlock::ZERO,
            1 => 3e-39,
            2 => 1e30,
            _ => f32::from(self.byte()) / 1000.0,
        };
        ActBlock { d, offset: -8 * q.iter().map(|&q| i32::from(q)).sum::<i32>(), q }
    }
}

fn holds(format: Format, (groups, blocks, tokens): (usize, usize, usize), random: &mut Seeded) {
    let planes: Vec<_> = (0..groups).map(|_| random.group(format, blocks)).collect();
    let quants: Vec<u8> = planes.iter().flat_map(|p| p.0.clone()).collect();
    let scales: Vec<u8> = planes.iter().flat_map(|p| p.1.clone()).collect();
    let acts: Vec<ActBlock> = (0..tokens * blocks).map(|_| random.act()).collect();
    let w = Groups { format, quants: &quants, scales: &scales, groups, blocks };
    let mut want = vec![[0u32; 16]; groups * tokens];
    for (g, (quants, scales)) in planes.iter().enumerate() {
        for (t, acts) in acts.chunks(blocks).enumerate() {
            want[g * tokens + t] =
                std::array::from_fn(|row| dot(format, (quants, scales), row, acts).to_bits());
        }
    }
    // Q4_0 has other kernels on these, which `tests/engine/kernels.rs` holds against each other.
    let sets = if format == Format::Q4_0 { vec![Isa::Scalar] } else { Isa::available() };
    for isa in sets {
        let mut out = vec![[f32::NAN; 16]; groups * tokens];
        multiply(isa, w, &acts, 0, &mut out);
        let out: Vec<_> = out.iter().map(|rows| rows.map(f32::to_bits)).collect();
        let name = isa.name();
        assert_eq!(out, want, "{format:?} of {groups} groups, {blocks} blocks x {tokens} on {name}");
    }
}

/// Every format and number of tokens, whole runs of blocks and of scales and parts of one.
#[test]
fn native_products_are_what_they_are_defined_to_be() {
    let mut random = Seeded(1);
    for format in Format::ALL {
        for tokens in (1..=13).chain([64]) {
            holds(format, (1, 8, tokens), &mut random);
            holds(format, (3, 24, tokens), &mut random);
            holds(format, (2, 1 + tokens % 23, tokens), &mut random);
        }
    }
}
