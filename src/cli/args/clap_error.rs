//! Errors of clap in one line: the flag, what was probably meant, and where help is.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The error without the usage and the advice that clap prints in further paragraphs. `command` is the one that was
/// named.
pub fn one_line(e: &clap::Error, command: Option<&str>) -> String {
    let tools = cfg!(feature = "tools");
    let help = match command {
        Some(command) if tools => format!("antigravity {command} --help"),
        _ if tools => "antigravity --help".to_string(),
        _ => "the README".into(),
    };
    if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let remedy = if tools { "antigravity --help lists them" } else { "use generate" };
        return format!("a command is missing; {remedy}");
    }
    let text = e.to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let words: Vec<&str> = paragraph.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let line = words.join(" ");
    let line = line.trim_start_matches("error: ");
    match (find_suggestion(e), e.kind()) {
        (Some(meant), _) => format!("{line}; did you mean {meant}? {help} lists all"),
        (
            None,
            ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::MissingRequiredArgument,
        ) => format!("{line}; see {help}"),
        (None, _) => line.into(),
    }
}

/// The likeliest name in place of the one that was given.
fn find_suggestion(e: &clap::Error) -> Option<String> {
    let kinds = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    match kinds.iter().find_map(|kind| e.get(*kind))? {
        ContextValue::String(one) => Some(one.clone()),
        // The likeliest comes last.
        ContextValue::Strings(several) => several.last().cloned(),
        _ => None,
    }
}
