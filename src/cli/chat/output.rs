//! Prints an answer while it is generated: thoughts separate from text, calls on lines of their own.

use super::Chat;
use crate::cli::args::{Format, Think};
use crate::cli::generation_report::{GenerationReport, token_line};
use crate::cli::terminal::{has_color, write_stdout};
use crate::cli::word_wrap::WordWrap;
use crate::run::generate::stream::TokenStream;
use crate::run::session::StopReason;
use files::error::is_printable;
use files::{Error, Result, stderr};
use serde_json::json;
use std::io::IsTerminal;
use std::time::Instant;
use text::chat::{AnswerPart, OutputParser, ToolCall};
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
    JsonLines,
}

impl ThinkingDisplay {
    fn new(think: Option<Think>, format: Format) -> Self {
        let terminal = std::io::stdout().is_terminal();
        match (think, format) {
            (Some(Think::Hide | Think::Off), _) => ThinkingDisplay::Hidden,
            (_, Format::Jsonl) => ThinkingDisplay::JsonLines,
            (_, Format::Text) if terminal && has_color() => ThinkingDisplay::Dimmed,
            (_, Format::Text) if terminal => ThinkingDisplay::Tagged,
            (Some(Think::Show), Format::Text) => ThinkingDisplay::Stderr,
            (None, Format::Text) => ThinkingDisplay::Hidden,
        }
    }
}

/// The part that was printed last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastPart {
    Nothing,
    Text,
    Thought,
    Call,
}

/// Prints the parts of an answer.
struct AnswerPrinter {
    thoughts: ThinkingDisplay,
    last: LastPart,
    /// True if the thoughts so far end with a line feed.
    ends_line: bool,
    wrap: WordWrap,
}

impl AnswerPrinter {
    fn new(think: Option<Think>, format: Format) -> Self {
        let thoughts = ThinkingDisplay::new(think, format);
        Self { thoughts, last: LastPart::Nothing, ends_line: true, wrap: WordWrap::for_stdout() }
    }

    /// The text to print on stdout for a part.
    fn render_part(&mut self, part: &AnswerPart) -> String {
        match part {
            AnswerPart::ToolCallStart { .. } | AnswerPart::ToolCallDelta(_) => String::new(),
            AnswerPart::Thinking(_) if self.thoughts == ThinkingDisplay::Hidden => String::new(),
            AnswerPart::Thinking(thought) => self.render_thought(thought),
            // An incomplete call cannot be answered, so it is shown as text.
            AnswerPart::Text(text) | AnswerPart::ToolCallCut { written: text, .. } => {
                let mut out = self.end_thought();
                if self.last == LastPart::Call {
                    out += &self.wrap.wrap_piece("\n");
                }
                self.last = LastPart::Text;
                out + &self.wrap.wrap_piece(text)
            }
            AnswerPart::ToolCall(call) => {
                let mut out = self.end_thought();
                if self.last != LastPart::Nothing {
                    out.push('\n');
                }
                self.last = LastPart::Call;
                out + &call_json(call)
            }
        }
    }

    fn render_thought(&mut self, thought: &str) -> String {
        let begins = self.last != LastPart::Thought;
        let mut out = String::new();
        if begins
            && matches!(self.last, LastPart::Text | LastPart::Call)
            && self.thoughts != ThinkingDisplay::Stderr
        {
            out += &self.wrap.wrap_piece("\n");
        }
        (self.last, self.ends_line) = (LastPart::Thought, thought.ends_with('\n'));
        if self.thoughts == ThinkingDisplay::Stderr {
            let shown = |c: char| {
                if is_printable(c) || c == '\n' || c == '\t' {
                    c.into()
                } else {
                    c.escape_default().to_string()
                }
            };
            let thought: String = thought.chars().map(shown).collect();
            stderr::write_stderr(format_args!("{thought}"));
            return out;
        }
        if begins {
            out += if self.thoughts == ThinkingDisplay::Dimmed { "\x1b[2m" } else { "<think>\n" };
        }
        out + &self.wrap.wrap_piece(thought)
    }

    /// The text to print on stdout after thoughts.
    fn end_thought(&mut self) -> String {
        if self.last != LastPart::Thought {
            return String::new();
        }
        self.last = LastPart::Nothing;
        let feed = if self.ends_line { "" } else { "\n" };
        match self.thoughts {
            ThinkingDisplay::Stderr => {
                stderr::write_stderr(format_args!("{feed}"));
                String::new()
            }
            ThinkingDisplay::Tagged => self.wrap.wrap_piece(&format!("{feed}</think>\n\n")),
            _ => format!("\x1b[0m{}", self.wrap.wrap_piece(&format!("{feed}\n"))),
        }
    }

    /// Prints a token's parts as text.
    fn print_text(&mut self, parts: &[AnswerPart]) -> Result<()> {
        let out: String = parts.iter().map(|part| self.render_part(part)).collect();
        if out.is_empty() { Ok(()) } else { write_stdout(&out) }
    }

    /// The JSON lines of the last token's parts. The first line names the token.
    fn json_lines(&self, stream: &TokenStream<'_>, parts: &[AnswerPart], reader: &OutputParser) -> String {
        let thinks = reader.is_thinking();
        let hidden = self.thoughts == ThinkingDisplay::Hidden;
        let mut token = stream.last_token().map(|_| stream);
        let mut out = String::new();
        let says = |part: &AnswerPart| {
            matches!(part, AnswerPart::Text(_) | AnswerPart::Thinking(_) | AnswerPart::ToolCallCut { .. })
        };
        if !parts.iter().any(says) && token.is_some() && !(thinks && hidden) {
            out += &token_line(token.take(), if thinks { "thinking" } else { "token" }, "");
        }
        for part in parts {
            match part {
                AnswerPart::ToolCallStart { .. } | AnswerPart::ToolCallDelta(_) => {}
                AnswerPart::Thinking(_) if hidden => {}
                AnswerPart::Thinking(thought) => out += &token_line(token.take(), "thinking", thought),
                AnswerPart::Text(text) | AnswerPart::ToolCallCut { written: text, .. } => {
                    out += &token_line(token.take(), "token", text);
                }
                AnswerPart::ToolCall(ToolCall { id, name, arguments }) => {
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
    tokens_left: Option<usize>,
    /// Tokens that end the thoughts.
    end_tokens: Vec<u32>,
    ending: bool,
}

impl ThinkingBudget {
    /// Ends the thoughts if the budget is spent; called before each token.
    fn enforce_limit(&mut self, reader: &OutputParser, stream: &mut TokenStream<'_>) {
        self.ending &= reader.is_thinking();
        if reader.is_thinking() && self.tokens_left == Some(0) && !self.ending {
            stream.insert_tokens(&self.end_tokens);
            self.ending = true;
        }
    }

    /// Counts one token of thoughts.
    fn count_token(&mut self) {
        self.tokens_left = self.tokens_left.map(|left| left.saturating_sub(1));
    }
}

/// A generated answer.
pub struct GeneratedAnswer {
    pub report: GenerationReport,
    /// Token ids of the answer.
    pub ids: Vec<u32>,
    /// The error if stdout could not be written.
    pub write_error: Option<Error>,
}

impl Chat<'_> {
    /// Generates an answer and prints it.
    pub fn generate_answer(&mut self, start: Instant) -> Result<GeneratedAnswer> {
        let (engine, form) = (self.engine, self.conversation.output_format());
        let (format, flags) = (self.args.completion.output.format, &self.args.template);
        let end = form.end_of_thinking().unwrap_or_default();
        let end = engine.tokenizer().encode(&end, AddSpecial::No)?;
        let mut budget = ThinkingBudget { tokens_left: flags.think_budget, end_tokens: end, ending: false };
        let (mut reader, mut printer) =
            (self.conversation.output_parser(engine.tokenizer()), AnswerPrinter::new(flags.think, format));
        let mut stream =
            engine.stream(&mut self.session, self.conversation.ids(), &self.options)?.timed_from(start);
        stream.sampler_mut().set_rng(self.rng.clone());
        #[cfg(feature = "line-editor")]
        let _typing = self.input.hold_typing();
        let (mut ids, mut shown, mut lost, mut failed) = (Vec::new(), 0, None, None);
        loop {
            budget.enforce_limit(&reader, &mut stream);
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
                budget.count_token();
            }
            if lost.is_none() {
                lost = match format {
                    Format::Text => printer.print_text(&parts).err(),
                    Format::Jsonl if over && parts.is_empty() => None,
                    Format::Jsonl => write_stdout(&printer.json_lines(&stream, &parts, &reader)).err(),
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
            lost = write_stdout(&printer.end_thought()).err();
        }
        if let Some(e) = failed {
            return Err(e);
        }
        self.rng = stream.sampler_mut().rng().clone();
        let report = GenerationReport::new(&stream, self.load_time, self.options.sampler.seed);
        drop(stream);
        self.trim_answer(&mut ids, report.reason, shown);
        Ok(GeneratedAnswer { report, ids, write_error: lost })
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
                while form.decode_answer(tokenizer, ids).len() > shown {
                    ids.pop();
                }
            }
            StopReason::Length | StopReason::Context | StopReason::Interrupt => {}
        }
    }
}
