//! The date and time that templates print, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: &str = "January February March April May June July August September October November December";
/// Weekdays, beginning with that of 1970-01-01.
const WEEKDAYS: &str = "Thursday Friday Saturday Sunday Monday Tuesday Wednesday";

/// A date and time in UTC, to the second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UtcTime {
    /// Seconds since 1970-01-01.
    seconds: u64,
}

impl UtcTime {
    /// The moment `seconds` after 1970-01-01, at most the end of the year 9999.
    pub fn from_unix(seconds: u64) -> Self {
        Self { seconds: seconds.min(253_402_300_799) }
    }

    /// The current time.
    pub fn now() -> Self {
        Self::from_unix(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
    }

    /// Seconds since 1970-01-01.
    pub fn unix_seconds(self) -> u64 {
        self.seconds
    }

    /// Formats the moment like Python's `strftime`; the error is the first unknown directive.
    ///
    /// ```
    /// use text::chat::UtcTime;
    /// let moment = UtcTime::from_unix(1_721_995_200);
    /// assert_eq!(moment.format_strftime("%A, %Y-%m-%d %H:%M").unwrap(), "Friday, 2024-07-26 12:00");
    /// assert_eq!(moment.format_strftime("%Q").unwrap_err(), "%Q");
    /// ```
    pub fn format_strftime(self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let padding = chars.clone().next().filter(|&c| c == '-').and_then(|_| chars.next());
            let directive = chars.next().ok_or("%")?;
            out += &self.format_field(directive, padding).ok_or_else(|| format!("%{directive}"))?;
        }
        Ok(out)
    }

    /// The text of a directive; with a `-` as `padding`, numbers are not padded with zeros.
    fn format_field(self, directive: char, padding: Option<char>) -> Option<String> {
        let days = self.seconds / 86_400;
        let (year, month, day) = civil_date(days);
        let (hour, minute) = (self.seconds / 3600 % 24, self.seconds / 60 % 60);
        let name = |names: &str, at: u64| names.split(' ').nth(at as usize).unwrap_or_default().to_owned();
        let (weekday, month_name) = (name(WEEKDAYS, days % 7), name(MONTHS, month - 1));
        let (number, width) = match directive {
            'A' => return Some(weekday),
            'a' => return Some(weekday[..3].into()),
            'B' => return Some(month_name),
            'b' => return Some(month_name[..3].into()),
            'p' => return Some(name("AM PM", hour / 12)),
            'Z' => return Some("UTC".into()),
            'z' => return Some("+0000".into()),
            '%' => return Some("%".into()),
            'D' => return self.format_strftime("%m/%d/%y").ok(),
            'F' => return self.format_strftime("%Y-%m-%d").ok(),
            'T' => return self.format_strftime("%H:%M:%S").ok(),
            'Y' => (year, 1),
            'y' => (year % 100, 2),
            'm' => (month, 2),
            'd' => (day, 2),
            'j' => (day_of_year(days) + 1, 3),
            'H' => (hour, 2),
            'I' => ((hour + 11) % 12 + 1, 2),
            'M' => (minute, 2),
            'S' => (self.seconds % 60, 2),
            _ => return None,
        };
        let width = padding.map_or(width, |_| 1);
        Some(format!("{number:0width$}"))
    }
}

/// Year, month and day (both from 1) of a day since 1970-01-01. Howard Hinnant's civil_from_days: its years begin in
/// March.
fn civil_date(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = (from_march + 2) % 12 + 1;
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

/// The day of the year, from 0.
fn day_of_year(days: u64) -> u64 {
    let before = civil_date(days).0 - 1;
    days - (before * 365 + before / 4 - before / 100 + before / 400 - 719_162)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        for (days, text) in [
            (0, "01 Jan 1970"),
            (59, "01 Mar 1970"),
            (11_016, "29 Feb 2000"),
            (19_930, "26 Jul 2024"),
            (20_453, "31 Dec 2025"),
            (47_540, "28 Feb 2100"),
            (47_541, "01 Mar 2100"),
        ] {
            assert_eq!(UtcTime::from_unix(days * 86_400).format_strftime("%d %b %Y"), Ok(text.into()));
            assert_eq!(
                UtcTime::from_unix(days * 86_400 + 86_399).format_strftime("%d %b %Y"),
                Ok(text.into())
            );
        }
        assert!(UtcTime::now().unix_seconds() > 1_700_000_000);
    }

    #[test]
    fn directives() {
        let moment = UtcTime::from_unix(1_709_219_105); // 2024-02-29 15:05:05, a Thursday
        for (form, text) in [
            ("%A %-d. %B %Y, %I:%M %p", "Thursday 29. February 2024, 03:05 PM"),
            ("%a %F %T %Z%%", "Thu 2024-02-29 15:05:05 UTC%"),
            ("%-H %-M %D %j %y", "15 5 02/29/24 060 24"),
            ("", ""),
        ] {
            assert_eq!(moment.format_strftime(form), Ok(text.into()), "{form}");
        }
        for (form, bad) in [("%q", "%q"), ("x%", "%"), ("%-", "%")] {
            assert_eq!(moment.format_strftime(form), Err(bad.into()), "{form}");
        }
        assert_eq!(UtcTime::from_unix(u64::MAX).format_strftime("%F"), Ok("9999-12-31".into()));
    }
}
