//! `cargo xtask chart`: the bar chart of the README, drawn from a table of `xtask/MEASUREMENTS.md`.

use crate::command;
use crate::error::{AtPath, Error, Result};
use files::atomic_file;
use std::fmt::Write;
use std::fs;

const PAGE: &str = "xtask/MEASUREMENTS.md";
const CHART: &str = "xtask/speed.svg";
/// The line before the table. Its columns: what was measured, tokens/s of antigravity, tokens/s of llama.cpp.
const MARK: &str = "<!-- speed.svg -->";

const WIDTH: usize = 600;
/// Left edge of all bars.
const LEFT: usize = 16;
/// Length of the longest bar; its number stands to the right.
const LONGEST: f64 = 440.0;
/// Top of the first row, below the title and the legend.
const TOP: usize = 84;
/// From one row to the next: a line of text and two bars.
const ROW: usize = 66;
/// The colours of `xtask/src/profile/page.html`. The card behind the bars stays legible on a page of any colour.
const STYLE: &str = "\
text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1b1f24}
.title{font-weight:650;font-size:16px}.soft{fill:#59636e}.card{fill:#fff;stroke:#d8dee4}
.us{fill:#0b6bcb}.them{fill:#9aa5b1}
@media(prefers-color-scheme:dark){text{fill:#e6eaef}.soft{fill:#9aa5b1}.card{fill:#171c23;stroke:#303843}
.us{fill:#5aa9f7}.them{fill:#5c677d}}";

pub fn run() -> Result<()> {
    let (page, chart) = (command::root().join(PAGE), command::root().join(CHART));
    let text = fs::read_to_string(&page).at(&page)?;
    atomic_file::write_file(&chart, draw_chart(&read_rows(&text)?).as_bytes()).at(&chart)?;
    println!("{}", chart.display());
    Ok(())
}

/// A row of the table.
struct SpeedRow<'a> {
    what: &'a str,
    /// The speeds of antigravity and llama.cpp: as they are written, and in tokens/s.
    speeds: [(&'a str, f64); 2],
}

impl SpeedRow<'_> {
    /// Speed of antigravity divided by that of llama.cpp.
    fn ratio(&self) -> f64 {
        self.speeds[0].1 / self.speeds[1].1
    }
}

/// Reads the table after [`MARK`].
fn read_rows(page: &str) -> Result<Vec<SpeedRow<'_>>> {
    let table = page.split_once(MARK).map_or("", |(_, after)| after.trim_start());
    let rows: Vec<_> = table
        .lines()
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(read_row)
        .collect::<Result<_>>()?;
    if rows.is_empty() {
        return Err(Error::Failed(format!("{PAGE}: no table follows {MARK}")));
    }
    Ok(rows)
}

fn read_row(line: &str) -> Result<SpeedRow<'_>> {
    let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
    match cells[..] {
        [what, ours, theirs] => {
            let speed = |cell| find_speed(cell).map(|speed| (cell, speed));
            speed(ours).zip(speed(theirs)).map(|(ours, theirs)| SpeedRow { what, speeds: [ours, theirs] })
        }
        _ => None,
    }
    .ok_or_else(|| Error::Failed(format!("{PAGE}: {line}: a row of {CHART} is a text and two speeds")))
}

/// The number in a cell, or the middle of its range: `2,090 to 2,210`.
fn find_speed(cell: &str) -> Option<f64> {
    let numbers: Vec<f64> = cell.split(' ').filter_map(|word| word.replace(',', "").parse().ok()).collect();
    let sum: f64 = numbers.iter().sum();
    (sum > 0.0).then(|| sum / numbers.len() as f64)
}

/// Draws two bars for each row: the speed of antigravity, with that of llama.cpp as the unit of length.
fn draw_chart(rows: &[SpeedRow]) -> String {
    let unit = LONGEST / rows.iter().map(SpeedRow::ratio).fold(1.0, f64::max);
    let height = TOP + ROW * rows.len() - 6;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\">\n<title>Speed of antigravity and llama.cpp</title>\n\
         <style>{STYLE}</style>\n\
         <rect class=\"card\" x=\".5\" y=\".5\" width=\"{}\" height=\"{}\" rx=\"10\"/>\n\
         <text class=\"title\" x=\"{LEFT}\" y=\"28\">Tokens/s; the bars are relative to llama.cpp</text>\n\
         <rect class=\"us\" x=\"{LEFT}\" y=\"43\" width=\"12\" height=\"12\"/>\
         <text x=\"34\" y=\"54\">antigravity</text>\n\
         <rect class=\"them\" x=\"130\" y=\"43\" width=\"12\" height=\"12\"/>\
         <text x=\"148\" y=\"54\">llama.cpp</text>\n",
        WIDTH - 1,
        height - 1,
    );
    for (row, top) in rows.iter().zip((TOP..).step_by(ROW)) {
        let what = row.what.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(svg, "<text class=\"soft\" x=\"{LEFT}\" y=\"{top}\">{what}</text>");
        for ((class, length, y), (cell, _)) in
            [("us", row.ratio(), top + 7), ("them", 1.0, top + 26)].into_iter().zip(row.speeds)
        {
            let length = length * unit;
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"17\" rx=\"2\"/>\
                 <text x=\"{:.1}\" y=\"{}\">{cell}</text>",
                LEFT as f64 + length + 7.0,
                y + 13,
            );
        }
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str) -> String {
        fs::read_to_string(command::root().join(name)).unwrap()
    }

    #[test]
    fn the_chart_and_the_readme_have_the_numbers_of_the_measurements() {
        let (page, readme, chart) = (read(PAGE), read("README.md"), read(CHART));
        let rows = read_rows(&page).unwrap();
        assert!(chart == draw_chart(&rows), "{CHART} is not that of {PAGE}; run cargo xtask chart");
        assert!(chart.len() <= 8 << 10, "{} bytes", chart.len());
        for SpeedRow { what, speeds: [(ours, _), (theirs, _)] } in rows {
            let line = format!("| {what} | {ours} | {theirs} |\n");
            assert!(readme.contains(&line), "README.md lacks the row {line}");
        }
    }

    #[test]
    fn a_table_that_cannot_be_drawn_is_refused() {
        let read = |row: &str| {
            let page = format!("{MARK}\n\n| | us | them |\n|---|---|---|\n{row}\n\nnext\n");
            read_rows(&page).map(|rows| rows[0].ratio()).map_err(|e| e.to_string())
        };
        assert_eq!(read("| a | 1,000 to 3,000 | 1,000 (CUDA) |"), Ok(2.0));
        for row in ["| a | 1 |", "| a | 1 | |", "| a | 1 | 0 |", "| a | 1 | 2 | 3 |"] {
            assert!(read(row).unwrap_err().contains(row), "{row}");
        }
        assert!(read("").unwrap_err().contains("no table"));
        assert!(read_rows("no mark").is_err());
    }
}
