//! Compares logits, greedy texts and perplexity of real models with transformers in single precision, on the same
//! weights file.

use super::RealModel;
use crate::command;
use crate::error::{Error, Result};
use crate::json;
use crate::parity::compare::{TOLERANCE, max_abs, wrong_steps};
use crate::parity::engine::{Engine, Variant};
use crate::parity::{DECIDABLE, FLOAT, check_steps, reference};
use crate::test::report::Tally;
use serde::Deserialize;
use std::path::PathBuf;

/// Number of windows whose perplexity is compared; each takes a few seconds.
const WINDOWS: usize = 2;
/// Maximum relative error of the nats of a window.
const NATS: f64 = 1e-5;

/// The text whose perplexity is compared.
const TEXT: &str = "models/smollm2-135m/golden/text.txt";

/// `logits.json`: logits of random ids, and the greatest ones.
#[derive(Deserialize)]
struct LogitsReference {
    at: Vec<u32>,
    prompts: Vec<PromptReference>,
}

#[derive(Deserialize)]
struct PromptReference {
    prompt: String,
    ids: Vec<u32>,
    positions: Vec<PositionReference>,
}

#[derive(Deserialize)]
struct PositionReference {
    at: Vec<f64>,
    top: Vec<(u32, f64)>,
}

/// An entry of `greedy.json`.
#[derive(Deserialize)]
struct GreedyReference {
    greedy: Vec<u32>,
    margin: Vec<f64>,
}

#[derive(Deserialize)]
struct PerplexityReference {
    window: usize,
    nats: Vec<f64>,
}

fn file(model: &RealModel, name: &str) -> PathBuf {
    command::root().join("tests/fixtures/real").join(model.name).join(name)
}

pub(super) fn check(model: &RealModel, engine: &Engine, tally: &mut Tally) -> Result<()> {
    let LogitsReference { at, prompts } = json::read(&file(model, "logits.json"))?;
    let texts: Vec<GreedyReference> = json::read(&file(model, "greedy.json"))?;
    for (prompt, text) in prompts.iter().zip(texts).take(model.prompts) {
        let (what, ids, continued) = (&prompt.prompt, &prompt.ids, text.greedy);
        // The last token is not fed, as the reference did not.
        let fed = [&ids[..], &continued[..continued.len() - 1]].concat();
        let bytes = engine.logits(&fed, model.vocabulary, Variant::with(FLOAT))?;
        let found = reference::to_floats(&bytes);
        tally.count(
            &format!("logits of {what:?}"),
            check_logits(found.chunks_exact(model.vocabulary), prompt, &at),
        );
        let found = &found[(ids.len() - 1) * model.vocabulary..];
        let threshold = DECIDABLE * f64::from(max_abs(found));
        let wrong = wrong_steps(found, &continued, &text.margin, threshold);
        tally.count(&format!("greedy text after {what:?}"), check_steps(what, &wrong));
    }
    check_perplexity(model, engine, tally)
}

/// Compares the greatest logits of each position, and the logits of random ids.
fn check_logits<'a>(
    found: impl Iterator<Item = &'a [f32]>,
    prompt: &PromptReference,
    at: &[u32],
) -> Result<()> {
    for (position, row) in prompt.positions.iter().zip(found) {
        let drawn = at.iter().copied().zip(position.at.iter().copied());
        let expected: Vec<(u32, f64)> = drawn.chain(position.top.iter().copied()).collect();
        let scale = expected.iter().fold(1.0, |most: f64, (_, logit)| most.max(logit.abs()));
        for (id, logit) in expected {
            let found = f64::from(row[id as usize]);
            let error = (found - logit).abs() / scale;
            if !found.is_finite() || error > f64::from(TOLERANCE) {
                return Err(Error::Failed(format!("id {id}: {found} instead of {logit}")));
            }
        }
    }
    Ok(())
}

/// Compares the mean surprise of the second half of each window.
fn check_perplexity(model: &RealModel, engine: &Engine, tally: &mut Tally) -> Result<()> {
    let PerplexityReference { window, nats: expected } = json::read(&file(model, "perplexity.json"))?;
    let ids = engine.tokenize(&command::root().join(TEXT))?;
    for (i, (ids, expected)) in ids.chunks_exact(window).zip(expected).take(WINDOWS).enumerate() {
        let bytes = engine.logits(ids, model.vocabulary, Variant::with(FLOAT))?;
        let found = reference::to_floats(&bytes);
        let rows: Vec<&[f32]> = found.chunks_exact(model.vocabulary).collect();
        let half = window / 2;
        let nats: f64 = (half..window).map(|at| surprise(rows[at - 1], ids[at])).sum::<f64>() / half as f64;
        let outcome = if (nats / expected - 1.0).abs() <= NATS {
            Ok(())
        } else {
            Err(Error::Failed(format!("{nats} nats a token instead of {expected}")))
        };
        tally.count(&format!("perplexity of window {}", i + 1), outcome);
    }
    Ok(())
}

/// The surprise of a token, in nats.
fn surprise(logits: &[f32], id: u32) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    most + sum.ln() - f64::from(logits[id as usize])
}
