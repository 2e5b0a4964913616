//! The results as Markdown and as CSV. Cells are made from the JSON of the rows.

use super::result::BenchResult;
use crate::run::plan::format_mib;
use serde_json::{Value, json};

/// Number of columns in Markdown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// At most [`FEW`], which fit into a narrow terminal; columns that say the same in all rows are left out.
    Short,
    All,
}

const FEW: usize = 5;

/// A column: its title in Markdown, its key in JSON (also its title in CSV), and its number format.
#[derive(Clone, Copy)]
struct Column {
    title: &'static str,
    key: &'static str,
    number: fn(f64) -> String,
}

const fn column(title: &'static str, key: &'static str, number: fn(f64) -> String) -> Column {
    Column { title, key, number }
}

/// About four significant digits.
fn format_short(x: f64) -> String {
    let digits = match x.abs() {
        x if x >= 100.0 => 1,
        x if x >= 1.0 => 2,
        _ => 4,
    };
    format!("{x:.digits$}")
}

fn format_tenths(x: f64) -> String {
    format!("{x:.1}")
}

fn format_thousandths(x: f64) -> String {
    format!("{x:.3}")
}

/// Columns that identify a row.
const ROW_COLUMNS: [Column; 3] = [
    column("test", "test", format_short),
    column("threads", "threads", |n| n.to_string()),
    column("KV", "kv_type", format_short),
];
/// Columns with a row's speed.
const SPEED_COLUMNS: [Column; 8] = [
    column("tokens/s", "tokens_per_second", format_short),
    column("min", "min", format_short),
    column("max", "max", format_short),
    column("GB/s", "gb_per_s", format_short),
    column("% of memory", "bandwidth_percent", format_tenths),
    column("GOPS", "gops", format_short),
    column("% of peak", "peak_percent", format_tenths),
    column("x decode", "times_decode", format_short),
];
/// Columns with a row's speed in a short table, the most useful ones first.
const SHORT_COLUMNS: [Column; 4] = [
    SPEED_COLUMNS[0],
    column("% of limit", LIMIT_PERCENT, format_tenths),
    SPEED_COLUMNS[1],
    SPEED_COLUMNS[2],
];
/// A row's percent of the limit that holds for it: bandwidth or peak.
const LIMIT_PERCENT: &str = "limit_percent";
/// Columns with the growth of the time with depth, which is a separate table in Markdown.
const GROWTH_COLUMNS: [Column; 3] = [
    column("ms/token", "ms_per_token", format_thousandths),
    column("predicted", "predicted_ms_per_token", format_thousandths),
    column("deviation %", "deviation_percent", |x| format!("{x:+.1}")),
];

impl Column {
    /// The column's cell in a row; `None` if it was not measured.
    fn format_cell(&self, row: &Value) -> Option<String> {
        let value = &row[self.key];
        value.as_str().map(String::from).or_else(|| value.as_f64().map(self.number))
    }
}

/// Read bandwidth and integer peak with this many threads.
fn format_limits(result: &BenchResult, threads: usize) -> [Option<String>; 2] {
    [result.limits.read_gb_per_s(threads), result.limits.peak_gops(threads)]
        .map(|limit| limit.map(format_short))
}

/// Tables of the rows, of their growth with depth if measured, and of the run.
pub fn to_markdown(result: &BenchResult, detail: Detail) -> String {
    let limited = |row| {
        let mut row = json!(row);
        let kind = if row["gops"].is_null() { "bandwidth_percent" } else { "peak_percent" };
        row[LIMIT_PERCENT] = row[kind].clone();
        row
    };
    let rows: Vec<Value> = result.rows.iter().map(limited).collect();
    let (deep, all): (Vec<&Value>, Vec<&Value>) =
        (rows.iter().filter(|row| row["ms_per_token"].is_f64()).collect(), rows.iter().collect());
    let speeds = if detail == Detail::All { &SPEED_COLUMNS[..] } else { &SHORT_COLUMNS };
    let mut text = row_table(&choose_columns(speeds, &all, detail), &all);
    if !deep.is_empty() {
        text += &format!("\n{}", row_table(&choose_columns(&GROWTH_COLUMNS, &all, detail), &deep));
    }
    format!("{text}\n{}", run_table(result, detail))
}

/// The columns that identify a row, followed by `others`.
fn choose_columns(others: &[Column], rows: &[&Value], detail: Detail) -> Vec<Column> {
    let varies = |key: &str| rows.iter().any(|row| row[key] != rows[0][key]);
    let wanted = |c: &&Column| detail == Detail::All || c.key == "test" || varies(c.key);
    let columns = ROW_COLUMNS.iter().filter(wanted).chain(others);
    columns.take(if detail == Detail::All { usize::MAX } else { FEW }).copied().collect()
}

/// A Markdown table with a line for each row.
fn row_table(columns: &[Column], rows: &[&Value]) -> String {
    let titles: Vec<String> = columns.iter().map(|c| c.title.to_string()).collect();
    let cells = |row: &&Value| columns.iter().map(|c| c.format_cell(row)).collect();
    markdown_table(&titles, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// A Markdown table with one line for the run, and its limits if all columns are wanted.
fn run_table(result: &BenchResult, detail: Detail) -> String {
    let e = &result.environment;
    let (mut titles, mut cells): (Vec<String>, _) = (
        ["model", "weights", "load ms", "peak resident"].map(String::from).into(),
        vec![
            Some(e.model.clone()),
            Some(e.weight_type.clone()),
            Some(format_tenths(result.load_ms)),
            result.peak_rss_bytes.map(format_mib),
        ],
    );
    for &threads in e.threads.iter().filter(|_| detail == Detail::All) {
        let with = format!("{threads} thread{}", if threads == 1 { "" } else { "s" });
        titles.extend(["read GB/s", "integer peak GOPS"].map(|title| format!("{title}, {with}")));
        cells.extend(format_limits(result, threads));
    }
    markdown_table(&titles, &[cells])
}

/// A Markdown table that is legible as plain text; the first column is left-aligned.
fn markdown_table(titles: &[String], rows: &[Vec<Option<String>>]) -> String {
    let shown = |row: &Vec<Option<String>>| {
        row.iter().map(|cell| cell.clone().unwrap_or_else(|| "–".into())).collect::<Vec<String>>()
    };
    let rows: Vec<Vec<String>> = rows.iter().map(shown).collect();
    let width = |c: usize| {
        let cells = rows.iter().map(|r| &r[c]).chain([&titles[c]]);
        cells.map(|s| s.chars().count()).max().unwrap_or(0).max(3)
    };
    let widths: Vec<usize> = (0..titles.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut text = String::from("|");
        for (c, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            text += &if c == 0 { format!(" {cell:<width$} |") } else { format!(" {cell:>width$} |") };
        }
        text + "\n"
    };
    let rule: Vec<String> = (widths.iter().enumerate())
        .map(|(c, &w)| if c == 0 { "-".repeat(w) } else { format!("{}:", "-".repeat(w - 1)) })
        .collect();
    line(titles) + &line(&rule) + &rows.iter().map(|r| line(r)).collect::<String>()
}

/// A CSV line per row. Only the model's name may contain a comma or a quote.
pub fn to_csv(result: &BenchResult) -> String {
    let columns: Vec<&Column> = ROW_COLUMNS.iter().chain(&SPEED_COLUMNS).chain(&GROWTH_COLUMNS).collect();
    let titles: Vec<&str> = columns.iter().map(|c| c.key).collect();
    let titles = titles.join(",");
    let mut text = format!("model,weight_type,{titles},read_gb_per_s,peak_gops,load_ms,peak_rss_bytes\n");
    let e = &result.environment;
    let before = format!("\"{}\",{}", e.model.replace('"', "\"\""), e.weight_type);
    let (load, peak) =
        (format_thousandths(result.load_ms), result.peak_rss_bytes.map(|bytes| bytes.to_string()));
    for row in &result.rows {
        let json = json!(row);
        let cells = columns.iter().map(|c| c.format_cell(&json)).chain(format_limits(result, row.threads));
        let cells = cells.chain([Some(load.clone()), peak.clone()]).map(Option::unwrap_or_default);
        text += &format!("{before},{}\n", cells.collect::<Vec<_>>().join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::limits::MachineLimits;
    use super::super::result::tests::result;
    use super::*;

    #[test]
    fn markdown_lines_have_the_same_columns() {
        let text = to_markdown(&result(), Detail::All);
        let tables: Vec<&str> = text.split("\n\n").collect();
        let [rows, growth, whole] = tables[..] else { panic!("three tables: {text}") };
        for table in tables {
            let pipes: Vec<usize> = table.lines().map(|l| l.matches('|').count()).collect();
            assert!(pipes.iter().all(|&p| p == pipes[0]), "{table}");
        }
        assert_eq!(rows.lines().count(), 5);
        assert!(rows.lines().nth(2).is_some_and(|l| l.starts_with("| pp4 ") && l.contains("50.00")));
        assert!(
            growth.lines().count() == 3 && growth.lines().nth(2).is_some_and(|l| l.contains("| tg3 @ d8 "))
        );
        assert!(whole.contains("read GB/s, 2 threads") && whole.contains("integer peak GOPS, 2 threads"));
    }

    #[test]
    fn a_short_table_has_five_columns_at_most() {
        let mut result = result();
        let titles = |result: &BenchResult| {
            let text = to_markdown(result, Detail::Short);
            let tables = text.split("\n\n").map(|table| table.lines().next().unwrap_or("").to_string());
            tables.map(|line| line.trim_matches('|').replace(' ', "")).collect::<Vec<_>>()
        };
        let run = "model|weights|loadms|peakresident";
        let growth = "test|ms/token|predicted|deviation%";
        assert_eq!(titles(&result), ["test|tokens/s|%oflimit|min|max", growth, run]);
        result.rows[0].threads = 4;
        result.rows[1].kv_type = "q8".into();
        let growth = "test|threads|KV|ms/token|predicted";
        assert_eq!(titles(&result), ["test|threads|KV|tokens/s|%oflimit", growth, run]);
    }

    #[test]
    fn csv_lines_have_the_same_fields() {
        let mut result = result();
        result.environment.model = "a \"b\"".into();
        let text = to_csv(&result);
        let commas: Vec<usize> = text.lines().map(|l| l.matches(',').count()).collect();
        assert_eq!(commas, [19; 4]);
        assert!(text.lines().nth(1).is_some_and(|l| l.starts_with("\"a \"\"b\"\"\",q4_0,pp4,2,q4,50.00,")));
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        let mut result = result();
        result.environment.threads = vec![1];
        result.limits = MachineLimits::default();
        result.rows.truncate(1);
        let text = to_markdown(&result, Detail::All);
        assert_eq!(text.split("\n\n").count(), 2, "{text}");
        let last = text.lines().last().unwrap_or("");
        assert!(text.contains("read GB/s, 1 thread |") && last.ends_with("– |"), "{text}");
    }

    #[test]
    fn numbers_have_about_three_digits() {
        assert_eq!(
            [1234.56, 99.994, 1.0, 0.01234].map(format_short),
            ["1234.6", "99.99", "1.00", "0.0123"].map(String::from)
        );
    }
}
