//! Schedule of a hybrid sequence: chooses the device for prompts and tokens, by the user's positions or by measured
//! speed.

use crate::run::options::{FixedSchedule, Side};
use std::time::Duration;

/// Shortest prompt worth a switch: going there and back for fewer tokens costs more than it gains.
pub const SHORT_PROMPT: usize = 32;

/// Rule that chooses the device of a sequence's tokens.
#[derive(Debug, Clone, PartialEq)]
pub enum Schedule {
    /// By the user's choice.
    Fixed(FixedSchedule),
    /// By measured speed.
    Measured(MeasuredSchedule),
}

/// Measured speed of a device.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Speed {
    /// Seconds for one token of a prompt.
    pub prefill: f64,
    /// Seconds for one decoded token with an empty cache.
    pub decode: f64,
    /// Seconds that each filled slot adds to a decoded token.
    pub slot: f64,
}

impl Speed {
    /// Seconds for a decoded token over `slots` filled slots.
    pub fn token_seconds(&self, slots: usize) -> f64 {
        self.decode + self.slot * slots as f64
    }
}

/// Speeds of both devices, corrected while tokens are decoded: a device that throttles becomes slower.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredSchedule {
    /// `[CPU, GPU]`
    speeds: [Speed; 2],
    /// Recent times of tokens relative to the first measurement.
    factors: [f64; 2],
    /// Decoded tokens since the last switch.
    since: usize,
    /// Consecutive tokens for which the other device was faster, at least by [`SMALL_GAIN`].
    slower_tokens: usize,
}

/// Factor by which the other device must be faster, so that noise causes no switch.
const CLEAR_GAIN: f64 = 1.2;
/// Factor that suffices for [`MIN_SWITCH_INTERVAL`] consecutive tokens: noise does not last.
const SMALL_GAIN: f64 = 1.03;
/// Minimum number of tokens between two switches of decoding.
const MIN_SWITCH_INTERVAL: usize = 64;

impl MeasuredSchedule {
    /// A schedule with the speeds of `[CPU, GPU]`.
    pub fn new(speeds: [Speed; 2]) -> Self {
        // A sequence may switch right at its beginning.
        Self { speeds, factors: [1.0; 2], since: MIN_SWITCH_INTERVAL, slower_tokens: MIN_SWITCH_INTERVAL }
    }

    /// Current seconds for a token on this side.
    fn token_seconds(&self, side: Side, slots: usize) -> f64 {
        self.speeds[side as usize].token_seconds(slots) * self.factors[side as usize]
    }

    fn prompt_seconds(&self, side: Side, tokens: usize) -> f64 {
        self.speeds[side as usize].prefill * tokens as f64 * self.factors[side as usize]
    }

    /// The device, if any, that is much faster both for prompts and for tokens over up to `most` slots.
    pub fn single_best_device(&self, most: usize) -> Option<Side> {
        Side::ALL.into_iter().find(|&side| {
            let wins = |mine: f64, others: f64| mine * CLEAR_GAIN <= others;
            wins(self.prompt_seconds(side, 1), self.prompt_seconds(side.other_side(), 1))
                && [0, most]
                    .into_iter()
                    .all(|n| wins(self.token_seconds(side, n), self.token_seconds(side.other_side(), n)))
        })
    }
}

/// A switch that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedSwitch {
    /// The device.
    pub to: Side,
    /// Reason.
    pub why: String,
}

impl Schedule {
    /// A schedule with everything on the GPU.
    pub fn gpu_only() -> Self {
        Schedule::Fixed(FixedSchedule { prefill: Side::Gpu, to_gpu: vec![0], to_cpu: Vec::new() })
    }

    /// Switch before a prompt of `tokens` tokens, if one is due.
    pub fn switch_before_prefill(&mut self, now: Side, tokens: usize) -> Option<PlannedSwitch> {
        if tokens < SHORT_PROMPT {
            return None;
        }
        match self {
            Schedule::Fixed(f) if f.prefill != now => {
                Some(PlannedSwitch { to: f.prefill, why: format!("a prompt of {tokens} tokens") })
            }
            Schedule::Fixed(_) => None,
            Schedule::Measured(m) => {
                let (here, there) =
                    (m.prompt_seconds(now, tokens), m.prompt_seconds(now.other_side(), tokens));
                (there * SMALL_GAIN <= here).then(|| PlannedSwitch {
                    to: now.other_side(),
                    why: compare_times("a prompt", there, here),
                })
            }
        }
    }

    /// Switch before the token at `position` is decoded over `slots` slots, if one is due.
    pub fn switch_before_decode(
        &mut self,
        now: Side,
        position: usize,
        slots: usize,
    ) -> Option<PlannedSwitch> {
        match self {
            Schedule::Fixed(f) => {
                let to = f.side_at(position);
                (to != now).then(|| PlannedSwitch { to, why: format!("position {position}") })
            }
            Schedule::Measured(m) => {
                let (here, there) = (m.token_seconds(now, slots), m.token_seconds(now.other_side(), slots));
                m.slower_tokens = if there * SMALL_GAIN <= here { m.slower_tokens + 1 } else { 0 };
                let sure = m.slower_tokens > MIN_SWITCH_INTERVAL || there * CLEAR_GAIN <= here;
                if m.since < MIN_SWITCH_INTERVAL || m.slower_tokens == 0 || !sure {
                    return None;
                }
                (m.since, m.slower_tokens) = (0, 0);
                Some(PlannedSwitch { to: now.other_side(), why: compare_times("a token", there, here) })
            }
        }
    }

    /// Records the time of a decoded token.
    pub fn record_time(&mut self, side: Side, slots: usize, took: Duration) {
        let Schedule::Measured(m) = self else { return };
        let (now, idle) = (side as usize, side.other_side() as usize);
        let ratio = (took.as_secs_f64() / m.speeds[now].token_seconds(slots).max(1e-9)).clamp(0.25, 16.0);
        m.factors[now] += (ratio - m.factors[now]) / 16.0;
        // The idle device cools down.
        m.factors[idle] += (1.0 - m.factors[idle]) / 512.0;
        m.since = m.since.saturating_add(1);
    }
}

fn compare_times(what: &str, there: f64, here: f64) -> String {
    format!("{what} takes {:.2} ms there, {:.2} here", 1e3 * there, 1e3 * here)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_decide_where_tokens_are_decoded() {
        let fixed = FixedSchedule { prefill: Side::Cpu, to_gpu: vec![10, 30], to_cpu: vec![20, 40] };
        let sides: String = (0..50).map(|p| &fixed.side_at(p).name()[..1]).collect();
        assert_eq!(sides, ["C", "G", "C", "G", "C"].map(|s| s.repeat(10)).concat());
        let mut schedule = Schedule::Fixed(FixedSchedule::default_schedule());
        assert_eq!(schedule.switch_before_decode(Side::Cpu, 511, 511), None);
        assert_eq!(schedule.switch_before_decode(Side::Cpu, 512, 9).map(|m| m.to), Some(Side::Gpu));
        assert_eq!(schedule.switch_before_decode(Side::Gpu, 512, 9), None);
        assert_eq!(schedule.switch_before_prefill(Side::Gpu, SHORT_PROMPT).map(|m| m.to), Some(Side::Cpu));
        assert_eq!(schedule.switch_before_prefill(Side::Gpu, SHORT_PROMPT - 1), None);
    }

    fn speeds(cpu: [f64; 3], gpu: [f64; 3]) -> MeasuredSchedule {
        MeasuredSchedule::new([cpu, gpu].map(|[prefill, decode, slot]| Speed { prefill, decode, slot }))
    }

    #[test]
    fn the_faster_device_decodes_and_a_close_race_moves_nothing() {
        // The GPU is slower at first and faster from about 1,000 slots on.
        let mut schedule = Schedule::Measured(speeds([1e-3, 1e-2, 1e-5], [1e-4, 2e-2, 1e-7]));
        assert_eq!(schedule.switch_before_prefill(Side::Cpu, 100).map(|m| m.to), Some(Side::Gpu));
        let mut side = Side::Cpu;
        let mut moves = Vec::new();
        for slots in 0..4000 {
            if let Some(m) = schedule.switch_before_decode(side, slots, slots) {
                side = m.to;
                moves.push(slots);
            }
            let Schedule::Measured(m) = &schedule else { unreachable!() };
            let took = m.speeds[side as usize].token_seconds(slots);
            // Noise of a tenth either way.
            let noise = 1.0 + 0.1 * ((slots % 7) as f64 - 3.0) / 3.0;
            schedule.record_time(side, slots, Duration::from_secs_f64(took * noise));
        }
        assert_eq!((moves.len(), side), (1, Side::Gpu), "{moves:?}");
        assert!((1050..1300).contains(&moves[0]), "{moves:?}");
    }

    #[test]
    fn a_device_that_throttles_is_left() {
        let mut schedule = Schedule::Measured(speeds([1e-3, 1e-2, 0.0], [1e-3, 1.1e-2, 0.0]));
        let moved = (0..200).find(|_| {
            schedule.record_time(Side::Cpu, 10, Duration::from_millis(30));
            schedule.switch_before_decode(Side::Cpu, 10, 10).is_some()
        });
        assert!(moved.is_some_and(|n| (2..40).contains(&n)), "{moved:?}");
    }

    /// Total seconds and number of switches with measured speeds of 11 ms on the CPU and 10 ms on a GPU that is up to
    /// `most` times slower when it is hot.
    fn throttling(most: f64, tokens: usize) -> (f64, usize) {
        let mut schedule = Schedule::Measured(speeds([1e-3, 1.1e-2, 0.0], [1e-3, 1e-2, 0.0]));
        let (mut side, mut heat, mut all, mut moves) = (Side::Cpu, 0.0f64, 0.0, 0);
        for position in 0..tokens {
            if let Some(m) = schedule.switch_before_decode(side, position, position) {
                (side, moves) = (m.to, moves + 1);
            }
            let hot = side == Side::Gpu;
            heat += if hot { 0.02 * (1.0 - heat) } else { -0.002 * heat };
            let took = if hot { 1e-2 * (1.0 + (most - 1.0) * heat) } else { 1.1e-2 };
            schedule.record_time(side, position, Duration::from_secs_f64(took));
            all += took;
        }
        (all, moves)
    }

    #[test]
    fn a_gpu_that_throttles_never_costs_three_percent() {
        let tokens = 4000;
        for most in [1.0, 1.05, 1.2, 1.5, 2.0] {
            // The GPU alone is hot soon and stays so.
            let better = (1.1e-2f64).min(1e-2 * most) * tokens as f64;
            let (all, moves) = throttling(most, tokens);
            assert!(all <= 1.03 * better, "{most} times: {all} s, {better} s by the better one alone");
            assert!(moves <= 2 * tokens / 500, "{most} times: {moves} moves");
        }
    }

    #[test]
    fn one_device_is_enough_where_it_wins_everywhere() {
        assert_eq!(speeds([1e-3, 1e-2, 1e-6], [2e-3, 2e-2, 2e-6]).single_best_device(4096), Some(Side::Cpu));
        assert_eq!(speeds([2e-3, 2e-2, 2e-6], [1e-3, 1e-2, 1e-6]).single_best_device(4096), Some(Side::Gpu));
        assert_eq!(speeds([2e-3, 1e-2, 1e-5], [1e-3, 2e-2, 1e-7]).single_best_device(4096), None);
    }
}
