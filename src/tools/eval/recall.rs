//! Recall of facts that are stated early in a prompt, by a question at its end.

use super::engines::Engines;
use super::input::{EncodedQuestion, Question};
use super::settings::Settings;
use crate::cli::terminal::Progress;
use crate::model::device::read_bytes;
use crate::run::session::{CancelToken, Session};
use crate::tools::columns::{Side, columns};
use files::Result;
use serde_json::{Value, json};
use text::sampler::argmax;

/// Numbers of questions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Score {
    asked: usize,
    correct: usize,
    /// Questions that the model answers in single precision with the whole cache.
    full: usize,
    /// Of these, the answered ones.
    kept: usize,
}

impl Score {
    /// Adds one question.
    fn add(&mut self, one: Score) {
        self.asked += one.asked;
        self.correct += one.correct;
        self.full += one.full;
        self.kept += one.kept;
    }

    fn json(&self) -> Value {
        json!({"asked": self.asked, "correct": self.correct, "full": self.full, "kept": self.kept})
    }
}

/// The result of one row of settings.
pub struct Recall<'s> {
    settings: &'s Settings,
    /// By form and distance, in the order of the questions.
    groups: Vec<(String, usize, Score)>,
    all: Score,
    /// Sums over the questions: slots and bytes kept after the prompt, slots by tokens of the prompt.
    slots: usize,
    bytes: usize,
    share: f64,
}

/// The most slots that a question needs.
pub fn longest(questions: &[EncodedQuestion]) -> usize {
    questions.iter().map(|q| q.prompt.len() + q.question.answer_ids.len()).max().unwrap_or(0)
}

/// Asks all questions, each in a sequence of its own.
pub fn measure<'s>(
    settings: &'s Settings,
    engines: &Engines,
    questions: &[EncodedQuestion],
    progress: &Progress,
) -> Result<Recall<'s>> {
    let mut recall =
        Recall { settings, groups: Vec::new(), all: Score::default(), slots: 0, bytes: 0, share: 0.0 };
    for (i, EncodedQuestion { question, prompt }) in questions.iter().enumerate() {
        progress.show(i, questions.len());
        let options = settings.for_prompt(prompt.len(), question.answer_ids.len())?;
        let mut session = engines.session(&options)?;
        session.prefill(prompt, &CancelToken::default())?;
        let slots = session.slots();
        recall.slots += slots;
        recall.bytes += read_bytes(settings.options().kv_types, slots as f64) as usize;
        recall.share += slots as f64 / prompt.len() as f64;
        recall.add(question, count_correct(&mut session, &question.answer_ids)?);
    }
    progress.show(questions.len(), questions.len());
    Ok(recall)
}

/// Returns 1 if the greedy continuation begins with these ids, else 0.
fn count_correct(session: &mut Session, ids: &[u32]) -> Result<usize> {
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

impl Recall<'_> {
    fn add(&mut self, q: &Question, correct: usize) {
        let place = self.groups.iter().position(|(form, d, _)| (form, *d) == (&q.form, q.distance));
        let place = place.unwrap_or_else(|| {
            self.groups.push((q.form.clone(), q.distance, Score::default()));
            self.groups.len() - 1
        });
        let full = usize::from(q.correct_f32);
        let one = Score { asked: 1, correct, full, kept: correct * full };
        self.groups[place].2.add(one);
        self.all.add(one);
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / self.all.asked as f64
    }

    /// One line of JSON.
    pub fn json(&self) -> Value {
        let groups: Vec<Value> = self
            .groups
            .iter()
            .map(|(form, distance, score)| {
                let mut group = score.json();
                group["form"] = json!(form);
                group["distance"] = json!(distance);
                group
            })
            .collect();
        let mut line = self.all.json();
        line["t"] = json!("recall");
        line["settings"] = json!(self.settings.to_string());
        line["slots"] = json!(self.mean(self.slots as f64));
        line["slots_of_prompt"] = json!(self.mean(self.share));
        line["bytes"] = json!(self.mean(self.bytes as f64));
        line["groups"] = json!(groups);
        line
    }
}

/// The table: answered of asked, by form and distance and in all; of those that the full f32 cache answers; the slots
/// and bytes kept.
pub fn text(rows: &[Recall<'_>]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let of = |n: usize, all: usize| format!("{n}/{all}");
    let mut head: Vec<String> = first.groups.iter().map(|(form, d, _)| format!("{form} {d}")).collect();
    let more = ["recall", "of the full f32 cache's", "slots of the prompt", "bytes", "settings"];
    head.extend(more.map(String::from));
    let mut sides = vec![Side::Right; head.len()];
    sides[head.len() - 1] = Side::Left;
    let lines = rows.iter().map(|r| {
        let mut line: Vec<String> = r.groups.iter().map(|(_, _, s)| of(s.correct, s.asked)).collect();
        line.extend([
            of(r.all.correct, r.all.asked),
            of(r.all.kept, r.all.full),
            format!("{:.1} %", 100.0 * r.mean(r.share)),
            format!("{:.0}", r.mean(r.bytes as f64)),
            r.settings.to_string(),
        ]);
        line
    });
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(lines).collect();
    columns(&sides, &lines)
}
