//! `tokenize`: converts text to token ids and back, with the tokenizer of any model, even one that this program cannot
//! run.

use super::columns::ReportFormat;
use crate::cli::args::{PathArgs, read_text};
use crate::cli::terminal::{end_line, write_stdout};
use crate::model::weights::ModelPath;
use clap::Args;
use files::{Error, Result};
use serde_json::json;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use text::tokenizer::{AddSpecial, Tokenizer};

/// Maximum vocabulary size; the largest published vocabularies have a quarter of it.
const MAX_VOCABULARY: usize = 1 << 20;

/// Flags of `tokenize`.
#[derive(Args, Clone)]
#[command(mut_arg("model_path", |arg| arg.visible_alias("vocab").help(
    "Model directory, .safetensors or .gguf file; or a vocabulary alone: a GGUF file without tensors, or a directory \
     with a tokenizer.json [default: the model this program was built for]"
)))]
pub struct TokenizeArgs {
    #[command(flatten)]
    model: PathArgs,
    /// Text to tokenize [default: stdin]
    #[arg(value_name = "TEXT", conflicts_with_all = ["prompt", "file", "decode"])]
    text: Option<String>,
    /// Text to tokenize, even if it begins with a hyphen
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// Read the text from a file, including its final line feed; - is stdin
    #[arg(short, long, visible_alias = "prompt-file", value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Convert ids to text; separate the ids with spaces or commas
    #[arg(long, value_name = "IDS", conflicts_with_all = ["prompt", "file"], allow_hyphen_values = true)]
    decode: Option<String>,
    /// Do not add a begin-of-text token; with --decode, leave out control tokens
    #[arg(long)]
    no_special: bool,
    /// Text, or one JSON object with ids and pieces
    #[arg(long, value_enum, default_value = "text")]
    format: ReportFormat,
}

pub fn run(args: &TokenizeArgs) -> Result<()> {
    let path = args.model.model_path()?;
    // The directory may hold one GGUF file, as for other commands.
    let path = if path.join("tokenizer.json").exists() { path } else { ModelPath::new(&path)?.weights };
    let tokenizer = Tokenizer::open(&path, MAX_VOCABULARY)?;
    match &args.decode {
        Some(ids) => print_text(args, &tokenizer, &parse_ids(ids, tokenizer.vocab_size())?),
        None => print_ids(args, &tokenizer, &read_input(args)?),
    }
}

fn print_ids(args: &TokenizeArgs, tokenizer: &Tokenizer, text: &str) -> Result<()> {
    let special = if args.no_special { AddSpecial::No } else { AddSpecial::Yes };
    let ids = tokenizer.encode(text, special)?;
    match args.format {
        ReportFormat::Text => {
            let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
            write_stdout(&format!("{}\n", ids.join(" ")))
        }
        ReportFormat::Json => {
            write_stdout(&format!("{}\n", json!({"ids": ids, "pieces": token_texts(tokenizer, &ids)})))
        }
    }
}

fn print_text(args: &TokenizeArgs, tokenizer: &Tokenizer, ids: &[u32]) -> Result<()> {
    let text = if args.no_special { tokenizer.decode(ids) } else { tokenizer.decode_with_special(ids) };
    match args.format {
        ReportFormat::Text => {
            write_stdout(&text)?;
            end_line();
            Ok(())
        }
        ReportFormat::Json => write_stdout(&format!(
            "{}\n",
            json!({"ids": ids, "pieces": token_texts(tokenizer, ids), "text": text})
        )),
    }
}

/// The text of each token alone.
fn token_texts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|&id| tokenizer.pieces().token_text(id).into_owned()).collect()
}

/// Parses token ids, all below `limit`.
fn parse_ids(ids: &str, limit: usize) -> Result<Vec<u32>> {
    let blank = |c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']');
    let id = |word: &str| match word.parse() {
        Ok(id) if (id as usize) < limit => Ok(id),
        _ => Err(Error::Usage(format!("--decode {word}: use ids from 0 to {}", limit.saturating_sub(1)))),
    };
    ids.split(blank).filter(|word| !word.is_empty()).map(id).collect()
}

/// The unchanged text from the flag, a file, or piped stdin.
fn read_input(args: &TokenizeArgs) -> Result<String> {
    match (args.text.as_ref().or(args.prompt.as_ref()), &args.file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(file)) => read_text("--file", file),
        (None, None) if std::io::stdin().is_terminal() => {
            Err(Error::Usage("no text; give one, use --file or --decode, or pipe a text to stdin".into()))
        }
        (None, None) => read_text("text from", Path::new("-")),
    }
}
