//! Recall of facts that a prompt states early and asks for at its end.

use super::engines::EvalEngines;
use super::input::EncodedQuestion;
use super::settings::EvalSettings;
use crate::model::device::read_bytes;
use crate::run::session::{CancelToken, Session};
use crate::tools::columns::{Align, align_columns};
use files::Result;
use serde_json::{Value, json};
use text::sampler::argmax;

/// The outcome of one question.
struct RecallOutcome {
    /// Form of the prompt, and distance of the fact.
    group: (String, usize),
    correct: usize,
    /// 1 if the model answers correctly with an f32 cache and no eviction, else 0.
    full: usize,
    /// Slots kept after the prompt, and their share of its tokens.
    slots: usize,
    share: f64,
}

/// Counts of outcomes: questions, correct answers, correct answers of the full f32 cache, and of these the ones that
/// are still correct.
fn count_outcomes<'o>(outcomes: impl Iterator<Item = &'o RecallOutcome>) -> Value {
    let (mut asked, mut correct, mut full, mut kept) = (0, 0, 0, 0);
    for o in outcomes {
        asked += 1;
        correct += o.correct;
        full += o.full;
        kept += o.correct * o.full;
    }
    json!({"asked": asked, "correct": correct, "full": full, "kept": kept})
}

/// Maximum number of slots that a question needs.
pub fn longest_question(questions: &[EncodedQuestion]) -> usize {
    questions.iter().map(|q| q.prompt.len() + q.question.answer_ids.len()).max().unwrap_or(0)
}

/// Asks all questions, each in a new sequence. Returns the JSON record of these settings.
pub fn measure_recall(
    settings: &EvalSettings,
    engines: &EvalEngines,
    questions: &[EncodedQuestion],
    progress: &dyn Fn(usize, usize),
) -> Result<Value> {
    let mut outcomes = Vec::new();
    for (i, EncodedQuestion { question, prompt }) in questions.iter().enumerate() {
        progress(i, questions.len());
        let options = settings.for_prompt(prompt.len(), question.answer_ids.len())?;
        let mut session = engines.open_session(&options)?;
        session.prefill(prompt, &CancelToken::default())?;
        let slots = session.slots();
        outcomes.push(RecallOutcome {
            group: (question.form.clone(), question.distance),
            correct: score_answer(&mut session, &question.answer_ids)?,
            full: usize::from(question.correct_f32),
            slots,
            share: slots as f64 / prompt.len() as f64,
        });
    }
    progress(questions.len(), questions.len());
    Ok(outcomes_json(settings, &outcomes))
}

/// The JSON record of the outcomes, in total and by group, in the order of the questions.
fn outcomes_json(settings: &EvalSettings, outcomes: &[RecallOutcome]) -> Value {
    let mut groups: Vec<Value> = Vec::new();
    for RecallOutcome { group: (form, distance), .. } in outcomes {
        if groups.iter().all(|g| g["form"] != *form || g["distance"] != *distance) {
            let same = |o: &&RecallOutcome| (&o.group.0, o.group.1) == (form, *distance);
            let mut group = count_outcomes(outcomes.iter().filter(same));
            group["form"] = json!(form);
            group["distance"] = json!(distance);
            groups.push(group);
        }
    }
    let mean =
        |of: &dyn Fn(&RecallOutcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64;
    let bytes = |o: &RecallOutcome| read_bytes(settings.options().kv_types, o.slots as f64).trunc();
    let mut line = count_outcomes(outcomes.iter());
    line["t"] = json!("recall");
    line["settings"] = json!(settings.to_string());
    line["slots"] = json!(mean(&|o| o.slots as f64));
    line["slots_of_prompt"] = json!(mean(&|o| o.share));
    line["bytes"] = json!(mean(&bytes));
    line["groups"] = json!(groups);
    line
}

/// Returns 1 if the greedy continuation begins with these ids, else 0.
fn score_answer(session: &mut Session, ids: &[u32]) -> Result<usize> {
    for (i, &id) in ids.iter().enumerate() {
        if i > 0 {
            session.decode(ids[i - 1])?;
        }
        if argmax(session.logits()) != id {
            return Ok(0);
        }
    }
    Ok(1)
}

/// The table of records: correct answers by form and distance, in total, and of those that the full f32 cache answers
/// correctly; the share of the prompt and the bytes kept.
pub fn format_table(records: &[Value]) -> String {
    let groups = |record: &Value| record["groups"].as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let of = |score: &Value, part: &str, all: &str| format!("{}/{}", score[part], score[all]);
    let number = |record: &Value, key: &str| record[key].as_f64().unwrap_or_default();
    let Some(first) = records.first() else { return String::new() };
    let mut head: Vec<String> =
        groups(first).iter().map(|g| format!("{} {}", word(&g["form"]), g["distance"])).collect();
    let more = ["recall", "of the full f32 cache's", "slots of the prompt", "bytes", "settings"];
    head.extend(more.map(String::from));
    let mut sides = vec![Align::Right; head.len()];
    sides[head.len() - 1] = Align::Left;
    let mut lines = vec![head];
    for record in records {
        let mut line: Vec<String> = groups(record).iter().map(|g| of(g, "correct", "asked")).collect();
        line.extend([
            of(record, "correct", "asked"),
            of(record, "kept", "full"),
            format!("{:.1} %", 100.0 * number(record, "slots_of_prompt")),
            format!("{:.0}", number(record, "bytes")),
            word(&record["settings"]),
        ]);
        lines.push(line);
    }
    align_columns(&sides, &lines)
}
