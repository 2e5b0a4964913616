//! Logarithms of probabilities against f64.

use super::*;

fn plain(logits: &[f32]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&x| libm::exp(f64::from(x) - f64::from(most))).sum();
    logits.iter().map(|&x| f64::from(x) - f64::from(most) - libm::log(sum)).collect()
}

#[test]
fn logprobs_are_those_of_the_softmax_in_order() {
    let mut random = Rng::new(31);
    for (vocab, spread) in [(1, 1.0), (7, 50.0), (900, 8.0), (5000, 30.0)] {
        let logits: Vec<f32> =
            (0..vocab).map(|_| (random.next_f32() * 500.0).floor() / 500.0 * spread - 3.0).collect();
        let want = plain(&logits);
        let chosen = vocab as u32 / 2;
        for count in [0, 1, 20, 1000] {
            let mut logprobs = Logprobs::new(count, vocab).expect("a count");
            logprobs.compute_logprobs(&logits, chosen);
            let close = |p: &Logprob| (p.logprob - want[p.id as usize]).abs() < 1e-6;
            assert!(logprobs.last().chosen.id == chosen && close(&logprobs.last().chosen));
            let mut ids: Vec<u32> = (0..vocab as u32).collect();
            ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
            ids.truncate(count);
            assert_eq!(logprobs.last().top.iter().map(|p| p.id).collect::<Vec<_>>(), ids);
            assert!(logprobs.last().top.iter().all(close));
            let sum: f64 = logprobs.last().top.iter().map(|p| libm::exp(p.logprob)).sum();
            assert!(sum < 1.0 + 1e-6, "{sum}");
            assert!(count < vocab || (sum - 1.0).abs() < 1e-6, "{sum}");
        }
    }
}

#[test]
fn strange_logits_have_logprobs() {
    let inf = f32::INFINITY;
    let of = |logits: &[f32], chosen: u32| {
        let mut logprobs = Logprobs::new(3, logits.len()).expect("a count");
        logprobs.compute_logprobs(logits, chosen);
        (
            logprobs.last().chosen.logprob,
            logprobs.last().top.iter().map(|p| (p.id, p.logprob)).collect::<Vec<_>>(),
        )
    };
    let none = f64::NEG_INFINITY;
    assert_eq!(of(&[f32::NAN, -inf], 0), (none, vec![]));
    assert_eq!(of(&[f32::NAN, 2.0, -inf], 2), (none, vec![(1, 0.0)]));
    let (chosen, top) = of(&[1.0, inf, f32::NAN], 1);
    assert_eq!((chosen, top[0]), (0.0, (1, 0.0)));
    assert!(top.len() == 2 && top[1].0 == 0 && top[1].1 < -1e38);
    let Err(Error::Usage(message)) = Logprobs::new(MAX_LOGPROBS + 1, 9999).map(|_| ()) else {
        panic!("too many were accepted")
    };
    assert!(message.starts_with("`GenerateOptions::logprobs` 1001: use a number"), "{message}");
}
