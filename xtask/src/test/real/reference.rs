//! Real models' logits, greedy texts and perplexity beside those that transformers computed in single precision, from
//! the weights of the same file.

use super::Real;
use crate::error::{Error, Result};
use crate::json::{self, Node};
use crate::parity::compare::{TOLERANCE, max_abs, wrong_steps};
use crate::parity::engine::{Engine, Variant};
use crate::parity::{DECIDABLE, FLOAT, reference, steps};
use crate::sh;
use crate::test::report::Tally;
use std::path::PathBuf;

/// Windows of the text whose perplexity is compared; a window takes a few seconds.
const WINDOWS: usize = 2;
/// Relative, of the nats of a window.
const NATS: f64 = 1e-5;

/// The text whose perplexity is compared.
const TEXT: &str = "models/smollm2-135m/golden/text.txt";

fn file(model: &Real, name: &str) -> PathBuf {
    sh::root().join("tests/fixtures/real").join(model.name).join(name)
}

pub(super) fn check(model: &Real, engine: &Engine, tally: &mut Tally) -> Result<()> {
    let (logits, greedy) = (file(model, "logits.json"), file(model, "greedy.json"));
    let (positions, texts) = (json::read(&logits)?, json::read(&greedy)?);
    let positions = Node { file: &logits, value: &positions };
    let at = positions.ids("at")?;
    let prompts = positions.get("prompts")?;
    let texts = Node { file: &greedy, value: &texts };
    for (prompt, text) in prompts.list()?.zip(texts.list()?).take(model.prompts) {
        let (what, ids) = (prompt.text("prompt")?, prompt.ids("ids")?);
        let continued = text.ids("greedy")?;
        // The last one is not fed: nothing was computed from it.
        let fed = [&ids[..], &continued[..continued.len() - 1]].concat();
        let bytes = engine.logits(&fed, model.vocabulary, Variant { flags: FLOAT, ..Variant::default() })?;
        let found = reference::to_floats(&bytes);
        tally.count(
            &format!("logits of {what:?}"),
            logits_agree(found.chunks_exact(model.vocabulary), prompt, &at),
        );
        let found = &found[(ids.len() - 1) * model.vocabulary..];
        let threshold = DECIDABLE * f64::from(max_abs(found));
        let wrong = wrong_steps(found, &continued, &text.floats("margin")?, threshold);
        tally.count(&format!("greedy text after {what:?}"), steps(what, &wrong));
    }
    perplexity(model, engine, tally)
}

/// The eight greatest logits of each position, and those of ids that were drawn at random.
fn logits_agree<'a>(found: impl Iterator<Item = &'a [f32]>, prompt: Node<'_>, at: &[u32]) -> Result<()> {
    for (position, row) in prompt.get("positions")?.list()?.zip(found) {
        let mut expected: Vec<(u32, f64)> = at.iter().copied().zip(position.floats("at")?).collect();
        for pair in position.get("top")?.list()? {
            let pair: (u32, f64) = serde_json::from_value(pair.value.clone())
                .map_err(|e| Error::at(pair.file, format!("`top`: {e}")))?;
            expected.push(pair);
        }
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

/// Of the second half of each window.
fn perplexity(model: &Real, engine: &Engine, tally: &mut Tally) -> Result<()> {
    let file = file(model, "perplexity.json");
    let value = json::read(&file)?;
    let node = Node { file: &file, value: &value };
    let (window, expected) = (node.size("window")?, node.floats("nats")?);
    let ids = engine.tokenize(&sh::root().join(TEXT))?;
    for (i, (ids, expected)) in ids.chunks_exact(window).zip(expected).take(WINDOWS).enumerate() {
        let bytes = engine.logits(ids, model.vocabulary, Variant { flags: FLOAT, ..Variant::default() })?;
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

/// Nats by which a token was not expected.
fn surprise(logits: &[f32], id: u32) -> f64 {
    let most = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    most + sum.ln() - f64::from(logits[id as usize])
}
