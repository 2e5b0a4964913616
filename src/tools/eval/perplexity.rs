//! Perplexity of a text, and the distance of the distributions from the reference's.

use super::settings::Settings;
use crate::cli::terminal::Progress;
use crate::dims::VOCAB;
use crate::run::session::{ROWS, Session};
use crate::tools::columns::{Side, columns};
use files::{Error, Result};
use serde_json::{Value, json};
use text::sampler::argmax;

/// Settings, their session and its results.
pub struct Predictor<'s> {
    settings: &'s Settings,
    session: Session,
    totals: Totals,
}

impl<'s> Predictor<'s> {
    pub fn new(settings: &'s Settings, session: Session) -> Self {
        Self { settings, session, totals: Totals::default() }
    }

    /// Slots of its cache.
    fn slots(&self) -> usize {
        self.session.extent().slots
    }

    fn bytes(&self) -> usize {
        self.session.extent().bytes()
    }
}

/// Predicts the chunks, each from an empty cache, with all rows and with the one they are compared with, if any.
pub fn measure<'s>(
    rows: &mut [Predictor<'s>],
    mut base: Option<&mut Predictor<'s>>,
    chunks: &[Vec<u32>],
    progress: &Progress,
) -> Result<()> {
    let mut base_rows = Vec::new();
    for (i, tokens) in chunks.iter().enumerate() {
        progress.show(i, chunks.len());
        rows.iter_mut().chain(base.as_deref_mut()).for_each(|r| r.session.clear());
        for (block, part) in tokens.chunks(ROWS).enumerate() {
            let next = |i: usize| tokens.get(block * ROWS + i + 1).map(|&id| id as usize);
            base_rows.clear();
            if let Some(base) = &mut base {
                base.session.logits_of_all(part, |i, row| {
                    base_rows.extend_from_slice(row);
                    next(i).into_iter().for_each(|next| base.totals.add(row, None, next));
                })?;
            }
            for Predictor { session, totals, .. } in rows.iter_mut() {
                session.logits_of_all(part, |i, row| {
                    let base = (!base_rows.is_empty()).then(|| &base_rows[i * VOCAB..][..VOCAB]);
                    next(i).into_iter().for_each(|next| totals.add(row, base, next));
                })?;
            }
        }
        rows.iter().chain(base.as_deref()).try_for_each(|r| r.totals.check())?;
    }
    progress.show(chunks.len(), chunks.len());
    Ok(())
}

/// Sums over all predictions.
#[derive(Default)]
struct Totals {
    predictions: usize,
    /// Negative log likelihoods in nats.
    nll: f64,
    /// From the settings compared with.
    kl: f64,
    same_top: usize,
}

impl Totals {
    fn check(&self) -> Result<()> {
        if !(self.nll + self.kl).is_finite() {
            return Err(Error::Model("the model computes NaN or infinity; its weights are broken".into()));
        }
        Ok(())
    }

    fn add(&mut self, row: &[f32], base: Option<&[f32]>, next: usize) {
        let total = log_sum_exp(row);
        self.predictions += 1;
        // The session refuses an id beyond the vocabulary when its turn comes.
        self.nll += total - row.get(next).map_or(f64::NAN, |&x| f64::from(x));
        let Some(base) = base else { return };
        let base_total = log_sum_exp(base);
        self.same_top += usize::from(argmax(row) == argmax(base));
        // sum p (ln p - ln q)
        let pairs = base.iter().zip(row).map(|(&p, &q)| (f64::from(p) - base_total, f64::from(q) - total));
        self.kl += pairs.map(|(p, q)| libm::exp(p) * (p - q)).sum::<f64>();
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / self.predictions as f64
    }

    fn perplexity(&self) -> f64 {
        libm::exp(self.mean(self.nll))
    }
}

/// `ln sum exp x` in f64, relative to the largest so that nothing overflows.
fn log_sum_exp(row: &[f32]) -> f64 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + libm::log(row.iter().map(|&x| libm::exp(f64::from(x) - most)).sum::<f64>())
}

/// The table; the row that the others are compared with comes first.
pub fn text(rows: &[Predictor<'_>], base: Option<&Predictor<'_>>) -> String {
    let mut head = vec!["perplexity", "nats/token", "tokens"];
    if base.is_some() {
        head.extend(["change", "KL divergence", "same top token"]);
    }
    head.extend(["slots", "bytes", "settings"]);
    let mut lines = vec![head.into_iter().map(String::from).collect()];
    for (r, is_base) in base.iter().map(|b| (*b, true)).chain(rows.iter().map(|r| (r, false))) {
        let t = &r.totals;
        let mut line = vec![
            format!("{:.6}", t.perplexity()),
            format!("{:.6}", t.mean(t.nll)),
            t.predictions.to_string(),
        ];
        match base {
            Some(_) if is_base => line.extend([String::new(), String::new(), String::new()]),
            Some(base) => line.extend([
                format!("{:+.3} %", 100.0 * (t.perplexity() / base.totals.perplexity() - 1.0)),
                format!("{:.6} nats", t.mean(t.kl)),
                format!("{:.3} %", 100.0 * t.mean(t.same_top as f64)),
            ]),
            None => {}
        }
        line.extend([r.slots().to_string(), r.bytes().to_string(), r.settings.to_string()]);
        lines.push(line);
    }
    let mut sides = vec![Side::Right; lines[0].len()];
    sides[lines[0].len() - 1] = Side::Left;
    columns(&sides, &lines)
}

/// One line of JSON for a row.
pub fn json(row: &Predictor<'_>, base: Option<&Predictor<'_>>, chunk: usize) -> Value {
    let t = &row.totals;
    let mut line = json!({
        "t": "eval", "settings": row.settings.to_string(), "chunk": chunk, "tokens": t.predictions,
        "perplexity": t.perplexity(), "nats_per_token": t.mean(t.nll),
        "slots": row.slots(), "bytes": row.bytes(),
    });
    if let Some(base) = base {
        let b = &base.totals;
        line["against"] = json!({
            "settings": base.settings.to_string(), "perplexity": b.perplexity(),
            "nats_per_token": b.mean(b.nll), "kl_divergence": t.mean(t.kl),
            "same_top": t.mean(t.same_top as f64),
        });
    }
    line
}
