//! The date and time that templates print, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// A second in UTC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Since 1970-01-01.
    seconds: u64,
}

impl Moment {
    /// `seconds` after 1970-01-01, at most until the year 9999.
    pub fn from_unix(seconds: u64) -> Self {
        Self { seconds: seconds.min(253_402_300_799) }
    }

    /// Now.
    pub fn now() -> Self {
        Self::from_unix(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
    }

    /// Seconds since 1970-01-01.
    pub fn unix(self) -> u64 {
        self.seconds
    }

    /// Formats the moment like C's `strftime`; the error is the first directive that is not supported.
    ///
    /// ```
    /// use text::chat::Moment;
    /// let moment = Moment::from_unix(1_721_995_200);
    /// assert_eq!(moment.format("%A, %Y-%m-%d %H:%M").unwrap(), "Friday, 2024-07-26 12:00");
    /// assert_eq!(moment.format("%Q").unwrap_err(), "%Q");
    /// ```
    pub fn format(self, form: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = form.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let (padded, letter) = match chars.next() {
                Some('-') => (Padded::No, chars.next()),
                letter => (Padded::Yes, letter),
            };
            let letter = letter.ok_or("%")?;
            out += &self.field(letter, padded).ok_or_else(|| format!("%{letter}"))?;
        }
        Ok(out)
    }

    fn field(self, letter: char, padded: Padded) -> Option<String> {
        let (year, month, day) = self.civil();
        let (hour, minute, second) = (self.seconds / 3600 % 24, self.seconds / 60 % 60, self.seconds % 60);
        let two = |n: u64| match padded {
            Padded::Yes => format!("{n:02}"),
            Padded::No => n.to_string(),
        };
        let weekday = WEEKDAYS[(self.seconds / 86_400 % 7) as usize];
        Some(match letter {
            'Y' => year.to_string(),
            'y' => two(year % 100),
            'm' => two(month as u64),
            'd' => two(day),
            'e' => format!("{day:2}"),
            'B' => MONTHS[month - 1].into(),
            'b' | 'h' => MONTHS[month - 1][..3].into(),
            'A' => weekday.into(),
            'a' => weekday[..3].into(),
            'H' => two(hour),
            'I' => two((hour + 11) % 12 + 1),
            'M' => two(minute),
            'S' => two(second),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'D' => format!("{month:02}/{day:02}/{:02}", year % 100),
            'R' => format!("{hour:02}:{minute:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            '%' => "%".into(),
            _ => return None,
        })
    }

    /// Year, month and day, the latter two from 1. Howard Hinnant's civil_from_days: years begin in March.
    fn civil(self) -> (u64, usize, u64) {
        let z = self.seconds / 86_400 + 719_468;
        let (era, day_of_era) = (z / 146_097, z % 146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * from_march + 2) / 5 + 1;
        let month = (from_march + 2) % 12 + 1;
        (era * 400 + year_of_era + u64::from(month <= 2), month as usize, day)
    }
}

/// Whether numbers below ten get a leading zero.
#[derive(Clone, Copy)]
enum Padded {
    Yes,
    No,
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
            assert_eq!(Moment::from_unix(days * 86_400).format("%d %b %Y"), Ok(text.into()));
            assert_eq!(Moment::from_unix(days * 86_400 + 86_399).format("%d %b %Y"), Ok(text.into()));
        }
        assert!(Moment::now().unix() > 1_700_000_000);
    }

    #[test]
    fn directives() {
        let moment = Moment::from_unix(1_709_219_105); // 2024-02-29 15:05:05, a Thursday
        for (form, text) in [
            ("%A %-d. %B %Y, %I:%M %p", "Thursday 29. February 2024, 03:05 PM"),
            ("%a %F %T %Z%%", "Thu 2024-02-29 15:05:05 UTC%"),
            ("%-H %-M %D %R %y", "15 5 02/29/24 15:05 24"),
            ("", ""),
        ] {
            assert_eq!(moment.format(form), Ok(text.into()), "{form}");
        }
        for (form, bad) in [("%q", "%q"), ("x%", "%"), ("%-", "%")] {
            assert_eq!(moment.format(form), Err(bad.into()), "{form}");
        }
        assert_eq!(Moment::from_unix(u64::MAX).format("%F"), Ok("9999-12-31".into()));
    }
}
