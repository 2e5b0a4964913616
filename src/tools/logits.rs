//! `logits`: writes raw logits of given token ids, for comparison with other engines.

use crate::cli::args::{FlagWarnings, ModelArgs, read_text};
use crate::cli::load::{self, LoadedEngine};
use crate::cli::terminal::Verbosity;
use crate::model::trace::Trace;
use crate::run::plan::OpenedModel;
use clap::Args;
use files::atomic_file::AtomicFile;
use files::{Error, Result, print_stderr};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Flags of `logits`.
#[derive(Args, Clone)]
pub struct LogitsArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    /// File with a JSON array of token ids
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// File to write: little-endian f32 [tokens, vocab]
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print a digest of the residual after every layer on stderr
    #[arg(long)]
    trace_hash: bool,
    #[command(flatten)]
    model: ModelArgs,
}

pub fn run(args: &LogitsArgs) -> Result<()> {
    let tokens = read_tokens(&args.tokens)?;
    let mut options = args.model.resolve_options()?;
    // The tokens must fit, however small --max-seq-len is.
    options.max_seq_len = options.max_seq_len.max(tokens.len());
    // All tokens are given, so nothing is drafted.
    options.draft = 0;
    let fail = |e: std::io::Error| Error::io(&args.out, format!("cannot write: {e}"));
    let file = AtomicFile::create(&args.out).map_err(fail)?;
    let mut opened = OpenedModel::new(&options)?;
    opened.plan = opened.plan.with_rows(1);
    let LoadedEngine { engine, .. } = &load::load_engine(opened, Verbosity::Normal, &args.warnings)?;
    let mut session = engine.session()?;
    if args.trace_hash {
        session.set_trace(Some(Trace::default()));
    }
    let mut out = std::io::BufWriter::new(&file.file);
    let mut written = Ok(());
    session.logits_of_all(&tokens, |_, row| {
        for x in row {
            if written.is_ok() {
                written = out.write_all(&x.to_le_bytes());
            }
        }
    })?;
    written.and_then(|()| out.flush()).map_err(fail)?;
    drop(out);
    file.commit().map_err(fail)?;
    for h in session.set_trace(None).into_iter().flat_map(|r| r.hashes) {
        print_stderr!("position {} layer {} residual {:016x}", h.pos, h.layer, h.digest);
    }
    Ok(())
}

/// Reads a JSON array of token ids.
fn read_tokens(file: &Path) -> Result<Vec<u32>> {
    let bad =
        |e: String| Error::Usage(format!("--tokens {}: {e}; give a JSON array of token ids", file.display()));
    let text = read_text("--tokens", file)?;
    let tokens: Vec<u32> = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
    if tokens.is_empty() { Err(bad("the array is empty".into())) } else { Ok(tokens) }
}
