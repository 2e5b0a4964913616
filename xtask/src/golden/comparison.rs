//! Results compared with golden ones: a table, and the first difference.

use crate::table::{format_fixed, format_table, to_cells};

/// A text: its token ids, and the digest of the last logits.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Outcome {
    pub ids: Vec<u32>,
    pub digest: String,
}

/// Results of a case: on the device (`there`), on this machine (`here`), and in the golden file.
pub struct CaseResult {
    pub name: String,
    pub there: Outcome,
    pub here: Outcome,
    pub expected: Outcome,
    pub seconds: f64,
}

impl CaseResult {
    pub fn passed(&self) -> bool {
        self.there == self.expected && self.here == self.expected
    }
}

/// The table, one line per case.
pub fn format_results(rows: &[CaseResult]) -> String {
    let said = |equal: bool| if equal { "equal".to_string() } else { "DIFFERS".into() };
    let line = |r: &CaseResult| {
        vec![
            r.name.clone(),
            r.there.ids.len().to_string(),
            said(r.there.ids == r.expected.ids),
            said(r.there.digest == r.expected.digest),
            r.there.digest.clone(),
            said(r.here == r.expected),
            format_fixed(Some(r.seconds), 2),
        ]
    };
    let titles = ["case", "tokens", "ids", "logits", "logits' digest", "here", "seconds"];
    format_table(to_cells(titles), rows.iter().map(line))
}

/// Describes the first difference of a row that has not passed.
pub fn describe_difference(row: &CaseResult) -> String {
    let (found, place) = if row.there == row.expected { (&row.here, "here") } else { (&row.there, "there") };
    let expected = &row.expected;
    if let Some(i) = found.ids.iter().zip(&expected.ids).position(|(a, b)| a != b) {
        return format!("token {i} is {} {place}, expected {}", found.ids[i], expected.ids[i]);
    }
    if found.ids.len() != expected.ids.len() {
        return format!("{} tokens {place}, expected {}", found.ids.len(), expected.ids.len());
    }
    format!(
        "the tokens are equal, the digest of the last logits is {} {place}, expected {}",
        found.digest, expected.digest
    )
}

/// The first layer in which two outputs of `logits --trace-hash` differ.
pub fn find_first_layer(there: &str, here: &str) -> String {
    let (there, here) = (parse_trace(there), parse_trace(here));
    if here.is_empty() || there.len() != here.len() {
        return format!("{} layers were traced there, {} here", there.len(), here.len());
    }
    match there.iter().zip(&here).find(|(a, b)| a != b) {
        Some(((pos, layer, _), _)) => format!("first differing layer: {layer}, at position {pos}"),
        None => "no layer differs; check the head, the sampler and the tokenizer".into(),
    }
}

/// `(position, layer, digest)` of the lines `position 3 layer 0 residual 0123…`.
fn parse_trace(text: &str) -> Vec<(u64, u64, &str)> {
    let fields = |line| -> Option<(u64, u64, &str)> {
        let words: Vec<&str> = str::split_whitespace(line).collect();
        match words[..] {
            ["position", pos, "layer", layer, "residual", digest] => {
                Some((pos.parse().ok()?, layer.parse().ok()?, digest))
            }
            _ => None,
        }
    };
    text.lines().filter_map(fields).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(ids: &[u32], digest: &str) -> CaseResult {
        let expected = Outcome { ids: vec![1, 2, 3], digest: "aa".into() };
        let there = Outcome { ids: ids.into(), digest: digest.into() };
        CaseResult { name: "once".into(), there, here: expected.clone(), expected, seconds: 0.5 }
    }

    #[test]
    fn the_first_differences_and_layers_are_named() {
        assert!(row(&[1, 2, 3], "aa").passed());
        assert_eq!(describe_difference(&row(&[1, 7, 9], "bb")), "token 1 is 7 there, expected 2");
        assert_eq!(describe_difference(&row(&[1, 2], "bb")), "2 tokens there, expected 3");
        assert!(describe_difference(&row(&[1, 2, 3], "bb")).contains("logits is bb there, expected aa"));
        let mut here = row(&[1, 2, 3], "aa");
        here.here.ids[2] = 9;
        assert!(!here.passed());
        assert_eq!(describe_difference(&here), "token 2 is 9 here, expected 3");
        let text = format_results(&[row(&[1, 2, 3], "aa"), row(&[1], "bb")]);
        assert_eq!((text.lines().count(), text.matches("DIFFERS").count()), (4, 2));
        let here = "position 0 layer 0 residual aa\nposition 0 layer 1 residual bb\nposition 1 layer 0 residual cc\n";
        let there = here.replace("bb", "b0").replace("cc", "c0");
        assert_eq!(find_first_layer(&there, here), "first differing layer: 1, at position 0");
        assert!(find_first_layer(here, here).starts_with("no layer differs"));
        assert!(find_first_layer("", here).starts_with("0 layers were traced there"));
        assert!(find_first_layer("", "").starts_with("0 layers"));
        assert!(find_first_layer("position x layer 0 residual aa\n", here).starts_with("0 layers"));
    }
}
