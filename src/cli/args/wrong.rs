//! What is wrong with a command line, in one line: the flag, what was probably meant, and where help is.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// The error without the usage and the advice that clap prints in further paragraphs; `command` is the one that was
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
    let meant = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    let meant = meant.iter().find_map(|kind| e.get(*kind)).and_then(first);
    let text = e.to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let lines: Vec<&str> = paragraph.lines().map(str::trim).filter(|l| !l.is_empty()).collect();
    let line = lines.join(" ");
    let line = line.trim_start_matches("error: ");
    match meant {
        Some(meant) => format!("{line}; did you mean {meant}? {help} lists all"),
        None if lists(e.kind()) => format!("{line}; see {help}"),
        None => line.into(),
    }
}

/// Errors that say nothing of what would be right.
fn lists(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::UnknownArgument | ErrorKind::InvalidSubcommand | ErrorKind::MissingRequiredArgument
    )
}

/// The likeliest suggestion.
fn first(value: &ContextValue) -> Option<String> {
    match value {
        ContextValue::String(one) => Some(one.clone()),
        // The likeliest comes last.
        ContextValue::Strings(several) => several.last().cloned(),
        _ => None,
    }
}
