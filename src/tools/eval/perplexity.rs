//! Perplexity of a text, and the divergence of the distributions from the base's.

use super::settings::EvalSettings;
use crate::dims::VOCAB;
use crate::run::session::{LOGITS_ROWS, Session};
use crate::tools::columns::{Align, align_columns};
use files::{Error, Result};
use serde_json::{Value, json};
use text::sampler::argmax;

/// Settings with their session and totals.
pub struct Predictor<'s> {
    settings: &'s EvalSettings,
    session: Session,
    totals: PredictionTotals,
}

impl<'s> Predictor<'s> {
    pub fn new(settings: &'s EvalSettings, session: Session) -> Self {
        Self { settings, session, totals: PredictionTotals::default() }
    }
}

/// Predicts the chunks, each from an empty cache, with all rows and with the base if there is one.
pub fn measure_perplexity<'s>(
    rows: &mut [Predictor<'s>],
    mut base: Option<&mut Predictor<'s>>,
    chunks: &[Vec<u32>],
    progress: &dyn Fn(usize, usize),
) -> Result<()> {
    let mut base_rows = Vec::new();
    for (i, tokens) in chunks.iter().enumerate() {
        progress(i, chunks.len());
        rows.iter_mut().chain(base.as_deref_mut()).for_each(|r| r.session.clear());
        for (block, part) in tokens.chunks(LOGITS_ROWS).enumerate() {
            let next = |i: usize| tokens.get(block * LOGITS_ROWS + i + 1).map(|&id| id as usize);
            base_rows.clear();
            if let Some(base) = &mut base {
                base.session.logits_of_all(part, |i, row| {
                    base_rows.extend_from_slice(row);
                    next(i).into_iter().for_each(|next| base.totals.add_prediction(row, None, next));
                })?;
            }
            for Predictor { session, totals, .. } in rows.iter_mut() {
                session.logits_of_all(part, |i, row| {
                    let base = (!base_rows.is_empty()).then(|| &base_rows[i * VOCAB..][..VOCAB]);
                    next(i).into_iter().for_each(|next| totals.add_prediction(row, base, next));
                })?;
            }
        }
        rows.iter().chain(base.as_deref()).try_for_each(|r| r.totals.check_finite())?;
    }
    progress(chunks.len(), chunks.len());
    Ok(())
}

/// Sums over all predictions.
#[derive(Default)]
struct PredictionTotals {
    predictions: usize,
    /// Negative log likelihoods in nats.
    nll: f64,
    /// KL divergence from the base's distributions, in nats.
    kl: f64,
    same_top: usize,
}

impl PredictionTotals {
    fn check_finite(&self) -> Result<()> {
        if !(self.nll + self.kl).is_finite() {
            return Err(Error::Model("the model computes NaN or infinity; its weights are broken".into()));
        }
        Ok(())
    }

    fn add_prediction(&mut self, row: &[f32], base: Option<&[f32]>, next: usize) {
        let total = log_sum_exp(row);
        self.predictions += 1;
        // The session refuses an id beyond the vocabulary when it gets there.
        self.nll += total - row.get(next).map_or(f64::NAN, |&x| f64::from(x));
        let Some(base) = base else { return };
        let base_total = log_sum_exp(base);
        self.same_top += usize::from(argmax(row) == argmax(base));
        // sum p (ln p - ln q)
        let pairs = base.iter().zip(row).map(|(&p, &q)| (f64::from(p) - base_total, f64::from(q) - total));
        self.kl += pairs.map(|(p, q)| libm::exp(p) * (p - q)).sum::<f64>();
    }

    fn per_prediction(&self, sum: f64) -> f64 {
        sum / self.predictions as f64
    }

    fn perplexity(&self) -> f64 {
        libm::exp(self.per_prediction(self.nll))
    }
}

/// `ln sum exp x` in f64, relative to the largest so that nothing overflows.
fn log_sum_exp(row: &[f32]) -> f64 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + libm::log(row.iter().map(|&x| libm::exp(f64::from(x) - most)).sum::<f64>())
}

/// The JSON record of a row.
pub fn row_json(row: &Predictor<'_>, base: Option<&Predictor<'_>>, chunk: usize) -> Value {
    let t = &row.totals;
    let mut line = json!({
        "t": "eval", "settings": row.settings.to_string(), "chunk": chunk, "tokens": t.predictions,
        "perplexity": t.perplexity(), "nats_per_token": t.per_prediction(t.nll),
        "slots": row.session.extent().slots, "bytes": row.session.extent().total_bytes(),
    });
    if let Some(base) = base {
        let b = &base.totals;
        line["against"] = json!({
            "settings": base.settings.to_string(), "perplexity": b.perplexity(),
            "nats_per_token": b.per_prediction(b.nll), "kl_divergence": t.per_prediction(t.kl),
            "same_top": t.per_prediction(t.same_top as f64),
        });
    }
    line
}

/// The table of the rows; the base comes first.
pub fn format_table(rows: &[Predictor<'_>], base: Option<&Predictor<'_>>) -> String {
    let mut head = vec!["perplexity", "nats/token", "tokens"];
    if base.is_some() {
        head.extend(["change", "KL divergence", "same top token"]);
    }
    head.extend(["slots", "bytes", "settings"]);
    let mut sides = vec![Align::Right; head.len()];
    sides[head.len() - 1] = Align::Left;
    let mut lines = vec![head.into_iter().map(String::from).collect()];
    let records = base.map(|base| row_json(base, None, 0)).into_iter();
    for r in records.chain(rows.iter().map(|row| row_json(row, base, 0))) {
        let number = |place: &str| r.pointer(place).and_then(Value::as_f64).unwrap_or_default();
        let word = |key: &str| r[key].as_str().map_or_else(|| r[key].to_string(), str::to_owned);
        let perplexity = number("/perplexity");
        let mut line =
            vec![format!("{perplexity:.6}"), format!("{:.6}", number("/nats_per_token")), word("tokens")];
        match r.get("against") {
            Some(_) => line.extend([
                format!("{:+.3} %", 100.0 * (perplexity / number("/against/perplexity") - 1.0)),
                format!("{:.6} nats", number("/against/kl_divergence")),
                format!("{:.3} %", 100.0 * number("/against/same_top")),
            ]),
            // The base has nothing to be compared with.
            None if base.is_some() => line.extend(vec![String::new(); 3]),
            None => {}
        }
        line.extend([word("slots"), word("bytes"), word("settings")]);
        lines.push(line);
    }
    align_columns(&sides, &lines)
}
