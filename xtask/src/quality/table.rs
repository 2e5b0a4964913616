//! The tables as Markdown.

use super::Spec;
use super::result::{Measurement, Score};

/// The text above the tables.
const HOW_TO_READ: &str = "\
Slots and KiB are what is left of the cache after a prompt: everything, or with a policy a quarter of the prompt; means
over 60 prompts of 300 to 1,500 tokens. Perplexity, its change, the KL divergence and how often the most probable token
is the same are over 20,440 held-out predictions in chunks of 512 tokens, in which a policy evicts down to a quarter of
the chunk again and again, against the first row. Recall is of facts stated 300, 800 and 1,400 tokens before the
question that ends the prompt, in plain text and in chats: of the answers that the model gives in single precision with
all of the cache, how many it still gives. So a row without a policy shows what the type costs, and a row with `f32` what
the policy costs.
";

const HEAD: &str = "| policy | KV cache | slots kept | KiB kept | perplexity | change | KL, nats | same top token | \
                    recall 300 | 800 | 1,400 | plain | chat | all |\n\
                    |---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";

/// The table, and above it how to read it.
pub fn markdown(rows: &[Spec], found: &[Measurement]) -> String {
    let lines: String = lines(rows, found).map(|line| line + "\n").collect();
    format!("{HOW_TO_READ}\n{HEAD}{lines}")
}

/// The lines below the head.
pub fn lines<'a>(rows: &'a [Spec], found: &'a [Measurement]) -> impl Iterator<Item = String> + 'a {
    rows.iter().zip(found).map(|(spec, row)| line(*spec, row))
}

fn line(spec: Spec, row: &Measurement) -> String {
    let of = |score: Score| format!("{}/{}", score.kept, score.full);
    let (change, kl, top) = match row.against {
        None => ("–".into(), "–".into(), "–".into()),
        Some((change, kl, top)) => {
            (format_signed(100.0 * change), format!("{kl:.6}"), format!("{:.2} %", 100.0 * top))
        }
    };
    let all = row.recall.all;
    let cells = [
        spec.policy.name().into(),
        spec.kv_name(),
        format!("{:.1} %", 100.0 * row.recall.slots),
        format!("{:.0}", row.recall.bytes / 1024.0),
        format!("{:.6}", row.perplexity),
        change,
        kl,
        top,
        of(row.recall.of(|group| group.distance == 300)),
        of(row.recall.of(|group| group.distance == 800)),
        of(row.recall.of(|group| group.distance == 1400)),
        of(row.recall.of(|group| group.form == "plain")),
        of(row.recall.of(|group| group.form == "chat")),
        format!("{} = {:.1} %", of(all), 100.0 * all.kept as f64 / all.full as f64),
    ];
    format!("| {} |", cells.join(" | "))
}

/// Formats a percentage with its sign, unless it is rounded to nothing.
pub fn format_signed(percent: f64) -> String {
    match format!("{percent:+.3}") {
        zero if zero == "-0.000" || zero == "+0.000" => "0.000 %".into(),
        number => format!("{number} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quality::quick;
    use crate::quality::result::{Group, Recall};

    #[test]
    fn a_line_has_a_cell_for_every_column() {
        let score = |kept, full| Score { kept, full };
        let group = |form: &str, distance, score| Group { form: form.into(), distance, score };
        let groups = vec![group("plain", 300, score(2, 2)), group("chat", 800, score(1, 2))];
        let recall = Recall { slots: 1.0, bytes: 2048.0, all: score(3, 4), groups, ..Recall::default() };
        let full = Measurement { perplexity: 1.5, against: None, recall };
        let other = Measurement { against: Some((-0.000001, 0.25, 0.5)), ..full.clone() };
        let text = markdown(&quick(), &[full, other]);
        let lines: Vec<&str> = text.lines().filter(|l| l.starts_with('|')).collect();
        assert!(lines.len() == 4 && lines.iter().all(|l| l.matches('|').count() == 15), "{text}");
        let first = "| none | f32 | 100.0 % | 2 | 1.500000 | – | – | – | 2/2 | 1/2 | 0/0 | 2/2 | 1/2 | 3/4 = 75.0 % |";
        assert_eq!(lines[2], first);
        assert!(lines[3].contains("| 0.000 % | 0.250000 | 50.00 % |"));
    }
}
