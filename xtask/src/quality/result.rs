//! What `eval --format jsonl` printed, row by row.

use crate::error::{Error, Result};
use crate::json::Node;
use serde_json::Value;
use std::path::Path;

/// Of the questions that the model answers in single precision with all of the cache (`full`), how many this cache
/// still answers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Score {
    pub kept: usize,
    pub full: usize,
}

impl std::ops::AddAssign for Score {
    fn add_assign(&mut self, other: Score) {
        self.kept += other.kept;
        self.full += other.full;
    }
}

/// One row's numbers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measured {
    pub perplexity: f64,
    /// From the first row, which has none itself: change of the perplexity, KL divergence in nats, share of equal top
    /// tokens.
    pub against: Option<(f64, f64, f64)>,
    /// Slots kept after a prompt, by its tokens, and their bytes; means over the questions.
    pub slots: f64,
    pub bytes: f64,
    pub all: Score,
    /// By form (`plain`, `chat`) and tokens between fact and question.
    pub groups: Vec<(String, usize, Score)>,
}

impl Measured {
    /// The score of the groups of this form, or of this distance.
    pub fn of(&self, wanted: impl Fn(&str, usize) -> bool) -> Score {
        let mut sum = Score::default();
        self.groups.iter().filter(|(form, distance, _)| wanted(form, *distance)).for_each(|g| sum += g.2);
        sum
    }
}

/// What the errors call the program's output.
const FILE: &str = "eval";

fn lines(text: &str) -> Result<Vec<Value>> {
    text.lines().map(|line| serde_json::from_str(line).map_err(|e| Error::at(Path::new(FILE), e))).collect()
}

fn of_kind<'a>(lines: &'a [Value], kind: &str) -> Vec<Node<'a>> {
    let nodes = lines.iter().map(|value| Node { file: Path::new(FILE), value });
    nodes.filter(|n| n.value["t"] == kind).collect()
}

/// Reads the lines for `rows` rows without questions, the first of which is what the others were held against.
pub fn predictions(text: &str, rows: usize) -> Result<Vec<Measured>> {
    let lines = lines(text)?;
    let predicted = of_kind(&lines, "eval");
    if rows < 2 || predicted.len() != rows - 1 {
        return Err(Error::at(Path::new(FILE), format!("{} lines for {rows} rows", predicted.len())));
    }
    (0..rows).map(|i| prediction(&predicted, i).map(|(_, measured)| measured)).collect()
}

/// Row `i` of predictions, and its line.
fn prediction<'a>(predicted: &[Node<'a>], i: usize) -> Result<(Node<'a>, Measured)> {
    let (row, against) = match i {
        0 => (predicted[0].get("against")?, None),
        i => {
            let (row, b) = (predicted[i - 1], predicted[i - 1].get("against")?);
            let change = row.float("perplexity")? / b.float("perplexity")? - 1.0;
            (row, Some((change, b.float("kl_divergence")?, b.float("same_top")?)))
        }
    };
    Ok((row, Measured { perplexity: row.float("perplexity")?, against, ..Measured::default() }))
}

/// Reads the lines for `rows` rows, the first of which is what the others were held against.
pub fn parse(text: &str, rows: usize) -> Result<Vec<Measured>> {
    let file = Path::new(FILE);
    let lines = lines(text)?;
    let (predicted, recalled) = (of_kind(&lines, "eval"), of_kind(&lines, "recall"));
    if rows < 2 || predicted.len() != rows - 1 || recalled.len() != rows {
        let found = format!("{} and {} lines for {rows} rows", predicted.len(), recalled.len());
        return Err(Error::at(file, found));
    }
    let mut found = Vec::new();
    for (i, recall) in recalled.into_iter().enumerate() {
        let (row, Measured { perplexity, against, .. }) = prediction(&predicted, i)?;
        if row.text("settings")? != recall.text("settings")? {
            let (a, b) = (row.text("settings")?, recall.text("settings")?);
            return Err(Error::at(file, format!("row {i} is {a} in one table and {b} in the other")));
        }
        found.push(Measured { perplexity, against, ..recalled_by(recall)? });
    }
    Ok(found)
}

fn recalled_by(recall: Node<'_>) -> Result<Measured> {
    let score = |n: Node<'_>| Ok::<Score, Error>(Score { kept: n.size("kept")?, full: n.size("full")? });
    let groups = recall.get("groups")?.list()?;
    let groups = groups.map(|g| Ok((g.text("form")?.to_string(), g.size("distance")?, score(g)?)));
    Ok(Measured {
        slots: recall.float("slots_of_prompt")?,
        bytes: recall.float("bytes")?,
        all: score(recall)?,
        groups: groups.collect::<Result<_>>()?,
        ..Measured::default()
    })
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
    fn rows_are_put_together() {
        let other = BASE.replace("\"a\"", "\"b\"").replace("\"kept\":3", "\"kept\":2");
        let found = parse(&lines(&[EVAL, BASE, &other]), 2).unwrap();
        assert_eq!((found[0].perplexity, found[0].against), (2.0, None));
        assert_eq!((found[1].perplexity, found[1].against), (3.0, Some((0.5, 0.25, 0.5))));
        assert_eq!(found[1].all, Score { kept: 2, full: 3 });
        assert_eq!(found[0].of(|form, _| form == "plain"), Score { kept: 2, full: 2 });
        assert_eq!(found[0].of(|_, distance| distance == 300), Score { kept: 3, full: 3 });
    }

    #[test]
    fn predictions_need_no_questions() {
        let found = predictions(&lines(&[EVAL]), 2).unwrap();
        assert_eq!((found[0].perplexity, found[1].against), (2.0, Some((0.5, 0.25, 0.5))));
        assert!(predictions(&lines(&[EVAL]), 3).unwrap_err().to_string().contains("1 lines for 3 rows"));
    }

    #[test]
    fn lines_that_do_not_belong_together_are_refused() {
        for (parts, words) in [
            (vec![EVAL, BASE], "1 and 1 lines for 2 rows"),
            (vec![EVAL, BASE, BASE], "row 1 is b in one table and a in the other"),
            (vec![EVAL, BASE, "{"], "EOF"),
        ] {
            let e = parse(&lines(&parts), 2).unwrap_err().to_string();
            assert!(e.contains(words), "{e}");
        }
    }
}
