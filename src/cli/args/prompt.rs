//! Flags of prompts, and texts read from files and stdin.

use clap::Args;
use files::{Error, Result, text_file};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use text::tokenizer::SpecialText;

/// Maximum bytes of a text.
const TEXT_LIMIT: u64 = 64 << 20;

/// One prompt.
#[derive(Args, Clone)]
pub struct PromptArgs {
    /// Prompt; control tokens such as <|im_end|> are recognised unless --no-specials is given [default: stdin if it is
    /// piped, else "Hello, world! I am a"]
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Read the prompt from a file; - is stdin
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_file: Option<PathBuf>,
    #[command(flatten)]
    escape: EscapeArgs,
    /// Treat control tokens in the prompt as plain text; for programs that pass on user input
    #[arg(long)]
    no_specials: bool,
}

/// Escapes in prompts.
#[derive(Args, Clone)]
pub struct EscapeArgs {
    /// Process escape sequences (\n, \t, \r, \', \" and \\) in --prompt
    #[arg(short = 'e', long)]
    escape: bool,
}

impl EscapeArgs {
    /// The text of a flag, with escape sequences replaced under `--escape`.
    pub fn unescape_text(&self, typed: &str) -> String {
        if !self.escape {
            return typed.to_owned();
        }
        let (mut text, mut chars) = (String::new(), typed.chars());
        while let Some(c) = chars.next() {
            match (c, chars.as_str().chars().next()) {
                ('\\', Some(next @ ('n' | 't' | 'r' | '"' | '\'' | '\\'))) => {
                    chars.next();
                    text.push(match next {
                        'n' => '\n',
                        't' => '\t',
                        'r' => '\r',
                        other => other,
                    });
                }
                _ => text.push(c),
            }
        }
        text
    }
}

/// Many prompts.
#[derive(Args, Clone)]
pub struct PromptsArgs {
    /// Complete many prompts together, one per line; - is stdin. A line is a JSON string, or an object with "prompt"
    /// and its own settings: {"prompt":"Hi","max_tokens":9,"temperature":0,"stop":"."}. Each answer is printed as soon
    /// as it is complete: {"index":0,"text":"…","tokens":9,"stop":"length"}
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file", "session", "trace"])]
    pub prompts: Option<PathBuf>,
    /// Number of prompts computed together, each with its own context of --max-seq-len tokens [default: 8]
    #[arg(long, value_name = "N")]
    pub batch: Option<usize>,
}

impl PromptArgs {
    /// The treatment of control tokens in the prompt.
    pub fn special_handling(&self) -> SpecialText {
        if self.no_specials { SpecialText::AsText } else { SpecialText::AsTokens }
    }

    /// The prompt, if there is one: from the flag, a file, or piped stdin.
    pub fn read_prompt(&self) -> Result<Option<String>> {
        match (&self.prompt, &self.prompt_file) {
            (Some(prompt), _) => Ok(Some(self.escape.unescape_text(prompt))),
            (None, Some(file)) => read_trimmed_text("--prompt-file", file).map(Some),
            (None, None) if std::io::stdin().is_terminal() => Ok(None),
            (None, None) => {
                read_trimmed_text("prompt from", Path::new("-")).map(|p| (!p.is_empty()).then_some(p))
            }
        }
    }
}

/// Reads a text with [`read_text`] and removes a final line break.
pub fn read_trimmed_text(flag: &str, file: &Path) -> Result<String> {
    let mut text = read_text(flag, file)?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// Reads the file that a flag names; `-` is stdin.
pub fn read_text(flag: &str, file: &Path) -> Result<String> {
    let stdin = file.as_os_str() == "-";
    let name = if stdin { "stdin".into() } else { file.display().to_string() };
    let read = if stdin {
        text_file::read_text(std::io::stdin().lock(), TEXT_LIMIT)
    } else {
        let opened = std::fs::File::open(file).map_err(|e| e.to_string());
        opened.and_then(|f| text_file::read_text(f, TEXT_LIMIT))
    };
    read.map_err(|why| Error::Usage(format!("{flag} {name}: {why}")))
}
