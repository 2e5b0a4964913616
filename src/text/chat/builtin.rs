//! The formats of conversations for models without a template of their own.

use super::{Context, Ending, Message, Segment, Segments, Template, is_blank};

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

/// Jinja's `trim`.
fn trim(text: &str) -> &str {
    text.trim_matches(is_blank)
}
