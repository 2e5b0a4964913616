//! Repetitions of a measurement: their median and spread.

/// The repetitions of a row, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Timed {
    /// Tokens per second.
    pub speeds: Vec<f64>,
    /// Bytes per second that the machine read at the time of each: the mean of right before and right after. Empty for
    /// rows that are not compared with them.
    pub reads: Vec<f64>,
}

/// Median and spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Of at least one value.
    pub fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let n = sorted.len();
        let median = (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0;
        Self { median, min: sorted[0], max: sorted[n - 1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(Spread::of(&[3.0, 1.0, 2.0]), Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
        assert_eq!(Spread::of(&[7.0]), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }
}
