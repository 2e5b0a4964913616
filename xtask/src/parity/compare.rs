//! Pure comparisons: logits with logits, text with text.

/// Allowed: `max |difference| <= TOLERANCE * max(1, max |logit|)`.
pub const TOLERANCE: f32 = 1e-4;

/// The largest difference of two tables of logits.
#[derive(Debug, PartialEq)]
pub struct Difference {
    pub row: usize,
    pub column: usize,
    pub found: f32,
    pub expected: f32,
    /// `|found - expected| / max(1, max |expected|)`; infinite when a value is not finite.
    pub relative: f32,
}

impl Difference {
    pub fn is_within(&self, tolerance: f32) -> bool {
        self.relative <= tolerance
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Difference { row, column, found, expected, relative } = self;
        write!(f, "row {row}, id {column}: {found} instead of {expected}, relative error {relative:.1e}")
    }
}

/// The largest difference. Both tables are `[row][vocab]` and equally long.
pub fn largest_difference(found: &[f32], expected: &[f32], vocab: usize) -> Difference {
    assert_eq!(found.len(), expected.len());
    let scale = max_abs(expected).max(1.0);
    let relative = |i: usize| {
        let d = (found[i] - expected[i]).abs() / scale;
        if d.is_finite() { d } else { f32::INFINITY }
    };
    let at = (0..found.len()).max_by(|&a, &b| relative(a).total_cmp(&relative(b))).unwrap_or(0);
    Difference {
        row: at / vocab,
        column: at % vocab,
        found: found[at],
        expected: expected[at],
        relative: relative(at),
    }
}

/// Root mean square of the differences, over the largest expected magnitude.
pub fn rms_difference(found: &[f32], expected: &[f32]) -> f64 {
    let sum: f64 = found.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (sum / expected.len().max(1) as f64).sqrt() / f64::from(max_abs(expected).max(1.0))
}

pub fn max_abs(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m, x| m.max(x.abs()))
}

/// The first of the largest.
pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, x) in row.iter().enumerate() {
        if *x > row[best] {
            best = i;
        }
    }
    best as u32
}

/// The greedy steps that were not taken as expected: step, id found, id expected. Steps whose margin
/// is not above `threshold` are too close to call.
pub fn wrong_steps(
    rows: &[f32],
    expected: &[u32],
    margins: &[f64],
    threshold: f64,
) -> Vec<(usize, u32, u32)> {
    let vocab = rows.len() / expected.len().max(1);
    let steps = rows.chunks_exact(vocab.max(1)).zip(expected).zip(margins).enumerate();
    steps
        .filter(|(_, (_, margin))| **margin > threshold)
        .map(|(step, ((row, &id), _))| (step, argmax(row), id))
        .filter(|(_, found, id)| found != id)
        .collect()
}

/// Compares the text of a whole generation. One newline at the end is the
/// terminal's, not the model's.
pub fn is_text(printed: &[u8], expected: &str) -> bool {
    printed == expected.as_bytes() || printed.strip_suffix(b"\n") == Some(expected.as_bytes())
}

/// Compares the text of a generation cut short with the beginning of the expected text. A character whose last
/// bytes were cut off shows as U+FFFD.
pub fn is_beginning(printed: &[u8], expected: &str) -> bool {
    let printed = String::from_utf8_lossy(printed);
    let begins = |text: &str| expected.starts_with(text.trim_end_matches('\u{fffd}'));
    begins(&printed) || printed.strip_suffix('\n').is_some_and(begins)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_difference_is_relative_and_no_number_is_never_within() {
        let d = largest_difference(&[1.0, -20.0, 3.0, 4.5], &[1.0, -20.0, 3.0, 4.0], 2);
        assert_eq!((d.row, d.column, d.relative), (1, 1, 0.025));
        assert!(d.is_within(0.03) && !d.is_within(TOLERANCE));
        // Small logits are not held to a tighter bound than 1e-4 absolute.
        assert_eq!(largest_difference(&[0.5], &[0.25], 1).relative, 0.25);
        for bad in [f32::NAN, f32::INFINITY] {
            let d = largest_difference(&[0.0, bad, 9.0], &[0.0, 1.0, 1.0], 3);
            assert!(d.column == 1 && !d.is_within(1e9), "{d}");
        }
        assert!((rms_difference(&[1.5, -0.5], &[1.0, -1.0]) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn only_decidable_steps_count_and_text_is_compared_exactly() {
        let rows = [0.0, 1.0, 5.0, 5.0, 2.0, 0.0]; // [3][2]
        assert_eq!(wrong_steps(&rows, &[1, 0, 0], &[1.0, 1.0, 1.0], 0.1), []);
        assert_eq!(wrong_steps(&rows, &[0, 1, 1], &[1.0, 0.1, 1.0], 0.1), [(0, 1, 0), (2, 0, 1)]);
        assert!(is_text(b"ab", "ab") && is_text(b"ab\n", "ab") && is_text(b"ab\n", "ab\n"));
        assert!(!is_text(b"ab\n\n", "ab") && !is_text(b"a", "ab"));
        assert!(is_beginning("a\u{fffd}".as_bytes(), "aé") && is_beginning(b"a\n", "ab"));
        assert!(!is_beginning(b"b", "ab"));
    }
}
