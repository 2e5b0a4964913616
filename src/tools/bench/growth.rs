//! How decode slows down with depth: what reading the cache should cost, and what it does.

use super::rows::{Row, Test};
use crate::model::device::read_bytes;
use serde::Serialize;

/// Time of a token at some depth; nothing for rows that have no such prediction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Growth {
    ms_per_token: Option<f64>,
    /// The time without depth, and what it costs to read the slots before at the machine's read bandwidth.
    predicted_ms_per_token: Option<f64>,
    /// How much longer than predicted.
    deviation_percent: Option<f64>,
}

impl Growth {
    pub fn new(measured_ms: f64, predicted_ms: f64) -> Self {
        Self {
            ms_per_token: Some(measured_ms),
            predicted_ms_per_token: Some(predicted_ms),
            deviation_percent: Some(100.0 * (measured_ms / predicted_ms - 1.0)),
        }
    }
}

/// Bytes of the cache that each of `n` decoded tokens reads on average: the slots filled before the first one, and those
/// of the tokens so far.
pub fn kv_bytes(row: &Row, n: usize) -> f64 {
    read_bytes(row.kv_types, row.depth as f64 + (n as f64 + 1.0) / 2.0)
}

/// The growth of a row that decodes at some depth; `None` without the same row at depth 0. `speeds` are all rows with
/// their tokens per second, `bandwidth` is in bytes per second.
///
/// The row at depth 0 reads the slots of its own tokens too, so only the difference is added.
pub fn of(row: &Row, speeds: &[(Row, f64)], bandwidth: f64) -> Option<Growth> {
    let Test::Decode(n) = row.test else { return None };
    let shallow = Row { depth: 0, ..*row };
    let speed = |row: &Row| speeds.iter().find(|(r, _)| r == row).map(|s| s.1);
    if row.depth == 0 {
        return None;
    }
    let added = (kv_bytes(row, n) - kv_bytes(&shallow, n)) / bandwidth;
    Some(Growth::new(1e3 / speed(row)?, 1e3 * (1.0 / speed(&shallow)? + added)))
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::row;
    use super::*;
    use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS};
    use numeric::kv::{KvType, KvTypes};

    #[test]
    fn bytes_are_those_of_the_cache() {
        let types = KvTypes { k: KvType::F16, v: KvType::Q4 };
        let row = Row { kv_types: types, ..row(Test::Decode(3), 8) };
        let slot = LAYERS * KV_HEADS * (KvType::F16.row_bytes(HEAD_DIM) + KvType::Q4.row_bytes(HEAD_DIM));
        // Three tokens read 9, 10 and 11 slots.
        assert_eq!(kv_bytes(&row, 3), 10.0 * slot as f64);
    }

    #[test]
    fn only_rows_with_a_shallow_twin_grow() {
        let (shallow, deep) = (row(Test::Decode(3), 0), row(Test::Decode(3), 8));
        let speeds = [(row(Test::Prefill(3), 0), 9.0), (shallow, 4.0), (deep, 2.0)];
        let bandwidth = (kv_bytes(&deep, 3) - kv_bytes(&shallow, 3)) * 8.0;
        let growth = of(&deep, &speeds, bandwidth).expect("a twin");
        assert_eq!(growth, Growth::new(500.0, 375.0));
        assert!(growth.deviation_percent.is_some_and(|d| (d - 100.0 / 3.0).abs() < 1e-9));
        assert_eq!(of(&shallow, &speeds, bandwidth), None);
        assert_eq!(of(&row(Test::Prefill(3), 8), &speeds, bandwidth), None);
        assert_eq!(of(&Row { threads: 9, ..deep }, &speeds, bandwidth), None);
        assert_eq!(of(&deep, &speeds[2..], bandwidth), None);
    }
}
