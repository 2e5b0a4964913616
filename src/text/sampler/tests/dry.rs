//! DRY by hand: lengths, overlaps, the window and sequence breakers. `stages` holds it against a plain loop.

use super::*;

const TEXTS: &[&str] = &["a", "b", "c", "d", "\\n", "us", "er:", "<end>"];
const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;
const D: u32 = 3;
const LINE: u32 = 4;
const US: u32 = 5;
const ER: u32 = 6;
const END: u32 = 7;

fn dry(allowed_length: usize, breakers: &[&str]) -> DryOptions {
    let breakers = breakers.iter().map(|b| b.to_string()).collect();
    DryOptions { multiplier: 0.5, base: 2.0, allowed_length, window: None, breakers }
}

/// The penalties on the logits after this history.
fn taken(dry: DryOptions, recent: &[u32]) -> Vec<f32> {
    let o = SamplerOptions { dry, repetition_penalty: 1.0, ..Default::default() };
    let pieces = Arc::new(TokenBytes::of_texts(TEXTS, &[END]));
    let mut sampler = Sampler::new(o, TEXTS.len()).expect("valid").with_pieces(&pieces);
    let mut logits = vec![0.0; TEXTS.len()];
    sampler.apply_penalties(&mut logits, recent);
    assert!(sampler.counts.iter().all(|n| *n == 0));
    logits.iter().map(|x| 0.0 - x).collect()
}

/// Penalties of zero, except on one token.
fn only(id: u32, penalty: f32) -> Vec<f32> {
    let mut all = vec![0.0; TEXTS.len()];
    all[id as usize] = penalty;
    all
}

#[test]
fn the_penalty_grows_with_the_length_of_the_repetition() {
    let nothing = only(A, 0.0);
    assert_eq!(taken(dry(2, &[]), &[A, B, C, A, B]), only(C, 0.5));
    assert_eq!(taken(dry(1, &[]), &[A, B, C, A, B]), only(C, 1.0));
    assert_eq!(taken(dry(3, &[]), &[A, B, C, A, B]), nothing);
    assert_eq!(taken(dry(1, &[]), &[D, A, B, C, D, A, B]), only(C, 2.0));
    // Of several, the longest counts for each token.
    let both = taken(dry(1, &[]), &[A, B, C, B, D, B, C, A, B]);
    assert_eq!((both[C as usize], both[D as usize]), (1.0, 0.5));
    for short in [&[][..], &[A], &[A, B], &[99, 99]] {
        assert_eq!(taken(dry(1, &[]), short), nothing);
    }
}

#[test]
fn repetitions_overlap_with_what_they_repeat() {
    assert_eq!(taken(dry(2, &[]), &[A, A, A, A]), only(A, 1.0));
    assert_eq!(taken(dry(2, &[]), &[A, B, A, B, A, B]), only(A, 2.0));
}

#[test]
fn only_the_window_is_searched() {
    let window = |n: usize| DryOptions { window: Some(n), ..dry(2, &[]) };
    let recent = [D, A, B, C, D, A, B];
    assert_eq!(taken(window(7), &recent), only(C, 1.0));
    assert_eq!(taken(window(6), &recent), only(C, 0.5));
    assert_eq!(taken(window(5), &recent), only(A, 0.0));
    assert_eq!(taken(window(0), &recent), only(A, 0.0));
}

#[test]
fn no_repetition_reaches_across_a_breaker() {
    // `\\n` is one token of two characters, of which one is enough.
    let recent = [A, LINE, B, C, D, A, LINE, B, C];
    assert_eq!(taken(dry(2, &[]), &recent), only(D, 2.0));
    assert_eq!(taken(dry(2, &["n"]), &recent), only(D, 0.5));
    assert_eq!(taken(dry(2, &["x", "\\n"]), &recent), only(D, 0.5));
    assert_eq!(taken(dry(3, &["n"]), &recent), only(D, 0.0));
    // After a breaker nothing is repeated yet, and a breaker itself is never penalised.
    assert_eq!(taken(dry(1, &["n"]), &[A, LINE, B, A, LINE]), only(A, 0.0));
    assert_eq!(taken(dry(1, &["n"]), &[A, LINE, B, A]), only(A, 0.0));
}

#[test]
fn breakers_may_lie_across_tokens() {
    let recent = [US, ER, C, D, A, US, ER, C, D];
    assert_eq!(taken(dry(2, &[]), &recent), only(A, 2.0));
    assert_eq!(taken(dry(2, &["user:"]), &recent), only(A, 0.5));
    assert_eq!(taken(dry(2, &["ser"]), &recent), only(A, 0.5));
    // It ends in a longer token, and its beginning is no breaker.
    assert_eq!(taken(dry(2, &["use"]), &recent), only(A, 0.5));
    assert_eq!(taken(dry(2, &["user:x"]), &recent), only(A, 2.0));
    let without = [B, ER, C, D, A, B, ER, C, D];
    assert_eq!(taken(dry(2, &["user:"]), &without), only(A, 2.0));
    // A short breaker that has ended does not end again in the tokens that a long one reaches back over.
    let recent = [A, B, C, D, A, B, C];
    assert_eq!(taken(dry(2, &["user:", "a"]), &recent), only(D, 0.5));
    assert_eq!(taken(dry(3, &["user:", "a"]), &recent), only(D, 0.0));
}

#[test]
fn control_tokens_are_breakers() {
    let recent = [A, END, B, C, D, A, END, B, C];
    assert_eq!(taken(dry(2, &[]), &recent), only(D, 0.5));
    assert_eq!(taken(dry(1, &[]), &[A, B, END, A, B]), only(A, 0.0));
    // Text does not go on over one.
    let recent = [US, END, ER, C, D, US, END, ER, C];
    assert_eq!(taken(dry(2, &["user:"]), &recent), only(D, 0.5));
}

/// A regression test: time once grew with the square of the history, and with the number of breakers.
#[test]
fn a_long_history_that_repeats_itself_takes_time_in_proportion() {
    let breakers: Vec<String> = (0..64).map(|i| format!("{}{i}", "a".repeat(60))).collect();
    let breakers: Vec<&str> = breakers.iter().map(String::as_str).collect();
    let endless = DryOptions { base: 1.0 + f32::EPSILON, ..dry(1, &breakers) };
    let began = std::time::Instant::now();
    let x = taken(endless, &[A; 300_000])[A as usize];
    assert!((0.5..0.6).contains(&x), "{x}");
    assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn largest_penalty_is_a_number() {
    for base in [1e30, 3.0, 1.0, 1.0 + f32::EPSILON] {
        let huge = DryOptions { multiplier: 1e10, base, ..dry(1, &[]) };
        let recent = [[A; 100], [A; 100]].concat();
        let x = taken(huge, &recent)[A as usize];
        assert!(x.is_finite() && x >= 1e10, "{x}");
        assert_eq!(x == f32::MAX, base > 2.0, "{base}");
    }
}
