//! The formats of conversations for models without a template of their own.

use super::{Context, Ending, Message, Role, Segment, Segments, Template, Tools, is_blank};

/// The conversation in parts.
pub(super) fn render(template: &Template, messages: &[Message], context: &Context<'_>) -> Vec<Segment> {
    let mut out = Segments::default();
    match template {
        Template::ChatMl { bos } => {
            if let Some(token) = context.bos.filter(|_| *bos) {
                out.control(token);
            }
            let mut turn = |role: &str, content: &str| {
                out.control("<|im_start|>");
                out.text(&[role, "\n", content]);
                out.control("<|im_end|>");
                out.text(&["\n"]);
            };
            messages.iter().for_each(|m| turn(m.role.name(), &m.content));
            if context.ending == Ending::Prompt {
                out.control("<|im_start|>");
                out.text(&["assistant\n"]);
            }
        }
        Template::Llama3 => {
            context.bos.into_iter().for_each(|token| out.control(token));
            llama3(&mut out, messages, context.ending);
        }
        Template::Gemma => {
            context.bos.into_iter().for_each(|token| out.control(token));
            gemma(&mut out, messages, context.ending);
        }
        Template::Phi3 => phi(&mut out, messages, "\n", context.ending),
        Template::Phi4 => {
            let tools = context.variables.and_then(|v| v.tools.as_ref());
            let rest = match (messages.split_first(), tools) {
                (_, None) => messages,
                (Some((first, rest)), Some(tools)) if first.role == Role::System => {
                    phi4_tools(&mut out, &first.content, tools);
                    rest
                }
                (_, Some(tools)) => {
                    phi4_tools(&mut out, "", tools);
                    messages
                }
            };
            phi(&mut out, rest, "", context.ending);
        }
        Template::Granite => granite(&mut out, messages, context.ending),
        Template::Plain | Template::Jinja(_) => {
            context.bos.into_iter().for_each(|token| out.control(token));
            messages.iter().for_each(|m| out.text(&[&m.content, "\n"]));
        }
    }
    out.0
}

fn llama3(out: &mut Segments, messages: &[Message], ending: Ending) {
    let head = |out: &mut Segments, role: &str| {
        out.control("<|start_header_id|>");
        out.text(&[role]);
        out.control("<|end_header_id|>");
        out.text(&["\n\n"]);
    };
    for message in messages {
        head(out, message.role.name());
        out.text(&[trim(&message.content)]);
        out.control("<|eot_id|>");
    }
    if ending == Ending::Prompt {
        head(out, "assistant");
    }
}

fn gemma(out: &mut Segments, messages: &[Message], ending: Ending) {
    let (mut system, rest) = match messages.split_first() {
        Some((first, rest)) if first.role == Role::System => (first.content.as_str(), rest),
        _ => ("", messages),
    };
    for message in rest {
        out.control("<start_of_turn>");
        let role = if message.role == Role::Assistant { "model" } else { message.role.name() };
        let between = if system.is_empty() { "" } else { "\n\n" };
        out.text(&[role, "\n", std::mem::take(&mut system), between, trim(&message.content)]);
        out.control("<end_of_turn>");
        out.text(&["\n"]);
    }
    if ending == Ending::Prompt {
        out.control("<start_of_turn>");
        out.text(&["model\n"]);
    }
}

/// `feed` follows a role and a message.
fn phi(out: &mut Segments, messages: &[Message], feed: &str, ending: Ending) {
    for message in messages {
        out.control(&format!("<|{}|>", message.role.name()));
        out.text(&[feed, &message.content]);
        out.control("<|end|>");
        out.text(&[feed]);
    }
    if ending == Ending::Prompt {
        out.control("<|assistant|>");
        out.text(&[feed]);
    }
}

/// A system message with tools.
fn phi4_tools(out: &mut Segments, system: &str, tools: &Tools) {
    out.control("<|system|>");
    out.text(&[system]);
    out.control("<|tool|>");
    out.text(&[tools.json()]);
    out.control("<|/tool|>");
    out.control("<|end|>");
}

fn granite(out: &mut Segments, messages: &[Message], ending: Ending) {
    let head = |out: &mut Segments, role: &str| {
        out.control("<|start_of_role|>");
        out.text(&[role]);
        out.control("<|end_of_role|>");
    };
    for message in messages {
        head(out, message.role.name());
        out.text(&[&message.content]);
        out.control("<|end_of_text|>");
        out.text(&["\n"]);
    }
    if ending == Ending::Prompt {
        head(out, "assistant");
    }
}

/// Jinja's `trim`.
fn trim(text: &str) -> &str {
    text.trim_matches(is_blank)
}
