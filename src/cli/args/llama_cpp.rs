//! Accepts llama.cpp's command line: no command, and flags of several letters after one dash. Flags with the same
//! meaning are aliases of ours; others are translated here, or refused with a replacement. Values are not changed.

use clap::Command;
use files::{Error, Result};
use std::ffi::OsString;
use std::iter::Peekable;

/// Meaning of a llama.cpp flag that is not an alias of ours.
#[derive(Clone, Copy)]
enum Meaning {
    /// Describes the only behaviour here.
    Ignored,
    Mode(Mode),
    Json,
    FlashAttention,
    /// Not supported; the text names the replacement.
    Unsupported(&'static str),
}

/// Mode that selects the command if none is given.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Completion,
    Conversation,
}

use Meaning::{FlashAttention, Ignored, Json, Unsupported};

const FLAGS: &[(&[&str], Meaning)] = &[
    (&["--jinja", "--no-context-shift", "--no-escape", "--no-warmup"], Ignored),
    (&["-cnv", "--conversation", "-i", "--interactive"], Meaning::Mode(Mode::Conversation)),
    (&["-no-cnv", "--no-conversation"], Meaning::Mode(Mode::Completion)),
    (&["--json"], Json),
    (&["-fa", "--flash-attn"], FlashAttention),
    (&["--chat-template-kwargs"], Unsupported("use --template-arg NAME=VALUE, once per variable")),
    (&["-tb", "--threads-batch"], Unsupported("--threads applies to prompts too")),
    (&["-dev", "--device", "-mg", "--main-gpu"], Unsupported("--cl-device chooses the OpenCL device")),
    (
        &["-sm", "--split-mode", "-ts", "--tensor-split"],
        Unsupported("use --split, which gives each device a number of layers: cl:0=12,cl:1=12"),
    ),
    (
        &["-ncmoe", "--n-cpu-moe"],
        Unsupported("use --cpu-moe, which leaves the experts of all layers to the CPU"),
    ),
    (&["-sysf", "--system-prompt-file"], Unsupported("use --system \"$(cat FILE)\"")),
    (
        &["-mli", "--multiline-input"],
        Unsupported(
            "in chat, end a line with \\ to continue it, or put the message between \"\"\" and \"\"\"",
        ),
    ),
    (&["-hff", "--hf-file"], Unsupported("pass the file to --model-path")),
    (&["-mu", "--model-url"], Unsupported("download the file, then pass it to --model-path")),
    (&["-jf", "--json-schema-file"], Unsupported("--json-schema takes a file too")),
    (&["-nkvo", "--no-kv-offload"], Unsupported("attention runs on the CPU unless --gpu-attn is given")),
    (
        &["--mmap", "--no-mmap", "--mlock"],
        Unsupported(
            "remove it; files written by `antigravity pack` are memory-mapped, and --keep-experts locks some experts",
        ),
    ),
    (&["--context-shift"], Unsupported("use --eviction-policy sliding")),
    (&["--mirostat"], Unsupported("use --top-p, --min-p or --typical")),
    (
        &["--samplers", "--sampling-seq"],
        Unsupported("the order of the samplers is fixed; turn off those you do not want"),
    ),
    (
        &["--no-display-prompt"],
        Unsupported("the prompt is shown only on a terminal, on stderr; --quiet hides it"),
    ),
];

/// Commands that accept llama.cpp's flags.
const COMMANDS: [&str; 5] = ["generate", "chat", "plan", "bench", "eval"];

/// Translates the process's arguments to those that `cli` accepts.
///
/// # Errors
///
/// `Usage` for a llama.cpp flag that is not supported.
pub fn translate_args(cli: &Command, mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    let is_info = |w: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|flag| w == flag);
    if words.get(1).is_some_and(|w| w == "help") && words.get(2).is_some_and(is_info) {
        words.remove(1);
    }
    move_command_first(cli, &mut words);
    let named = match words.get(1) {
        None => return Ok(words),
        Some(first) if is_info(first) => return Ok(words),
        Some(first) => !first.to_string_lossy().starts_with('-'),
    };
    let rest = words.split_off(if named { 2 } else { 1 });
    let given = named.then(|| words[1].to_string_lossy().into_owned());
    let Some(command) = cli.find_subcommand(given.as_deref().unwrap_or("generate")) else {
        return Ok([words, rest].concat());
    };
    let mut translation = Translation { command, chat: cli.find_subcommand("chat"), mode: None };
    let rest = translation.translate_words(rest)?;
    match (given.as_deref(), translation.mode) {
        (None, Some((Mode::Conversation, _))) => words.push("chat".into()),
        (None, _) => words.push("generate".into()),
        (Some(_), Some((Mode::Conversation, flag))) if command.get_name() == "generate" => {
            return Err(Error::Usage(format!(
                "{flag} starts a conversation, which generate does not; use antigravity chat"
            )));
        }
        (Some(_), Some((Mode::Completion, flag))) if command.get_name() == "chat" => {
            return Err(Error::Usage(format!("{flag} is for plain completion; use antigravity generate")));
        }
        _ => {}
    }
    words.extend(rest);
    Ok(words)
}

/// Moves the command before the flags, if it comes after them: `-m model.gguf chat`.
fn move_command_first(cli: &Command, words: &mut Vec<OsString>) {
    if words.get(1).is_none_or(|first| !first.to_string_lossy().starts_with('-')) {
        return;
    }
    let mut at = 1;
    while let Some(word) = words.get(at).and_then(|word| word.to_str()) {
        if word == "--" {
            return;
        }
        if cli.find_subcommand(word).is_some() {
            let command = words.remove(at);
            return words.insert(1, command);
        }
        let has_value = |command: &Command| find_arg(command, word).is_some_and(takes_next);
        at += if word.starts_with('-') && cli.get_subcommands().any(has_value) { 2 } else { 1 };
    }
}

/// State of one pass over the words after the command.
struct Translation<'a> {
    command: &'a Command,
    /// `chat`, which has flags that `generate` lacks.
    chat: Option<&'a Command>,
    /// The mode that a flag selected, with the flag.
    mode: Option<(Mode, String)>,
}

type Words = Peekable<std::vec::IntoIter<OsString>>;

impl Translation<'_> {
    fn translate_words(&mut self, words: Vec<OsString>) -> Result<Vec<OsString>> {
        let (mut words, mut ours): (Words, _) = (words.into_iter().peekable(), Vec::new());
        while let Some(word) = words.next() {
            match word.to_str() {
                Some("--") => {
                    ours.push(word);
                    ours.extend(words.by_ref());
                }
                Some(flag) if flag.starts_with('-') => {
                    let flag = flag.to_owned();
                    ours.extend(self.translate_flag(&flag, &mut words)?);
                }
                _ => ours.push(word),
            }
        }
        Ok(ours)
    }

    /// Translates a flag and, if it takes one, its value.
    fn translate_flag(&mut self, flag: &str, words: &mut Words) -> Result<Vec<OsString>> {
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value)),
            _ => (flag, None),
        };
        let meaning = FLAGS.iter().find(|(names, _)| names.contains(&name));
        let Some((_, meaning)) = meaning.filter(|_| COMMANDS.contains(&self.command.get_name())) else {
            let alias = self.long_alias(flag);
            if self.mode.is_none() && self.is_chat_flag(alias.as_deref().unwrap_or(name)) {
                self.mode = Some((Mode::Conversation, name.into()));
            }
            return Ok(self.with_next_value(alias.as_deref().unwrap_or(flag), words));
        };
        match *meaning {
            Ignored => Ok(Vec::new()),
            Meaning::Mode(mode) => {
                self.mode = Some((mode, name.into()));
                Ok(Vec::new())
            }
            Json if find_arg(self.command, "--format").is_some() => Ok(vec!["--format=json".into()]),
            Json => Ok(vec!["--output=json".into()]),
            FlashAttention => {
                let is_value = |v: &OsString| ["on", "off", "auto", "0", "1"].iter().any(|known| v == known);
                match inline.map(OsString::from).or_else(|| words.next_if(is_value)) {
                    Some(v) if v == "off" || v == "0" => Err(Error::Usage(format!(
                        "{name}: flash attention cannot be turned off; remove the flag"
                    ))),
                    _ => Ok(Vec::new()),
                }
            }
            Unsupported(instead) => Err(Error::Usage(format!("{name} is not supported; {instead}"))),
        }
    }

    /// Returns `--md` for `-md`: two to four letters after one dash that are an alias of ours. Clap would read `-m d`.
    fn long_alias(&self, flag: &str) -> Option<String> {
        let letters = flag.strip_prefix('-').filter(|rest| (2..=4).contains(&rest.len()))?;
        let long = format!("-{flag}");
        let is_alias = |arg: &clap::Arg| arg.get_all_aliases().is_some_and(|all| all.contains(&letters));
        let arg = find_arg(self.command, &long).or_else(|| find_arg(self.chat?, &long));
        arg.is_some_and(is_alias).then_some(long)
    }

    /// True if the command is `generate` and only `chat` has the flag.
    fn is_chat_flag(&self, flag: &str) -> bool {
        self.command.get_name() == "generate"
            && find_arg(self.command, flag).is_none()
            && self.chat.is_some_and(|chat| find_arg(chat, flag).is_some())
    }

    /// The flag and, if it takes a value, the next word, even one that begins with a dash.
    fn with_next_value(&self, flag: &str, words: &mut Words) -> Vec<OsString> {
        let found = find_arg(self.command, flag).or_else(|| find_arg(self.chat?, flag));
        let value = if found.is_some_and(takes_next) { words.next() } else { None };
        std::iter::once(flag.into()).chain(value).collect()
    }
}

/// The argument that a word names: `--long`, `-x`, or the last of several letters after one dash.
fn find_arg<'a>(command: &'a Command, word: &str) -> Option<&'a clap::Arg> {
    if let Some(long) = word.strip_prefix("--") {
        let named = |arg: &&clap::Arg| {
            arg.get_long() == Some(long) || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
        };
        return command.get_arguments().find(named);
    }
    let mut letters = word.strip_prefix('-')?.chars().peekable();
    while let Some(letter) = letters.next() {
        let named = |arg: &&clap::Arg| {
            arg.get_short() == Some(letter)
                || arg.get_all_short_aliases().is_some_and(|all| all.contains(&letter))
        };
        let arg = command.get_arguments().find(named)?;
        if letters.peek().is_none() {
            return Some(arg);
        } else if takes_next(arg) {
            // The remaining letters are its value.
            return None;
        }
    }
    None
}

/// True if an argument requires a value, which may then be the next word.
fn takes_next(arg: &clap::Arg) -> bool {
    arg.get_action().takes_values() && arg.get_num_args().is_none_or(|range| range.min_values() > 0)
}
