//! Plain encoders of the block formats: valid blocks near the values, no attempt at the best ones.

use files::blocks::gguf::decode_values;
use files::blocks::{BlockQ4, BlockType};
use half::{bf16, f16};

/// A row in blocks.
pub fn encode(block: BlockType, row: &[f32]) -> Vec<u8> {
    row.chunks_exact(block.values_per_block()).flat_map(|v| one(block, v)).collect()
}

fn one(block: BlockType, v: &[f32]) -> Vec<u8> {
    match block {
        BlockType::F32 => v[0].to_le_bytes().to_vec(),
        BlockType::F16 => f16::from_f32(v[0]).to_le_bytes().to_vec(),
        BlockType::BF16 => bf16::from_f32(v[0]).to_le_bytes().to_vec(),
        BlockType::Q4_0 => {
            let block = BlockQ4::quantise(v.try_into().unwrap());
            [&block.d.to_le_bytes()[..], &block.qs].concat()
        }
        BlockType::Q8_0 => {
            let (d, q) = symmetric(v, 127);
            [&d[..], &q.iter().map(|q| *q as i8 as u8).collect::<Vec<u8>>()].concat()
        }
        BlockType::Q5_0 => {
            let (d, q) = symmetric(v, 15);
            let q: Vec<u8> = q.iter().map(|q| (q + 16) as u8).collect();
            [&d[..], &fifth(&q), &nibbles(&q)].concat()
        }
        BlockType::Q4_1 => {
            let (head, q) = between(v, 15);
            [&head[..], &nibbles(&q)].concat()
        }
        BlockType::Q5_1 => {
            let (head, q) = between(v, 31);
            [&head[..], &fifth(&q), &nibbles(&q)].concat()
        }
        BlockType::Q4_K | BlockType::Q5_K => with_minimums(v, block),
        BlockType::Q6_K => q6_k(v),
        coded => without_pattern(coded, v),
    }
}

/// A block of bytes without a pattern, whose values are as large as those of `v` on average.
fn without_pattern(block: BlockType, v: &[f32]) -> Vec<u8> {
    let mut state = v.iter().fold(1u32, |all, x| all.wrapping_mul(31).wrapping_add(x.to_bits()));
    let mut bytes: Vec<u8> = (0..block.bytes_per_block())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    let size = |values: &[f32]| values.iter().map(|x| x * x).sum::<f32>().sqrt();
    set_scale(block, &mut bytes, 1.0);
    let mut decoded = vec![0.0; v.len()];
    decode_values(block, &bytes, &mut decoded);
    set_scale(block, &mut bytes, size(v) / size(&decoded));
    bytes
}

fn set_scale(block: BlockType, bytes: &mut [u8], d: f32) {
    let mut put = |at: usize, d: f32| bytes[at..at + 2].copy_from_slice(&half(d).0);
    match block {
        BlockType::Q2_K => {
            put(80, d);
            put(82, 1.5 * d);
        }
        BlockType::Q3_K => put(108, d),
        BlockType::TQ1_0 => put(52, d),
        BlockType::TQ2_0 => put(64, d),
        BlockType::IQ1_M => {
            let [low, high] = half(d).0;
            for (i, nibble) in [low << 4, low & 0xf0, high << 4, high & 0xf0].into_iter().enumerate() {
                bytes[49 + 2 * i] = bytes[49 + 2 * i] & 15 | nibble;
            }
        }
        BlockType::MXFP4 => bytes[0] = (127.0 + d.max(1e-30).log2().round()) as u8,
        // Bits 7 to 13 of an f16 that is 256 times smaller.
        BlockType::NVFP4 => bytes[..4].fill((f16::from_f32(d / 256.0).to_bits() >> 7) as u8),
        _ => put(0, d),
    }
}

fn half(x: f32) -> ([u8; 2], f32) {
    let x = f16::from_f32(x);
    (x.to_le_bytes(), x.to_f32())
}

/// `x / d` to the nearest, where that is a number.
fn nearest(x: f32, d: f32) -> i32 {
    if d == 0.0 { 0 } else { (x / d).round() as i32 }
}

fn largest(v: &[f32]) -> f32 {
    v.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// Integers of `-most..=most` and their scale.
fn symmetric(v: &[f32], most: i32) -> ([u8; 2], Vec<i32>) {
    let (bytes, d) = half(largest(v) / most as f32);
    (bytes, v.iter().map(|x| nearest(*x, d).clamp(-most, most)).collect())
}

/// Integers of `0..=most`, and scale and minimum.
fn between(v: &[f32], most: i32) -> ([u8; 4], Vec<u8>) {
    let (min, max) = v.iter().fold((f32::MAX, f32::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
    let ((d_bytes, d), (m_bytes, m)) = (half((max - min) / most as f32), half(min));
    let q = v.iter().map(|x| nearest(x - m, d).clamp(0, most) as u8).collect();
    ([d_bytes[0], d_bytes[1], m_bytes[0], m_bytes[1]], q)
}

fn nibbles(q: &[u8]) -> Vec<u8> {
    (0..16).map(|z| q[z] & 15 | (q[z + 16] & 15) << 4).collect()
}

fn fifth(q: &[u8]) -> [u8; 4] {
    q.iter().enumerate().fold(0u32, |bits, (i, q)| bits | u32::from(q >> 4) << i).to_le_bytes()
}

/// Q4_K and Q5_K: eight parts with a scale and a minimum of six bits each.
fn with_minimums(v: &[f32], block: BlockType) -> Vec<u8> {
    let most = if block == BlockType::Q5_K { 31 } else { 15 };
    let bounds = |part: &[f32]| part.iter().fold((0f32, 0f32), |(a, b), x| (a.min(*x), b.max(*x)));
    let parts: Vec<(f32, f32)> =
        v.chunks_exact(32).map(bounds).map(|(min, max)| ((max - min) / most as f32, -min)).collect();
    let over = |of: fn(&(f32, f32)) -> f32| half(parts.iter().map(of).fold(0.0, f32::max) / 63.0);
    let ((d_bytes, d), (m_bytes, dmin)) = (over(|p| p.0), over(|p| p.1));
    let six = |x: f32, of: f32| nearest(x, of).clamp(0, 63) as u8;
    let levels: Vec<(u8, u8)> = parts.iter().map(|(s, m)| (six(*s, d), six(*m, dmin))).collect();
    let mut scales = [0u8; 12];
    for j in 0..4 {
        let ((s, m), (s4, m4)) = (levels[j], levels[j + 4]);
        scales[j] = s | s4 >> 4 << 6;
        scales[j + 4] = m | m4 >> 4 << 6;
        scales[j + 8] = s4 & 15 | (m4 & 15) << 4;
    }
    let (mut low, mut high) = ([0u8; 128], [0u8; 32]);
    for (i, x) in v.iter().enumerate() {
        let (p, i) = (i / 32, i % 32);
        let (s, m) = (d * f32::from(levels[p].0), dmin * f32::from(levels[p].1));
        let q = nearest(x + m, s).clamp(0, most) as u8;
        low[p / 2 * 32 + i] |= (q & 15) << (p % 2 * 4);
        high[i] |= q >> 4 << p;
    }
    let high = if block == BlockType::Q5_K { &high[..] } else { &[] };
    [&d_bytes[..], &m_bytes, &scales, high, &low].concat()
}

/// Q6_K: sixteen parts with a signed scale of eight bits each; every other is negative.
fn q6_k(v: &[f32]) -> Vec<u8> {
    let parts: Vec<f32> = v.chunks_exact(16).map(|part| largest(part) / 31.0).collect();
    let (d_bytes, d) = half(largest(&parts) / 127.0);
    let sign = |i: usize| if i.is_multiple_of(2) { 1 } else { -1 };
    let levels: Vec<i32> =
        parts.iter().enumerate().map(|(i, s)| sign(i) * nearest(*s, d).clamp(0, 127)).collect();
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (i, x) in v.iter().enumerate() {
        let q = (nearest(*x, d * levels[i / 16] as f32).clamp(-31, 31) + 32) as u8;
        let (half, part, i) = (i / 128, i % 128 / 32, i % 32);
        low[64 * half + part % 2 * 32 + i] |= (q & 15) << (part / 2 * 4);
        high[32 * half + i] |= q >> 4 << (2 * part);
    }
    let levels: Vec<u8> = levels.iter().map(|s| *s as i8 as u8).collect();
    [&low[..], &high, &levels, &d_bytes].concat()
}
