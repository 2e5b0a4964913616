//! Parses the output of `eval --format jsonl`.

use crate::error::{Error, Result};
use serde::Deserialize;

/// Numbers of questions: answered in single precision with the full cache (`full`), and of these with this cache
/// (`kept`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub struct Score {
    pub kept: usize,
    pub full: usize,
}

impl std::fmt::Display for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.kept, self.full)
    }
}

impl std::ops::AddAssign for Score {
    fn add_assign(&mut self, other: Score) {
        self.kept += other.kept;
        self.full += other.full;
    }
}

/// The numbers of a row.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measurement {
    pub perplexity: f64,
    /// Differences from the first row, which has none: relative change of perplexity, KL divergence in nats, share of
    /// equal top tokens.
    pub against: Option<(f64, f64, f64)>,
    pub recall: Recall,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Recall {
    pub settings: String,
    /// Share of a prompt's slots that are kept, and their bytes; means over the questions.
    #[serde(rename = "slots_of_prompt")]
    pub slots: f64,
    pub bytes: f64,
    #[serde(flatten)]
    pub all: Score,
    pub groups: Vec<Group>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Group {
    /// `plain` or `chat`.
    pub form: String,
    /// Tokens between the fact and the question.
    pub distance: usize,
    #[serde(flatten)]
    pub score: Score,
}

impl Recall {
    /// The sum of the scores of some groups.
    pub fn of(&self, is_wanted: impl Fn(&Group) -> bool) -> Score {
        let mut sum = Score::default();
        self.groups.iter().filter(|group| is_wanted(group)).for_each(|group| sum += group.score);
        sum
    }
}

#[derive(Deserialize)]
#[serde(tag = "t", rename_all = "lowercase")]
enum Line {
    Eval(Eval),
    Recall(Recall),
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Eval {
    settings: String,
    perplexity: f64,
    against: Against,
}

#[derive(Deserialize)]
struct Against {
    settings: String,
    perplexity: f64,
    kl_divergence: f64,
    same_top: f64,
}

fn failed(why: String) -> Error {
    Error::Failed(format!("eval: {why}"))
}

/// Parses the lines for `rows` rows without questions; the first row is the baseline.
pub fn parse_predictions(text: &str, rows: usize) -> Result<Vec<Measurement>> {
    Ok(parse_rows(text, rows)?.0.into_iter().map(|(_, measurement)| measurement).collect())
}

/// Parses the lines for `rows` rows with questions.
pub fn parse(text: &str, rows: usize) -> Result<Vec<Measurement>> {
    let (predicted, recalled) = parse_rows(text, rows)?;
    if recalled.len() != rows {
        return Err(failed(format!("{} and {} lines for {rows} rows", rows - 1, recalled.len())));
    }
    let mut found = Vec::new();
    for (i, ((settings, measurement), recall)) in predicted.into_iter().zip(recalled).enumerate() {
        if settings != recall.settings {
            let b = recall.settings;
            return Err(failed(format!("row {i} is {settings} in one table and {b} in the other")));
        }
        found.push(Measurement { recall, ..measurement });
    }
    Ok(found)
}

/// Measurements with their settings, and the results of questions.
type Rows = (Vec<(String, Measurement)>, Vec<Recall>);

fn parse_rows(text: &str, rows: usize) -> Result<Rows> {
    let (mut predicted, mut recalled): (Vec<Eval>, Vec<Recall>) = (Vec::new(), Vec::new());
    for line in text.lines() {
        match serde_json::from_str(line).map_err(|e| failed(e.to_string()))? {
            Line::Eval(eval) => predicted.push(eval),
            Line::Recall(recall) => recalled.push(recall),
            Line::Other => {}
        }
    }
    if rows < 2 || predicted.len() != rows - 1 {
        return Err(failed(format!("{} and {} lines for {rows} rows", predicted.len(), recalled.len())));
    }
    let first = &predicted[0].against;
    let first =
        (first.settings.clone(), Measurement { perplexity: first.perplexity, ..Measurement::default() });
    let others = predicted.into_iter().map(|Eval { settings, perplexity, against }| {
        let change = perplexity / against.perplexity - 1.0;
        let against = Some((change, against.kl_divergence, against.same_top));
        (settings, Measurement { perplexity, against, ..Measurement::default() })
    });
    Ok(([first].into_iter().chain(others).collect(), recalled))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = r#"{"t":"recall","settings":"a","slots_of_prompt":1.0,"bytes":10.0,"kept":3,"full":3,"groups":[
        {"form":"plain","distance":300,"kept":2,"full":2},{"form":"chat","distance":300,"kept":1,"full":1}]}"#;
    const EVAL: &str = r#"{"t":"eval","settings":"b","perplexity":3.0,
        "against":{"settings":"a","perplexity":2.0,"kl_divergence":0.25,"same_top":0.5}}"#;

    fn lines(parts: &[&str]) -> String {
        parts.iter().map(|p| format!("{}\n", p.replace('\n', ""))).collect()
    }

    #[test]
    fn lines_are_joined_into_rows_and_mismatches_are_refused() {
        let other = BASE.replace("\"a\"", "\"b\"").replace("\"kept\":3", "\"kept\":2");
        let found = parse(&lines(&[EVAL, BASE, &other]), 2).unwrap();
        assert_eq!((found[0].perplexity, found[0].against), (2.0, None));
        assert_eq!((found[1].perplexity, found[1].against), (3.0, Some((0.5, 0.25, 0.5))));
        assert_eq!(found[1].recall.all, Score { kept: 2, full: 3 });
        assert_eq!(found[0].recall.of(|group| group.form == "plain"), Score { kept: 2, full: 2 });
        assert_eq!(parse_predictions(&lines(&[EVAL]), 2).unwrap()[1].against, Some((0.5, 0.25, 0.5)));
        for (parts, words) in [
            (vec![EVAL, BASE], "1 and 1 lines for 2 rows"),
            (vec![BASE, BASE], "0 and 2 lines for 2 rows"),
            (vec![EVAL, BASE, BASE], "row 1 is b in one table and a in the other"),
            (vec![EVAL, BASE, "{"], "EOF"),
        ] {
            let e = parse(&lines(&parts), 2).unwrap_err().to_string();
            assert!(e.contains(words), "{e}");
        }
    }
}
