//! The sampler's random numbers: xoshiro256++ seeded by SplitMix64 (Blackman and Vigna,
//! <https://prng.di.unimi.it>), identical on every machine.

use serde::{Deserialize, Serialize};

/// A random number generator whose whole state is four words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "[u64; 4]", into = "[u64; 4]")]
pub struct Rng {
    words: [u64; 4],
}

impl Rng {
    /// A generator seeded with `seed`.
    pub fn new(seed: u64) -> Self {
        let mut x = seed;
        let mut split_mix = || {
            x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        Self { words: [split_mix(), split_mix(), split_mix(), split_mix()] }
    }

    /// The state, to be saved.
    pub fn words(&self) -> [u64; 4] {
        self.words
    }

    /// Continues from a saved state; `None` for all zeros, from which the generator never moves.
    pub fn from_words(words: [u64; 4]) -> Option<Self> {
        (words != [0; 4]).then_some(Self { words })
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.words;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number uniform in `[0, 1)`: a multiple of 2^-24, so exact in f32.
    pub fn next_f32(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 * (1.0 / (1u32 << 24) as f32)
    }
}

impl TryFrom<[u64; 4]> for Rng {
    type Error = &'static str;

    fn try_from(words: [u64; 4]) -> Result<Self, Self::Error> {
        Self::from_words(words).ok_or("a random state of zeros")
    }
}

impl From<Rng> for [u64; 4] {
    fn from(rng: Rng) -> Self {
        rng.words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_words_are_those_of_the_reference_code() {
        // xoshiro256plusplus.c from the state 1, 2, 3, 4.
        let mut rng = Rng::from_words([1, 2, 3, 4]).expect("not all zero");
        let words: Vec<u64> = (0..4).map(|_| rng.next_u64()).collect();
        assert_eq!(words, [41943041, 58720359, 3588806011781223, 3591011842654386]);
        // splitmix64.c from 0.
        assert_eq!(Rng::new(0).words()[..2], [0xe220a8397b1dcdaf, 0x6e789e6aa1b965f4]);
    }

    #[test]
    fn a_saved_state_continues_the_sequence() {
        let mut rng = Rng::new(7);
        rng.next_u64();
        let mut copy = Rng::from_words(rng.words()).expect("not all zero");
        assert_eq!((0..9).map(|_| rng.next_u64()).collect::<Vec<_>>(), {
            (0..9).map(|_| copy.next_u64()).collect::<Vec<_>>()
        });
        assert_eq!(Rng::from_words([0; 4]), None);
    }

    #[test]
    fn uniform_fills_the_unit_interval() {
        let mut rng = Rng::new(1);
        let values: Vec<f32> = (0..100_000).map(|_| rng.next_f32()).collect();
        assert!(values.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
    }
}
