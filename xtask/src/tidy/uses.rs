//! Which file of the project names what of which other.

use super::code::{Code, Path};
use std::collections::{BTreeMap, BTreeSet};

/// Where the crates are and what their names are in paths.
const CRATES: &[(&str, &str)] = &[
    ("antigravity", "src"),
    ("files", "src/files"),
    ("numeric", "src/numeric"),
    ("opencl_runtime", "src/opencl/runtime"),
    ("text", "src/text"),
    ("xtask", "xtask/src"),
];

/// One file names something of another. Files go without `.rs`, and the root of a crate is its folder.
#[derive(Debug, Clone, PartialEq)]
pub struct Use {
    pub from: String,
    pub to: String,
    pub line: usize,
    /// The path as it is written.
    pub path: String,
}

/// The files of all crates by their name without `.rs`.
pub struct Modules {
    code: BTreeMap<String, Code>,
    /// What each file imports, by the names it has there.
    imports: BTreeMap<String, BTreeMap<String, Vec<String>>>,
}

impl Modules {
    /// Takes all files, and leaves out those that only tests have.
    pub fn new<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let all = files.into_iter().filter_map(|(name, text)| Some((module(name)?, Code::of(text))));
        let mut code: BTreeMap<String, Code> = all.collect();
        loop {
            let undeclared = |name: &&String| match parent(name) {
                Some(above) => !code.get(above).is_some_and(|c| c.modules().contains(&last(name))),
                None => false,
            };
            let Some(test) = code.keys().find(undeclared).cloned() else { break };
            code.remove(&test);
        }
        let imports = code.iter().map(|(name, code)| {
            let aliased = code.paths().into_iter().filter_map(|p| Some((p.alias?, p.names)));
            (name.clone(), aliased.collect())
        });
        Self { imports: imports.collect(), code }
    }

    /// Every file with its code.
    pub fn code(&self) -> impl Iterator<Item = (&str, &Code)> {
        self.code.iter().map(|(name, code)| (name.as_str(), code))
    }

    /// What each file names of others.
    pub fn uses(&self) -> Vec<Use> {
        let mut found = Vec::new();
        for (from, code) in &self.code {
            for Path { names, line, .. } in code.paths() {
                if let Some(to) = self.resolve(from, &names, &mut BTreeSet::new()).filter(|to| to != from) {
                    found.push(Use { from: from.clone(), to, line, path: names.join("::") });
                }
            }
        }
        found
    }

    /// The file that a path in file `from` leads to. Names that a file has imported lead on to where they are from.
    fn resolve(&self, from: &str, names: &[String], seen: &mut BTreeSet<(String, String)>) -> Option<String> {
        let (first, rest) = names.split_first()?;
        let child = format!("{from}/{first}");
        let mut at = match first.as_str() {
            "crate" => crate_of(from).into(),
            "super" => parent(from)?.into(),
            "self" => from.into(),
            "" => return self.resolve("", rest, seen),
            _ if self.code.contains_key(&child) => child,
            name => {
                let known = CRATES.iter().find(|(known, _)| *known == name);
                match known {
                    Some((_, root)) => (*root).into(),
                    None => return self.imported(from, names, seen),
                }
            }
        };
        for (i, name) in rest.iter().enumerate() {
            let child = format!("{at}/{name}");
            if name == "super" {
                at = parent(&at)?.into();
            } else if self.code.contains_key(&child) && crate_of(&child) == crate_of(&at) {
                at = child;
            } else {
                return Some(self.imported(&at, &rest[i..], seen).unwrap_or(at));
            }
        }
        Some(at)
    }

    /// Where a path that begins with an imported name of file `at` leads to.
    fn imported(&self, at: &str, names: &[String], seen: &mut BTreeSet<(String, String)>) -> Option<String> {
        let (first, rest) = names.split_first()?;
        let import = self.imports.get(at)?.get(first)?;
        if !seen.insert((at.into(), first.clone())) {
            return None;
        }
        self.resolve(at, &[import.as_slice(), rest].concat(), seen)
    }
}

/// The name of a file's module: without `.rs`, and the folder for the root of a crate.
fn module(file: &str) -> Option<String> {
    let name = file.strip_suffix(".rs")?;
    let root = |(_, root): &&(&str, &str)| {
        *name == format!("{root}/lib") || (*name == format!("{root}/main") && *root != "src")
    };
    Some(CRATES.iter().find(root).map_or(name, |(_, root)| root).into())
}

/// The folder of the crate that a file belongs to; a file outside of all is its own.
pub fn crate_of(module: &str) -> &str {
    let inside = |root: &&str| module.strip_prefix(*root).is_some_and(|r| r.is_empty() || r.starts_with('/'));
    let alone = module == "src/main";
    let roots = CRATES.iter().map(|(_, root)| *root).filter(inside);
    if alone { module } else { roots.max_by_key(|root| root.len()).unwrap_or(module) }
}

/// The module that declares this one; `None` for the root of a crate.
fn parent(module: &str) -> Option<&str> {
    if crate_of(module) == module { None } else { module.rsplit_once('/').map(|(above, _)| above) }
}

fn last(module: &str) -> &str {
    module.rsplit('/').next().unwrap_or(module)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uses(files: &[(&str, &str)]) -> Vec<(String, String)> {
        Modules::new(files.iter().copied()).uses().into_iter().map(|u| (u.from, u.to)).collect()
    }

    fn pair(from: &str, to: &str) -> (String, String) {
        (from.into(), to.into())
    }

    #[test]
    fn paths_lead_to_files() {
        let found = uses(&[
            ("src/lib.rs", "mod run; mod cli;"),
            ("src/run.rs", "pub mod plan;"),
            ("src/run/plan.rs", "use files::config::Config; use std::fs;"),
            ("src/cli.rs", "fn f() { crate::run::plan::Plan::new() }"),
            ("src/files/lib.rs", "pub mod config;"),
            ("src/files/config.rs", ""),
        ]);
        assert_eq!(found, [pair("src/cli", "src/run/plan"), pair("src/run/plan", "src/files/config")]);
    }

    #[test]
    fn imported_names_lead_to_their_files() {
        let found = uses(&[
            ("src/lib.rs", "mod a; mod b; pub use a::one::One;"),
            ("src/a.rs", "mod one; mod two; pub use one::One;"),
            ("src/a/one.rs", ""),
            ("src/a/two.rs", "use super::One;"),
            ("src/b.rs", "use crate::One; use crate::a; fn f() { a::One::new() }"),
        ]);
        assert!(found.contains(&pair("src/a/two", "src/a/one")));
        let of_b: Vec<_> = found.into_iter().filter(|(from, _)| from == "src/b").map(|(_, to)| to).collect();
        assert_eq!(of_b, ["src/a/one", "src/a", "src/a/one"]);
    }

    #[test]
    fn files_of_tests_are_left_out() {
        let found = uses(&[
            ("src/lib.rs", "#[cfg(test)] mod tests; mod a;"),
            ("src/tests.rs", "mod more; use crate::a::A;"),
            ("src/tests/more.rs", "use crate::a::A;"),
            ("src/a.rs", ""),
        ]);
        assert_eq!(found, []);
    }
}
