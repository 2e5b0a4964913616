//! The command line as people type it who know llama.cpp: without a command, and with flags of several letters after
//! one dash. What means the same here becomes our flag; what does not is named, with what to use. Values stay as they
//! are.

use crate::dims::LAYERS;
use clap::Command;
use files::{Error, Result};
use std::ffi::OsString;
use std::iter::Peekable;

/// Flags that are the same under another name.
const SAME: &[(&str, &str)] = &[
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-hf", "--model-path"),
    ("-hfr", "--model-path"),
    ("-j", "--json-schema"),
    ("-l", "--logit-bias"),
    ("-md", "--draft-model"),
    ("--model-draft", "--draft-model"),
    ("-st", "--single-turn"),
    ("-sys", "--system"),
    ("-ub", "--prefill-chunk"),
];

/// Flags that ask for what is always done here.
const ALWAYS: &[&str] = &["--jinja", "--no-context-shift", "--no-escape", "--no-warmup"];

/// Flags that cannot be followed, and what to use.
const INSTEAD: &[(&[&str], &str)] = &[
    (&["--chat-template-kwargs"], "--template-arg NAME=VALUE, once for each"),
    (&["-tb", "--threads-batch"], "--threads is for prompts too"),
    (&["-dev", "--device", "-mg", "--main-gpu"], "--cl-device chooses the OpenCL device"),
    (&["-sm", "--split-mode", "-ts", "--tensor-split"], "one device runs the model; --cl-device chooses it"),
    (&["-sysf", "--system-prompt-file"], "use --system \"$(cat FILE)\""),
    (
        &["-mli", "--multiline-input"],
        "in chat, a message goes on after \\ at the line's end, and within \"\"\"",
    ),
    (&["-hff", "--hf-file"], "give the file to --model-path"),
    (&["-mu", "--model-url"], "download the file, then give it to --model-path"),
    (&["-jf", "--json-schema-file"], "--json-schema takes a file too"),
    (&["-nkvo", "--no-kv-offload"], "leave --gpu-attn out: the CPU then attends"),
    (&["--mmap", "--no-mmap", "--mlock"], "leave it out; `antigravity pack` writes a file that is mapped"),
    (&["--context-shift"], "use --eviction-policy sliding"),
    (&["--mirostat"], "use --top-p, --min-p or --typical"),
    (
        &["--samplers", "--sampling-seq"],
        "the order of the samplers is fixed; switch off those you do not want",
    ),
    (&["--no-display-prompt"], "the prompt is shown at a terminal only, on stderr; --quiet leaves it out"),
];

/// How a text is asked for that is no command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Completion,
    Conversation,
}

/// A flag that asks for a form.
struct Asked {
    form: Form,
    flag: String,
}

/// The arguments of the process as `cli` reads them.
///
/// # Errors
///
/// `Usage` for a flag of llama.cpp that cannot be followed.
pub fn ours(cli: &Command, mut words: Vec<OsString>) -> Result<Vec<OsString>> {
    let known = |w: &OsString| ["-h", "--help", "-V", "--version"].iter().any(|flag| w == flag);
    if words.get(1).is_some_and(|w| w == "help") && words.get(2).is_some_and(known) {
        words.remove(1);
    }
    let named = match words.get(1) {
        None => return Ok(words),
        Some(first) if known(first) => return Ok(words),
        Some(first) => !first.to_string_lossy().starts_with('-'),
    };
    let rest = words.split_off(if named { 2 } else { 1 });
    let given = named.then(|| words[1].to_string_lossy().into_owned());
    let Some(command) = cli.find_subcommand(given.as_deref().unwrap_or("generate")) else {
        return Ok([words, rest].concat());
    };
    let (rest, asked) = Walk { command, chat: cli.find_subcommand("chat"), asked: None }.all(rest)?;
    match (given.as_deref(), asked) {
        (None, Some(Asked { form: Form::Conversation, .. })) => words.push("chat".into()),
        (None, _) => words.push("generate".into()),
        (Some("generate"), Some(Asked { form: Form::Conversation, flag })) => {
            return Err(Error::Usage(format!("{flag}: generate completes a text; use antigravity chat")));
        }
        (Some("chat"), Some(Asked { form: Form::Completion, flag })) => {
            return Err(Error::Usage(format!("{flag}: chat is a conversation; use antigravity generate")));
        }
        _ => {}
    }
    words.extend(rest);
    Ok(words)
}

/// One pass over the words after the command.
struct Walk<'a> {
    command: &'a Command,
    /// Where a flag that `generate` lacks may be at home.
    chat: Option<&'a Command>,
    /// What the flags ask for.
    asked: Option<Asked>,
}

type Words = Peekable<std::vec::IntoIter<OsString>>;

impl Walk<'_> {
    fn all(mut self, words: Vec<OsString>) -> Result<(Vec<OsString>, Option<Asked>)> {
        let (mut words, mut ours): (Words, _) = (words.into_iter().peekable(), Vec::new());
        while let Some(word) = words.next() {
            match word.to_str() {
                Some("--") => {
                    ours.push(word);
                    ours.extend(words.by_ref());
                }
                Some(flag) if flag.starts_with('-') => {
                    let flag = flag.to_owned();
                    ours.extend(self.followed(&flag, &mut words)?);
                }
                _ => ours.push(word),
            }
        }
        Ok((ours, self.asked))
    }

    /// What stands for a flag and, if it takes one, its value.
    fn followed(&mut self, flag: &str, words: &mut Words) -> Result<Vec<OsString>> {
        let (name, inline) = match flag.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value)),
            _ => (flag, None),
        };
        let no = |why: &str| Err(Error::Usage(format!("{name}: {why}")));
        let value = |words: &mut Words| {
            inline.map(OsString::from).or_else(|| words.next()).map(|v| v.to_string_lossy().into_owned())
        };
        if let Some((_, same)) = SAME.iter().find(|(theirs, same)| *theirs == name && self.finds(same)) {
            self.note(same, name);
            return Ok(self.with_value((*same).into(), words));
        }
        if !self.runs_a_model() {
            return Ok(self.with_value(flag.into(), words));
        }
        if let Some((_, instead)) = INSTEAD.iter().find(|(theirs, _)| theirs.contains(&name)) {
            return no(&format!("not known here; {instead}"));
        }
        match name {
            _ if ALWAYS.contains(&name) => Ok(Vec::new()),
            "-cnv" | "--conversation" | "-i" | "--interactive" => {
                self.asked = Some(Asked { form: Form::Conversation, flag: name.into() });
                Ok(Vec::new())
            }
            "-no-cnv" | "--no-conversation" => {
                self.asked = Some(Asked { form: Form::Completion, flag: name.into() });
                Ok(Vec::new())
            }
            "--json" if argument(self.command, "--format").is_some() => Ok(vec!["--format=json".into()]),
            "--json" => Ok(vec!["--output=json".into()]),
            "-fa" | "--flash-attn" => {
                let is_value = |v: &OsString| ["on", "off", "auto", "0", "1"].iter().any(|known| v == known);
                let off = match inline {
                    Some(value) => Some(OsString::from(value)),
                    None => words.next_if(is_value),
                };
                match off {
                    Some(v) if v == "off" || v == "0" => {
                        no("attention is always computed this way; leave it out")
                    }
                    _ => Ok(Vec::new()),
                }
            }
            "-ngl" | "--n-gpu-layers" | "--gpu-layers" => layers(name, value(words)),
            _ => {
                self.note(name, name);
                Ok(self.with_value(flag.into(), words))
            }
        }
    }

    /// Only there do flags of llama.cpp mean what they mean in llama.cpp.
    fn runs_a_model(&self) -> bool {
        ["generate", "chat", "plan", "bench", "eval"].contains(&self.command.get_name())
    }

    /// Notes a flag that only conversations have.
    fn note(&mut self, flag: &str, as_typed: &str) {
        if self.asked.is_none() && self.command.get_name() == "generate" && self.lacks(flag) {
            self.asked = Some(Asked { form: Form::Conversation, flag: as_typed.into() });
        }
    }

    /// Whether the command has a flag, or `chat` instead of it.
    fn finds(&self, flag: &str) -> bool {
        argument(self.command, flag).is_some() || self.command.get_name() == "generate" && self.lacks(flag)
    }

    /// Whether `generate` lacks a flag that `chat` has.
    fn lacks(&self, flag: &str) -> bool {
        argument(self.command, flag).is_none() && self.chat.is_some_and(|chat| argument(chat, flag).is_some())
    }

    /// The flag with the word after it if that is its value, whatever it looks like.
    fn with_value(&self, flag: OsString, words: &mut Words) -> Vec<OsString> {
        let takes = flag.to_str().is_some_and(|flag| {
            let found = argument(self.command, flag).or_else(|| argument(self.chat?, flag));
            found.is_some_and(takes_next)
        });
        std::iter::once(flag).chain(if takes { words.next() } else { None }).collect()
    }
}

/// `-ngl N`: all layers, or none.
fn layers(flag: &str, value: Option<String>) -> Result<Vec<OsString>> {
    let value =
        value.ok_or_else(|| Error::Usage(format!("{flag}: give a number of layers, or use --backend")))?;
    match (value.as_str(), value.parse()) {
        ("0", _) => Ok(vec!["--backend=cpu".into()]),
        ("all" | "-1", _) => Ok(vec!["--backend=opencl".into(), "--gpu-attn".into()]),
        ("auto", _) => Ok(vec!["--backend=auto".into()]),
        (_, Ok(n)) if (LAYERS..=usize::MAX).contains(&n) => layers(flag, Some("all".into())),
        _ => Err(Error::Usage(format!(
            "{flag} {value}: a device runs all {LAYERS} layers or none; use --backend opencl --gpu-attn, or --backend \
             hybrid"
        ))),
    }
}

/// The argument that a word names: `--long`, `--long=value`, `-x`, or the last of several letters.
fn argument<'a>(command: &'a Command, word: &str) -> Option<&'a clap::Arg> {
    if let Some(long) = word.strip_prefix("--") {
        let named = |arg: &&clap::Arg| {
            arg.get_long() == Some(long) || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
        };
        return command.get_arguments().find(named);
    }
    let mut letters = word.strip_prefix('-')?.chars().peekable();
    while let Some(letter) = letters.next() {
        let arg = command.get_arguments().find(|arg| arg.get_short() == Some(letter))?;
        if letters.peek().is_none() {
            return Some(arg);
        } else if takes_next(arg) {
            // The other letters are its value.
            return None;
        }
    }
    None
}

/// Whether the value of an argument may be the next word, and must be given.
fn takes_next(arg: &clap::Arg) -> bool {
    arg.get_action().takes_values() && arg.get_num_args().is_none_or(|range| range.min_values() > 0)
}
