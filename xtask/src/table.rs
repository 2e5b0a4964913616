//! Parts of reports: medians, numbers as text, Markdown tables with `–` for unknown values.

/// Stands for an unknown value.
pub const UNKNOWN: &str = "–";

/// Median and extremes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// The spread of some values; `None` without any.
    pub fn of(values: impl Iterator<Item = f64>) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len().checked_sub(1)?;
        let median = (sorted[n / 2] + sorted[n.div_ceil(2)]) / 2.0;
        Some(Spread { median, min: sorted[0], max: sorted[n] })
    }
}

/// A number with `digits` decimals.
pub fn format_fixed(x: Option<f64>, digits: usize) -> String {
    x.map_or(UNKNOWN.into(), |x| format!("{x:.digits$}"))
}

/// A number with about three significant digits and its whole integer part.
pub fn format_short(x: Option<f64>) -> String {
    let digits = match x.unwrap_or(0.0).abs() {
        x if x >= 100.0 => 1,
        x if x >= 1.0 => 2,
        _ => 4,
    };
    format_fixed(x, digits)
}

/// Cells or titles of a row.
pub fn to_cells<'a>(texts: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    texts.into_iter().map(String::from).collect()
}

/// A Markdown table with padded columns; the first one is left-aligned. Every row has as many cells as there are
/// titles.
pub fn format_table(titles: Vec<String>, rows: impl Iterator<Item = Vec<String>>) -> String {
    // Names come from devices: a cell must not end its column or its line.
    let tame = |s: String| s.replace('|', "/").replace(char::is_control, " ");
    let mut lines: Vec<Vec<String>> =
        [titles].into_iter().chain(rows).map(|row| row.into_iter().map(tame).collect()).collect();
    let width = |c: usize| lines.iter().map(|row| row[c].chars().count()).max().unwrap_or(0).max(3);
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    let rule = |(c, &w): (usize, &usize)| if c == 0 { "-".repeat(w) } else { "-".repeat(w - 1) + ":" };
    lines.insert(1, widths.iter().enumerate().map(rule).collect());
    let cell = |(c, (cell, w)): (usize, (&String, &usize))| {
        if c == 0 { format!(" {cell:<w$} |") } else { format!(" {cell:>w$} |") }
    };
    let line = |row: &Vec<String>| row.iter().zip(&widths).enumerate().map(cell).collect::<String>();
    lines.iter().map(|row| format!("|{}\n", line(row))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_short_numbers_and_cells_that_stay_in_their_column() {
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        assert_eq!(of(&[3.0, 1.0, 2.0]), Some(Spread { median: 2.0, min: 1.0, max: 3.0 }));
        assert_eq!(of(&[4.0, 1.0]), Some(Spread { median: 2.5, min: 1.0, max: 4.0 }));
        assert_eq!(of(&[]), None);
        let texts = [None, Some(0.01234), Some(1.234), Some(1234.5)].map(format_short);
        assert_eq!(texts, ["–", "0.0123", "1.23", "1234.5"]);
        let table = format_table(to_cells(["a", "b"]), [to_cells(["x|y\n|", "\u{1b}[2J"])].into_iter());
        assert_eq!(table.lines().count(), 3);
        assert!(table.lines().all(|l| l.matches('|').count() == 3) && !table.contains('\u{1b}'), "{table}");
    }
}
