//! Numbers that look random and repeat, so that failures do too.

use antigravity::dims::VOCAB;

/// A linear congruential generator with Knuth's constants, from its seed on.
pub struct Random(pub u64);

impl Random {
    /// 31 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// From 0 to `n - 1`.
    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// From -1 to 1.
    pub fn float(&mut self) -> f32 {
        self.below(20_001) as f32 / 10_000.0 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    /// Mostly ordinary values, some zeros, some large.
    pub fn uneven(&mut self) -> f32 {
        let x = self.float();
        match self.below(50) {
            0 => 0.0,
            1 => x * 100.0,
            _ => x,
        }
    }

    pub fn unevens(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uneven()).collect()
    }
}

/// Token ids that are no text but spread over the vocabulary.
pub fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect()
}
