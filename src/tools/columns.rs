//! Tables on stdout.

use clap::ValueEnum;

/// Format of a report.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    Text,
    Json,
}

/// Alignment of a cell in its column.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

/// Lays out lines of cells in columns, each as wide as its longest cell, two spaces apart.
pub fn align_columns(sides: &[Align], lines: &[Vec<String>]) -> String {
    let width = |c: usize| lines.iter().filter_map(|l| l.get(c)).map(|s| s.chars().count()).max();
    let widths: Vec<usize> = (0..sides.len()).map(|c| width(c).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for ((cell, side), &width) in line.iter().zip(sides).zip(&widths) {
            row += &match side {
                Align::Left => format!("{cell:<width$}  "),
                Align::Right => format!("{cell:>width$}  "),
            };
        }
        text += row.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_table_line_up() {
        let lines = [vec!["a".into(), "1".into()], vec!["long".into(), "20".into(), "dropped".into()]];
        assert_eq!(align_columns(&[Align::Left, Align::Right], &lines), "a      1\nlong  20\n");
        assert_eq!(align_columns(&[], &[]), "");
    }
}
