//! The forms of conversations for models without a template of their own.

use super::{Context, Ending, Message, Role, Segment, Segments, Template, is_blank};

impl Template {
    /// Recognises the built-in form that is like a model's `chat_template`, without running that.
    pub fn detect(chat_template: Option<&str>) -> Self {
        let Some(source) = chat_template else { return Template::Plain };
        if source.contains("<|start_header_id|>") {
            let cutoff = between(source, "Cutting Knowledge Date: ", &["\\n", "\n", "\"", "'"]);
            let cutoff = cutoff.filter(|_| source.contains("Today Date: ")).map(str::to_owned);
            Template::Llama3 { cutoff }
        } else if source.contains("<|im_start|>") {
            Template::ChatMl { bos: source.contains("bos_token"), default_system: default_system(source) }
        } else {
            Template::Plain
        }
    }
}

/// The conversation in parts.
pub(super) fn render(template: &Template, messages: &[Message], context: &Context<'_>) -> Vec<Segment> {
    let mut out = Segments::default();
    match template {
        Template::ChatMl { bos, default_system } => {
            if let Some(token) = context.bos.filter(|_| *bos) {
                out.control(token);
            }
            let mut turn = |role: &str, content: &str| {
                out.control("<|im_start|>");
                out.text(&[role, "\n", content]);
                out.control("<|im_end|>");
                out.text(&["\n"]);
            };
            if let Some(system) = default_system.as_ref().filter(|_| !starts_with_system(messages)) {
                turn("system", system);
            }
            messages.iter().for_each(|m| turn(m.role.name(), &m.content));
            if context.ending == Ending::Prompt {
                out.control("<|im_start|>");
                out.text(&["assistant\n"]);
            }
        }
        Template::Llama3 { cutoff } => {
            context.bos.into_iter().for_each(|token| out.control(token));
            llama3(&mut out, messages, cutoff.as_deref(), context);
        }
        Template::Plain | Template::Jinja(_) => {
            context.bos.into_iter().for_each(|token| out.control(token));
            messages.iter().for_each(|m| out.text(&[&m.content, "\n"]));
        }
    }
    out.0
}

fn llama3(out: &mut Segments, messages: &[Message], cutoff: Option<&str>, context: &Context<'_>) {
    let head = |out: &mut Segments, role: &str| {
        out.control("<|start_header_id|>");
        out.text(&[role]);
        out.control("<|end_header_id|>");
        out.text(&["\n\n"]);
    };
    let mut rest = messages;
    if let Some(cutoff) = cutoff {
        let mut system = "";
        if let Some((first, after)) = messages.split_first().filter(|_| starts_with_system(messages)) {
            (system, rest) = (trim(&first.content), after);
        }
        head(out, "system");
        out.text(&[
            "Cutting Knowledge Date: ",
            cutoff,
            "\nToday Date: ",
            &context.now.date(),
            "\n\n",
            system,
        ]);
        out.control("<|eot_id|>");
    }
    for message in rest {
        head(out, message.role.name());
        out.text(&[trim(&message.content)]);
        out.control("<|eot_id|>");
    }
    if context.ending == Ending::Prompt {
        head(out, "assistant");
    }
}

fn starts_with_system(messages: &[Message]) -> bool {
    messages.first().is_some_and(|m| m.role == Role::System)
}

/// Jinja's `trim`.
fn trim(text: &str) -> &str {
    text.trim_matches(is_blank)
}

/// The text of `source` from after `start` to the nearest of `ends`.
fn between<'a>(source: &'a str, start: &str, ends: &[&str]) -> Option<&'a str> {
    let (_, after) = source.split_once(start)?;
    let end = ends.iter().filter_map(|e| after.find(e)).min()?;
    Some(&after[..end])
}

/// The system message that a ChatML template has written out in a string of its own.
fn default_system(source: &str) -> Option<String> {
    let head = "<|im_start|>system";
    source.match_indices(head).find_map(|(at, _)| {
        let quote = source[..at].chars().next_back().filter(|&q| q == '\'' || q == '"')?;
        let literal = string_literal(&source[at..], quote)?;
        let system = literal.strip_prefix(head)?.strip_prefix('\n')?;
        let system = system.trim_end_matches('\n').strip_suffix("<|im_end|>")?;
        (!system.is_empty()).then(|| system.to_owned())
    })
}

/// A Jinja string from after its opening quote.
fn string_literal(source: &str, quote: char) -> Option<String> {
    let mut text = String::new();
    let mut chars = source.chars();
    loop {
        match chars.next()? {
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                other => text.push(other),
            },
            c if c == quote => return Some(text),
            c => text.push(c),
        }
    }
}
