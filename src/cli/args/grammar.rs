//! Flags that name what a text has to follow.

use clap::Args;
use files::{Error, Result};
use std::path::PathBuf;
#[cfg(feature = "grammar")]
use {std::path::Path, text::sampler::Grammar};

/// What a text has to follow.
#[derive(Args, Clone)]
pub(in crate::cli) struct GrammarArgs {
    /// JSON that fits this schema, a file or the schema itself, and nothing else
    #[arg(long, value_name = "FILE|JSON", conflicts_with = "grammar", hide = !cfg!(feature = "grammar"))]
    pub json_schema: Option<String>,
    /// A text of the rule root of this GBNF file, and nothing else
    #[arg(long, value_name = "FILE", hide = !cfg!(feature = "grammar"))]
    pub grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// An error if one is given.
    pub fn refuse(&self, why: &str) -> Result<()> {
        let flag = match (&self.json_schema, &self.grammar) {
            (None, None) => return Ok(()),
            (Some(_), _) => "--json-schema",
            _ => "--grammar",
        };
        Err(Error::Usage(format!("{flag}: {why}")))
    }

    /// Reads and checks it.
    #[cfg(feature = "grammar")]
    pub fn resolve(&self) -> Result<Option<Grammar>> {
        if let Some(schema) = &self.json_schema {
            let flag = "--json-schema";
            return match schema.trim_start().starts_with('{') {
                true => Grammar::json_schema(flag, schema),
                false => {
                    let file = Path::new(schema);
                    Grammar::json_schema(&place(flag, file), &read(flag, file)?)
                }
            }
            .map(Some);
        }
        let flag = "--grammar";
        let gbnf = |file: &PathBuf| Grammar::gbnf(&place(flag, file), &read(flag, file)?);
        self.grammar.as_ref().map(gbnf).transpose()
    }
}

#[cfg(feature = "grammar")]
fn place(flag: &str, file: &Path) -> String {
    format!("{flag} {}", file.display())
}

/// A text of at most a mebibyte.
#[cfg(feature = "grammar")]
fn read(flag: &str, file: &Path) -> Result<String> {
    use std::io::Read;
    const LIMIT: u64 = 1 << 20;
    let bad = |why: String| Error::Usage(format!("{}: {why}", place(flag, file)));
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|f| f.take(LIMIT + 1).read_to_string(&mut text))
        .map_err(|e| bad(e.to_string()))?;
    match text.len() as u64 > LIMIT {
        true => Err(bad("is longer than 1 MiB".into())),
        false => Ok(text),
    }
}
