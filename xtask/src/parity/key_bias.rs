//! Keys far from zero: a model whose key biases are as large as Qwen 2.5's (tens to hundreds, in pairs that RoPE hardly
//! turns) loses little by the q4 cache, because keys are stored less their mean.

use super::FLOAT;
use super::engine::{Engine, Variant};
use super::reference::{PromptCase, Reference, to_floats};
use crate::changed_copy::{to_bf16, write_changed_copy};
use crate::error::{Error, Result};
use crate::json;
use crate::tally::Tally;
use serde_json::Value;
use std::path::Path;

/// Most that the q4 cache may change the logits by, as a share of their rms. It is 0.35, and was 1.11 with whole keys:
/// as far as from another model's. The q8 cache, which keeps keys whole, changes them by 0.22.
const ALLOWED: f64 = 0.45;
/// Limit for models with experts, of which a little noise may choose others. It is 0.46 and 0.68, with q8 0.47 and
/// 0.63; it was 1.14 and 1.18 with sinks that were not shifted as the scores are.
const ALLOWED_EXPERTS: f64 = 0.8;

/// Counts the check where the model has key biases in bf16; other models pass by.
pub fn check(engine: &Engine, reference: &Reference, case: &PromptCase) -> Tally {
    let mut tally = Tally::default();
    let dir = engine.file("biased");
    match write_biased(&reference.dir, &dir) {
        Ok(false) => {}
        Ok(true) => {
            let outcome = check_change(&engine.with_model(&dir), reference, case);
            tally.count_quietly(&reference.name, outcome);
        }
        Err(e) => tally.count_quietly(&reference.name, Err(e)),
    }
    tally
}

/// Checks how far q4 is from f32.
fn check_change(engine: &Engine, reference: &Reference, case: &PromptCase) -> Result<()> {
    let q4 = &["--weight-type", "f32", "--kv-type", "q4"];
    let logits = |flags| {
        Ok::<_, Error>(to_floats(&engine.logits(&case.ids, reference.vocab, Variant::with(flags))?))
    };
    let (found, expected) = (logits(q4)?, logits(FLOAT)?);
    let squares = |of: &mut dyn Iterator<Item = f32>| of.map(|x| f64::from(x).powi(2)).sum::<f64>();
    let difference = squares(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    let change = (difference / squares(&mut expected.iter().copied())).sqrt();
    let allowed = if reference.has_experts() { ALLOWED_EXPERTS } else { ALLOWED };
    if change <= allowed {
        return Ok(());
    }
    Err(Error::Failed(format!("large key biases: q4 changes logits by {change:.3}, allowed {allowed}")))
}

/// Makes a copy of a model with larger key biases, if it has any.
fn write_biased(model: &Path, dir: &Path) -> Result<bool> {
    let head_dim = head_dim(model);
    write_changed_copy(model, dir, |name, biases| {
        let Some(head_dim) = head_dim.as_ref().ok().filter(|_| name.ends_with("k_proj.bias")) else {
            return false;
        };
        for (i, bias) in biases.iter_mut().enumerate() {
            let pair = i % head_dim % (head_dim / 2);
            // The slower half of the pairs.
            if pair >= head_dim / 4 {
                let sign = if i * 7 % 3 == 0 { -1.0 } else { 1.0 };
                *bias = to_bf16(sign * (20.0 + 160.0 * pair as f32 / *head_dim as f32));
            }
        }
        true
    })
}

fn head_dim(model: &Path) -> Result<usize> {
    let file = model.join("config.json");
    let config: Value = json::read(&file)?;
    let number = |name: &str| config[name].as_u64().map(|n| n as usize);
    let heads = number("hidden_size").zip(number("num_attention_heads"));
    heads.map(|(dim, heads)| dim / heads).ok_or_else(|| Error::at(&file, "has no heads"))
}
