//! Flags that name the form that the text must have.

use clap::Args;
use files::{Error, Result};
use std::path::PathBuf;
#[cfg(feature = "grammar")]
use {std::path::Path, text::sampler::Grammar};

/// The form that the text must have.
#[derive(Args, Clone)]
pub struct GrammarArgs {
    /// Generate only JSON that fits this schema, given as a file or as text
    #[arg(long, value_name = "FILE|JSON", conflicts_with = "grammar", hide = !cfg!(feature = "grammar"))]
    pub json_schema: Option<String>,
    /// Generate only text that fits the rule root of this GBNF file
    #[arg(long, value_name = "FILE", hide = !cfg!(feature = "grammar"))]
    pub grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// An error if a grammar is given.
    pub fn refuse(&self, why: &str) -> Result<()> {
        let flag = match (&self.json_schema, &self.grammar) {
            (None, None) => return Ok(()),
            (Some(_), _) => "--json-schema",
            _ => "--grammar",
        };
        Err(Error::Usage(format!("{flag}: {why}")))
    }

    /// Reads and checks the grammar.
    #[cfg(feature = "grammar")]
    pub fn resolve(&self) -> Result<Option<Grammar>> {
        if let Some(schema) = &self.json_schema {
            let flag = "--json-schema";
            if schema.trim_start().starts_with('{') {
                return Grammar::json_schema(flag, schema)?.checked().map(Some);
            }
            let file = Path::new(schema);
            return Grammar::json_schema(&place(flag, file), &read(flag, file)?)?.checked().map(Some);
        }
        let flag = "--grammar";
        let gbnf = |file: &PathBuf| Grammar::gbnf(&place(flag, file), &read(flag, file)?)?.checked();
        self.grammar.as_ref().map(gbnf).transpose()
    }
}

#[cfg(feature = "grammar")]
fn place(flag: &str, file: &Path) -> String {
    format!("{flag} {}", file.display())
}

/// The text of a file of at most 1 MiB.
#[cfg(feature = "grammar")]
fn read(flag: &str, file: &Path) -> Result<String> {
    const LIMIT: u64 = 1 << 20;
    let opened = std::fs::File::open(file).map_err(|e| e.to_string());
    let read = opened.and_then(|f| files::text_file::read(f, LIMIT));
    read.map_err(|why| Error::Usage(format!("{}: {why}", place(flag, file))))
}
