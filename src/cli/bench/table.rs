//! The results as Markdown and as CSV.

use super::result::{Line, Report};
use crate::run::plan::mib;

/// A column: its title in Markdown and in CSV, and how to fill it.
struct Column {
    title: &'static str,
    csv: &'static str,
    cell: fn(&Line) -> Option<String>,
}

const fn column(title: &'static str, csv: &'static str, cell: fn(&Line) -> Option<String>) -> Column {
    Column { title, csv, cell }
}

/// Three significant digits or all of the integer part.
fn short(x: f64) -> String {
    let digits = match x.abs() {
        x if x >= 100.0 => 1,
        x if x >= 1.0 => 2,
        _ => 4,
    };
    format!("{x:.digits$}")
}

/// What a row is.
const ROW: [Column; 3] = [
    column("test", "test", |l| Some(l.row.name())),
    column("threads", "threads", |l| Some(l.row.threads.to_string())),
    column("KV", "kv_type", |l| Some(l.row.kv_types.to_string())),
];
/// How fast it is.
const SPEED: [Column; 8] = [
    column("tokens/s", "tokens_per_second", |l| Some(short(l.speed.median))),
    column("min", "min", |l| Some(short(l.speed.min))),
    column("max", "max", |l| Some(short(l.speed.max))),
    column("GB/s", "gb_per_s", |l| l.gb_per_s.map(short)),
    column("% of memory", "bandwidth_percent", |l| l.percent.map(|p| format!("{p:.1}"))),
    column("GOPS", "gops", |l| l.gops.map(short)),
    column("% of peak", "peak_percent", |l| l.peak_percent.map(|p| format!("{p:.1}"))),
    column("x decode", "times_decode", |l| l.times_decode.map(short)),
];
const RATIO: Column = column("x earlier", "ratio", |l| l.ratio.map(|r| format!("{r:.3}")));

/// How time grows with depth, which has a table of its own in Markdown.
const GROWTH: [Column; 3] = [
    column("ms/token", "ms_per_token", |l| l.growth.map(|g| format!("{:.3}", g.measured_ms))),
    column("predicted", "predicted_ms_per_token", |l| l.growth.map(|g| format!("{:.3}", g.predicted_ms))),
    column("deviation %", "deviation_percent", |l| l.growth.map(|g| format!("{:+.1}", g.deviation()))),
];
/// What holds for all rows with as many threads; in Markdown once for each number of threads.
const CEILINGS: [Column; 2] = [
    column("read GB/s", "read_gb_per_s", |l| l.read.map(short)),
    column("integer peak GOPS", "peak_gops", |l| l.peak.map(short)),
];

/// Tables of the rows, of their growth with depth if any, and of the run as a whole.
pub(super) fn markdown(report: &Report) -> String {
    let compared = report.rows.iter().any(|l| l.ratio.is_some());
    let speed = ROW.iter().chain(&SPEED).chain(compared.then_some(&RATIO));
    let mut text = lines(speed, report.rows.iter());
    let mut deep = report.rows.iter().filter(|l| l.growth.is_some()).peekable();
    if deep.peek().is_some() {
        text += &format!("\n{}", lines(ROW.iter().chain(&GROWTH), deep));
    }
    format!("{text}\n{}", whole(report))
}

/// A line for each row.
fn lines<'a>(columns: impl Iterator<Item = &'static Column>, rows: impl Iterator<Item = &'a Line>) -> String {
    let columns: Vec<&Column> = columns.collect();
    let titles: Vec<String> = columns.iter().map(|c| c.title.to_string()).collect();
    let cells = |line: &Line| columns.iter().map(|c| (c.cell)(line).unwrap_or_else(|| "–".into())).collect();
    pipes(&titles, &rows.map(cells).collect::<Vec<_>>())
}

/// One line for the run.
fn whole(report: &Report) -> String {
    let e = &report.environment;
    let mut whole = vec![
        ("model".to_string(), e.model.clone()),
        ("weights".into(), e.weight_type.clone()),
        ("load ms".into(), format!("{:.1}", report.load.as_secs_f64() * 1e3)),
        ("peak resident".into(), report.peak_rss.map_or("–".into(), mib)),
    ];
    for c in &report.ceilings {
        let with = format!("{} thread{}", c.threads, if c.threads == 1 { "" } else { "s" });
        let cell = |rate: Option<f64>| rate.map_or("–".into(), |r| short(r / 1e9));
        whole.push((format!("read GB/s, {with}"), cell(c.read.as_ref().map(|r| r.0))));
        whole.push((format!("integer peak GOPS, {with}"), cell(c.ops)));
    }
    let (titles, values): (Vec<String>, Vec<String>) = whole.into_iter().unzip();
    pipes(&titles, &[values])
}

/// A Markdown table that is also legible as it is; the first column is left-aligned.
fn pipes(titles: &[String], rows: &[Vec<String>]) -> String {
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

/// One line a row. No cell holds a comma or a quote but the model's name, which may.
pub(super) fn csv(report: &Report) -> String {
    let compared = report.rows.iter().any(|l| l.ratio.is_some());
    let columns = ROW.iter().chain(&SPEED).chain(compared.then_some(&RATIO)).chain(&GROWTH).chain(&CEILINGS);
    let columns: Vec<&Column> = columns.collect();
    let titles: Vec<&str> = columns.iter().map(|c| c.csv).collect();
    let mut text = format!("model,weight_type,{},load_ms,peak_rss_bytes\n", titles.join(","));
    let model = format!("\"{}\"", report.environment.model.replace('"', "\"\""));
    for line in &report.rows {
        let cells: Vec<String> = columns.iter().map(|c| (c.cell)(line).unwrap_or_default()).collect();
        let load = report.load.as_secs_f64() * 1e3;
        let peak = report.peak_rss.map_or(String::new(), |b| b.to_string());
        let weights = &report.environment.weight_type;
        text += &format!("{model},{weights},{},{load:.3},{peak}\n", cells.join(","));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::ceiling::Ceiling;
    use super::super::result::tests::report;
    use super::*;

    #[test]
    fn markdown_lines_have_the_same_columns() {
        let mut report = report();
        let text = markdown(&report);
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
        assert!(!rows.contains("x earlier"));
        report.rows[0].ratio = Some(1.25);
        assert!(markdown(&report).contains("x earlier") && markdown(&report).contains("1.250"));
    }

    #[test]
    fn csv_lines_have_the_same_fields() {
        let mut report = report();
        report.environment.model = "a \"b\"".into();
        let text = csv(&report);
        let commas: Vec<usize> = text.lines().map(|l| l.matches(',').count()).collect();
        assert_eq!(commas, [19; 4]);
        assert!(text.lines().nth(1).is_some_and(|l| l.starts_with("\"a \"\"b\"\"\",q4_0,pp4,2,q4,50.00,")));
    }

    #[test]
    fn what_was_not_measured_is_a_dash() {
        let mut report = report();
        report.ceilings[0] = Ceiling { threads: 1, read: None, ops: None };
        report.rows.truncate(1);
        let text = markdown(&report);
        assert_eq!(text.split("\n\n").count(), 2, "{text}");
        let last = text.lines().last().unwrap_or("");
        assert!(text.contains("read GB/s, 1 thread |") && last.ends_with("– |"), "{text}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [1234.56, 99.994, 1.0, 0.01234].map(short),
            ["1234.6", "99.99", "1.00", "0.0123"].map(String::from)
        );
    }
}
