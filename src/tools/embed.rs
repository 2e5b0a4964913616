//! `embed`: writes embeddings of texts as JSON lines.

use crate::cli::args::{
    FlagWarnings, LoadArgs, MAX_SEQ_LEN, PoolingArgs, QuietArgs, ThreadArgs, check_range, read_text,
};
use crate::cli::load::{self, LoadedEngine};
use crate::cli::signal;
use crate::cli::terminal::write_stdout;
use crate::run::options::EngineOptions;
use crate::run::plan::OpenedModel;
use crate::run::session::CancelToken;
use clap::Args;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use serde_json::json;
use std::path::PathBuf;

/// Texts that are computed before any is printed.
pub const BATCH: usize = 64;

/// Texts, given as arguments or in a file.
#[derive(Args, Clone)]
pub struct TextArgs {
    /// Texts, a JSON line for each
    #[arg(value_name = "TEXT", conflicts_with = "file", required_unless_present = "file")]
    texts: Vec<String>,
    /// Read the texts from a file, one a line; - is stdin
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
}

impl TextArgs {
    pub fn read_texts(&self) -> Result<Vec<String>> {
        match &self.file {
            Some(file) => Ok(read_text("--file", file)?.lines().map(String::from).collect()),
            None => Ok(self.texts.clone()),
        }
    }
}

/// Flags of `embed`.
#[derive(Args, Clone)]
pub struct EmbedArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    #[command(flatten)]
    texts: TextArgs,
    #[command(flatten)]
    pooling: PoolingArgs,
    #[command(flatten)]
    quiet: QuietArgs,
    /// Maximum number of tokens of a text
    #[arg(short = 'c', long, visible_alias = "ctx-size", default_value_t = 2048, value_name = "N")]
    max_seq_len: usize,
    #[command(flatten, next_help_heading = "Model")]
    load: LoadArgs,
    #[command(flatten, next_help_heading = "Device")]
    cores: ThreadArgs,
}

pub fn run(args: &EmbedArgs) -> Result<()> {
    let options = EngineOptions {
        max_seq_len: check_range("--max-seq-len", args.max_seq_len, MAX_SEQ_LEN)?,
        threads: args.cores.resolve_threads()?,
        // As the embeddings themselves: then the default type needs no calibration.
        kv_types: KvTypes::same(KvType::F32),
        ..args.load.resolve_options()?
    };
    let texts = args.texts.read_texts()?;
    let opened = OpenedModel::new(&options)?;
    let LoadedEngine { engine, .. } = &load::load_engine(opened, args.quiet.verbosity(), &args.warnings)?;
    let cancel = CancelToken::default();
    signal::connect_cancel(&cancel);
    let wanted = args.pooling.embed_options();
    for (batch, part) in texts.chunks(BATCH).enumerate() {
        let ids = part.iter().map(|text| engine.encode(text)).collect::<Result<Vec<_>>>()?;
        let vectors = engine.embed(&ids, &wanted, Some(&cancel)).map_err(|e| in_part(e, batch * BATCH))?;
        for (i, (ids, vector)) in ids.iter().zip(vectors).enumerate() {
            let line = json!({"index": batch * BATCH + i, "tokens": ids.len(), "embedding": vector});
            write_stdout(&format!("{line}\n"))?;
        }
    }
    Ok(())
}

/// Says where the texts of a later part begin that an error counts from.
pub fn in_part(error: Error, first: usize) -> Error {
    match error {
        Error::Usage(why) if first > 0 => Error::Usage(format!("after {first} texts: {why}")),
        other => other,
    }
}
