//! Which part of the project may name which: arrows go down, and none goes round.
//!
//! - A part names only the parts that its row of [`ARROWS`] lists. A part is a file or a folder with its file; where rows
//!   lie within each other, the innermost counts.
//! - The files of a folder, each with the folder of its own, name each other in one direction only. A file and those
//!   below it may name each other: so Rust nests modules.
//!
//! A name that a file only passes on, with `use`, counts as a name of the file it is from. Tests name what they like.

use super::uses::Use;
use std::collections::{BTreeMap, BTreeSet};

/// What each part may name. Layouts of memory are parts of their own, so that `run` and `cli` cannot name them.
#[rustfmt::skip]
const ARROWS: &[(&str, &[&str])] = &[
    ("src/main", &["src/commands", "src/cli", "src/files"]),
    ("src/commands", &["src/serve", "src/tools", "src/cli", "src/dims", "src/files"]),
    ("src", &["src/run", "src/text", "src/files"]),
    ("src/cli", &[
        "src/run", "src/model", "src/opencl", "src/text", "src/numeric", "src/opencl/runtime", "src/dims",
        "src/files",
    ]),
    ("src/serve", &[
        "src/cli",
        "src/run", "src/model", "src/opencl", "src/text", "src/numeric", "src/opencl/runtime", "src/dims",
        "src/files",
    ]),
    ("src/tools", &[
        "src/serve", "src/cli",
        "src/run", "src/model", "src/opencl", "src/text", "src/numeric", "src/opencl/runtime", "src/dims",
        "src/files",
    ]),
    ("src/run", &[
        "src/model", "src/model/cpu", "src/opencl", "src/text", "src/numeric", "src/opencl/runtime",
        "src/dims", "src/files",
    ]),
    ("src/model/cpu", &[
        "src/model", "src/numeric", "src/numeric/quant", "src/numeric/simd/attend", "src/dims",
        "src/files", "src/files/blocks",
    ]),
    ("src/opencl", &[
        "src/model", "src/numeric", "src/numeric/quant", "src/opencl/runtime", "src/dims", "src/files",
        "src/files/blocks",
    ]),
    ("src/model", &["src/numeric", "src/numeric/quant", "src/dims", "src/files", "src/files/blocks"]),
    ("src/text", &["src/numeric/widely", "src/files"]),
    ("src/numeric", &[
        "src/numeric/quant", "src/numeric/simd/attend", "src/numeric/widely", "src/files", "src/files/blocks",
    ]),
    ("src/numeric/quant", &["src/numeric", "src/numeric/widely", "src/files", "src/files/blocks"]),
    ("src/numeric/simd/attend", &["src/numeric", "src/files"]),
    ("src/numeric/widely", &[]),
    ("src/opencl/runtime", &["src/files"]),
    ("src/dims", &["src/files"]),
    ("src/files", &["src/files/blocks"]),
    ("src/files/blocks", &["src/files"]),
    ("build", &["src/files"]),
    ("xtask/completions", &["src/commands"]),
    ("xtask/past_key_values", &["src", "src/run", "src/model", "src/numeric", "src/dims"]),
    ("xtask/render_templates", &["src/text"]),
    ("xtask/src", &["src/files", "src/files/blocks"]),
];

/// The uses that no row allows.
pub fn upward(uses: &[Use]) -> Vec<String> {
    let upward = uses.iter().filter(|u| !is_allowed(&u.from, &u.to));
    upward.map(|u| format!("{}.rs:{}: {} is not for this part: see ARROWS", u.from, u.line, u.path)).collect()
}

fn is_allowed(from: &str, to: &str) -> bool {
    let (Some((part, may)), Some((other, _))) = (row(from), row(to)) else { return false };
    part == other || may.contains(other)
}

/// The row of a file. That of `src` itself is for its root alone.
fn row(file: &str) -> Option<&'static (&'static str, &'static [&'static str])> {
    let rows = ARROWS.iter().filter(|(part, _)| file == *part || *part != "src" && is_below(file, part));
    rows.max_by_key(|(part, _)| part.len())
}

/// The circles, one line for each: its arrows within the folder, and a place where each is drawn.
pub fn circles(uses: &[Use]) -> Vec<String> {
    let mut folders: BTreeMap<&str, BTreeMap<(&str, &str), &Use>> = BTreeMap::new();
    for u in uses {
        if let Some((folder, arrow)) = arrow(u) {
            folders.entry(folder).or_default().entry(arrow).or_insert(u);
        }
    }
    let mut found = Vec::new();
    for (folder, arrows) in &folders {
        let mut told: BTreeSet<&str> = BTreeSet::new();
        for &(start, _) in arrows.keys() {
            let circle: BTreeSet<&str> =
                reached(arrows, start).into_iter().filter(|n| reached(arrows, n).contains(start)).collect();
            if told.contains(start) || circle.is_empty() {
                continue;
            }
            told.extend(&circle);
            let within = arrows.iter().filter(|((a, b), _)| circle.contains(a) && circle.contains(b));
            let shown =
                within.map(|((a, b), u)| format!("{a} -> {b} ({}.rs:{}: {})", u.from, u.line, u.path));
            found.push(format!("{folder}: a circle: {}", shown.collect::<Vec<_>>().join(", ")));
        }
    }
    found
}

/// The folder where both files are, and the names there of what they are in; `None` where one is below the other.
fn arrow(u: &Use) -> Option<(&str, (&str, &str))> {
    let same = u.from.split('/').zip(u.to.split('/')).take_while(|(a, b)| a == b);
    let length = same.map(|(name, _)| name.len() + 1).sum::<usize>();
    let name = |file: &'_ str| -> Option<(usize, usize)> {
        let rest = file.get(length..).filter(|rest| !rest.is_empty())?;
        Some((length, length + rest.find('/').unwrap_or(rest.len())))
    };
    let (from, to) = (name(&u.from)?, name(&u.to)?);
    Some((u.from[..length].trim_end_matches('/'), (&u.from[from.0..from.1], &u.to[to.0..to.1])))
}

/// All that arrows lead to from here.
fn reached<'a>(arrows: &BTreeMap<(&'a str, &'a str), &Use>, from: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(at) = next.pop() {
        let new = arrows.keys().filter(|(a, _)| *a == at).map(|(_, b)| *b).filter(|b| found.insert(*b));
        next.extend(new.collect::<Vec<_>>());
    }
    found
}

fn is_below(file: &str, part: &str) -> bool {
    file.strip_prefix(part).is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(pairs: &[(&str, &str)]) -> Vec<Use> {
        let one = |&(from, to): &(&str, &str)| Use {
            from: from.into(),
            to: to.into(),
            line: 3,
            path: to.replace('/', "::"),
        };
        pairs.iter().map(one).collect()
    }

    #[test]
    fn arrows_go_down() {
        let down = [
            ("src/main", "src/commands"),
            ("src/cli/generate", "src/run/engine"),
            ("src/run/session", "src/model/device"),
            ("src/model/cpu/steps", "src/numeric/quant/format"),
            ("src/opencl/runtime/device", "src/files/error"),
            ("src/files/source/gguf", "src/files/config"),
        ];
        assert_eq!(upward(&uses(&down)), Vec::<String>::new());
        for (from, to) in down {
            assert_eq!(
                upward(&uses(&[(to, from)])).len(),
                usize::from(row(from) != row(to)),
                "{to} names {from}"
            );
        }
    }

    #[test]
    fn parts_keep_apart() {
        for (from, to) in [
            ("src/opencl/forward", "src/model/cpu/kv"),
            ("src/model/cpu", "src/opencl/kv"),
            ("src/model/device", "src/model/cpu"),
            ("src/run/plan", "src/numeric/quant/format"),
            ("src/tools/doctor", "src/files/blocks"),
            ("src/text/chat", "src/numeric/pool"),
            ("src/server", "src/run/engine"),
        ] {
            assert_eq!(upward(&uses(&[(from, to)])).len(), 1, "{from} names {to}");
        }
    }

    #[test]
    fn every_row_names_rows() {
        let known = |part: &&str| ARROWS.iter().any(|(row, _)| row == part);
        assert!(ARROWS.iter().flat_map(|(_, may)| *may).all(known));
    }

    #[test]
    fn circles_are_found_among_the_files_of_a_folder() {
        let engine = ("src/run/engine", "src/run/plan/advice");
        let plan = ("src/run/plan", "src/run/engine/stream");
        assert_eq!(circles(&uses(&[engine])), Vec::<String>::new());
        let found = circles(&uses(&[engine, plan]));
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("src/run: a circle: engine -> plan (src/run/engine.rs:3: "),
            "{}",
            found[0]
        );
    }

    #[test]
    fn longer_circles_are_found() {
        let circle = [("src/a/x", "src/a/y"), ("src/a/y", "src/a/z"), ("src/a/z", "src/a/x")];
        assert_eq!(circles(&uses(&circle)).len(), 1);
        assert_eq!(circles(&uses(&circle[..2])).len(), 0);
    }

    #[test]
    fn nesting_is_no_circle() {
        assert_eq!(circles(&uses(&[("src/a", "src/a/x"), ("src/a/x", "src/a")])), Vec::<String>::new());
    }
}
