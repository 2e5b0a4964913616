//! Prints an answer while it is generated: thoughts separate from text, calls on lines of their own.

use super::Chat;
use crate::cli::args::{Format, Think};
use crate::cli::generation_report::{Report, token_line};
use crate::cli::terminal::{has_color, put};
use crate::cli::wrap::Wrap;
use crate::run::generate::stream::TokenStream;
use crate::run::session::StopReason;
use files::error::is_harmless;
use files::{Error, Result, stderr};
use serde_json::json;
use std::io::IsTerminal;
use std::time::Instant;
use text::chat::{OutputParser, Part, ToolCall};
use text::tokenizer::AddSpecial;

/// Display of thoughts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ThinkingDisplay {
    Hidden,
    /// On stdout, dimmed.
    Dimmed,
    /// On stdout, in tags, on a terminal that cannot dim text.
    Tagged,
    /// On stderr, because stdout is for answers.
    Stderr,
    /// As separate JSON lines.
    Lines,
}

impl ThinkingDisplay {
    fn new(think: Option<Think>, format: Format) -> Self {
        let terminal = std::io::stdout().is_terminal();
        match (think, format) {
            (Some(Think::Hide | Think::Off), _) => ThinkingDisplay::Hidden,
            (_, Format::Jsonl) => ThinkingDisplay::Lines,
            (_, Format::Text) if terminal && has_color() => ThinkingDisplay::Dimmed,
            (_, Format::Text) if terminal => ThinkingDisplay::Tagged,
            (Some(Think::Show), Format::Text) => ThinkingDisplay::Stderr,
            (None, Format::Text) => ThinkingDisplay::Hidden,
        }
    }
}

/// The part that was printed last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Nothing,
    Text,
    Thought,
    Call,
}

/// Prints the parts of an answer.
struct AnswerPrinter {
    thoughts: ThinkingDisplay,
    last: Last,
    /// True if the thoughts so far end with a line feed.
    ends_line: bool,
    wrap: Wrap,
}

impl AnswerPrinter {
    fn new(think: Option<Think>, format: Format) -> Self {
        let thoughts = ThinkingDisplay::new(think, format);
        Self { thoughts, last: Last::Nothing, ends_line: true, wrap: Wrap::stdout() }
    }

    /// The text to print on stdout for a part.
    fn render_part(&mut self, part: &Part) -> String {
        match part {
            Part::ToolCallStart { .. } | Part::ToolCallDelta(_) => String::new(),
            Part::Thinking(_) if self.thoughts == ThinkingDisplay::Hidden => String::new(),
            Part::Thinking(thought) => self.render_thought(thought),
            // An incomplete call cannot be answered, so it is shown as text.
            Part::Text(text) | Part::Cut { written: text, .. } => {
                let mut out = self.end_thought();
                if self.last == Last::Call {
                    out += &self.wrap.piece("\n");
                }
                self.last = Last::Text;
                out + &self.wrap.piece(text)
            }
            Part::Call(call) => {
                let mut out = self.end_thought();
                if self.last != Last::Nothing {
                    out.push('\n');
                }
                self.last = Last::Call;
                out + &call_json(call)
            }
        }
    }

    fn render_thought(&mut self, thought: &str) -> String {
        let begins = self.last != Last::Thought;
        let mut out = String::new();
        if begins && matches!(self.last, Last::Text | Last::Call) && self.thoughts != ThinkingDisplay::Stderr
        {
            out += &self.wrap.piece("\n");
        }
        (self.last, self.ends_line) = (Last::Thought, thought.ends_with('\n'));
        if self.thoughts == ThinkingDisplay::Stderr {
            let shown = |c: char| {
                if is_harmless(c) || c == '\n' || c == '\t' {
                    c.into()
                } else {
                    c.escape_default().to_string()
                }
            };
            let thought: String = thought.chars().map(shown).collect();
            stderr::write(format_args!("{thought}"));
            return out;
        }
        if begins {
            out += if self.thoughts == ThinkingDisplay::Dimmed { "\x1b[2m" } else { "<think>\n" };
        }
        out + &self.wrap.piece(thought)
    }

    /// The text to print on stdout after thoughts.
    fn end_thought(&mut self) -> String {
        if self.last != Last::Thought {
            return String::new();
        }
        self.last = Last::Nothing;
        let feed = if self.ends_line { "" } else { "\n" };
        match self.thoughts {
            ThinkingDisplay::Stderr => {
                stderr::write(format_args!("{feed}"));
                String::new()
            }
            ThinkingDisplay::Tagged => self.wrap.piece(&format!("{feed}</think>\n\n")),
            _ => format!("\x1b[0m{}", self.wrap.piece(&format!("{feed}\n"))),
        }
    }

    /// Prints a token's parts as text.
    fn print_text(&mut self, parts: &[Part]) -> Result<()> {
        let out: String = parts.iter().map(|part| self.render_part(part)).collect();
        if out.is_empty() { Ok(()) } else { put(&out) }
    }

    /// The JSON lines of the last token's parts. The first line names the token.
    fn json_lines(&self, stream: &TokenStream<'_>, parts: &[Part], reader: &OutputParser) -> String {
        let thinks = reader.is_thinking();
        let hidden = self.thoughts == ThinkingDisplay::Hidden;
        let mut token = stream.last_token().map(|_| stream);
        let mut out = String::new();
        let says = |part: &Part| matches!(part, Part::Text(_) | Part::Thinking(_) | Part::Cut { .. });
        if !parts.iter().any(says) && token.is_some() && !(thinks && hidden) {
            out += &token_line(token.take(), if thinks { "thinking" } else { "token" }, "");
        }
        for part in parts {
            match part {
                Part::ToolCallStart { .. } | Part::ToolCallDelta(_) => {}
                Part::Thinking(_) if hidden => {}
                Part::Thinking(thought) => out += &token_line(token.take(), "thinking", thought),
                Part::Text(text) | Part::Cut { written: text, .. } => {
                    out += &token_line(token.take(), "token", text);
                }
                Part::Call(ToolCall { id, name, arguments }) => {
                    let line = json!({"t": "tool_call", "id": id, "name": name, "arguments": arguments});
                    out += &format!("{line}\n");
                }
            }
        }
        out
    }
}

/// A call as a line of text.
fn call_json(call: &ToolCall) -> String {
    // Names need no escapes. Arguments are JSON already, perhaps on several lines.
    let arguments: String = call.arguments.lines().map(str::trim).collect::<Vec<_>>().join(" ");
    format!("{{\"name\": \"{}\", \"arguments\": {arguments}}}", call.name)
}

/// Limits the length of thoughts.
struct ThinkingBudget {
    left: Option<usize>,
    /// Tokens that end the thoughts.
    end: Vec<u32>,
    ending: bool,
}

impl ThinkingBudget {
    /// Ends the thoughts if the budget is spent; called before each token.
    fn check(&mut self, reader: &OutputParser, stream: &mut TokenStream<'_>) {
        self.ending &= reader.is_thinking();
        if reader.is_thinking() && self.left == Some(0) && !self.ending {
            stream.insert(&self.end);
            self.ending = true;
        }
    }

    /// Counts one token of thoughts.
    fn spend(&mut self) {
        self.left = self.left.map(|left| left.saturating_sub(1));
    }
}

/// A generated answer.
pub struct GeneratedAnswer {
    pub report: Report,
    /// Token ids of the answer.
    pub ids: Vec<u32>,
    /// The error if stdout could not be written.
    pub lost: Option<Error>,
}

impl Chat<'_> {
    /// Generates an answer and prints it.
    pub fn answer(&mut self, start: Instant) -> Result<GeneratedAnswer> {
        let (engine, form) = (self.engine, self.conversation.output_format());
        let (format, flags) = (self.args.completion.output.format, &self.args.template);
        let end = form.end_of_thinking().unwrap_or_default();
        let end = engine.tokenizer().encode(&end, AddSpecial::No)?;
        let mut budget = ThinkingBudget { left: flags.think_budget, end, ending: false };
        let (mut reader, mut printer) =
            (self.conversation.output_parser(engine.tokenizer()), AnswerPrinter::new(flags.think, format));
        let mut stream =
            engine.stream(&mut self.session, self.conversation.ids(), &self.options)?.since(start);
        stream.sampler_mut().set_rng(self.random.clone());
        #[cfg(feature = "line-editor")]
        let _echo = self.input.disable_echo();
        let (mut ids, mut shown, mut lost, mut failed) = (Vec::new(), 0, None, None);
        loop {
            budget.check(&reader, &mut stream);
            let thought = reader.is_thinking();
            let (parts, over) = match stream.next() {
                Some(Ok(piece)) => {
                    ids.extend(stream.last_token());
                    shown += piece.len();
                    (reader.push(&piece), false)
                }
                Some(Err(e)) => {
                    failed = Some(e);
                    (reader.finish(), true)
                }
                None => (reader.finish(), true),
            };
            if thought && reader.is_thinking() && !over {
                budget.spend();
            }
            if lost.is_none() {
                lost = match format {
                    Format::Text => printer.print_text(&parts).err(),
                    Format::Jsonl if over && parts.is_empty() => None,
                    Format::Jsonl => put(&printer.json_lines(&stream, &parts, &reader)).err(),
                };
                if lost.is_some() {
                    stream.cancel();
                }
            }
            if over {
                break;
            }
        }
        if format == Format::Text && lost.is_none() {
            lost = put(&printer.end_thought()).err();
        }
        if let Some(e) = failed {
            return Err(e);
        }
        self.random = stream.sampler_mut().rng().clone();
        let report = Report::new(&stream, self.loading, self.options.sampler.seed);
        drop(stream);
        self.trim_answer(&mut ids, report.reason, shown);
        Ok(GeneratedAnswer { report, ids, lost })
    }

    /// Removes final ids that are not part of the answer, whose printed text has `shown` bytes.
    fn trim_answer(&self, ids: &mut Vec<u32>, reason: StopReason, shown: usize) {
        let (form, tokenizer) = (self.conversation.output_format(), self.engine.tokenizer());
        match reason {
            // The next turn adds its own end-of-sequence token.
            StopReason::Eos => {
                ids.pop();
            }
            // A stop string is not part of the answer.
            StopReason::Stop => {
                while form.decode(tokenizer, ids).len() > shown {
                    ids.pop();
                }
            }
            StopReason::Length | StopReason::Context | StopReason::Interrupt => {}
        }
    }
}
