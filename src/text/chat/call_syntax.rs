//! The forms of tool calls between their markers. All but JSON objects are written by one family of models each.

use super::call_literal::{LiteralReader, convert_literal};
use super::template_kwargs::is_function_name;
use super::tool_calls::{self, ParsedCall};
use serde_json::Value;
use serde_json::value::RawValue;

/// A form of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallSyntax {
    /// Objects with name and arguments, alone or in a list.
    Json,
    /// A name, this text, and an object of arguments: Mistral, gpt-oss.
    Named(&'static str),
    /// Tags around each argument: Qwen 3.5, MiniCPM 5.
    Tagged(Tags),
    /// `call:f{a:1}`: Gemma 4.
    Braces,
    /// `[f(a=1), g()]`: LFM 2.
    Python,
}

/// The tags of a call, before and after its parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tags {
    /// After each tag, where the model writes each on a line of its own.
    pub newline: &'static str,
    /// Around the name of the function.
    pub function: (&'static str, &'static str),
    /// After the parameters, before the end of the call.
    pub function_end: &'static str,
    /// Around the name of a parameter.
    pub parameter: (&'static str, &'static str),
    /// After the value of a parameter.
    pub end: &'static str,
    /// Around text in which no marker ends the call.
    pub quotes: (&'static str, &'static str),
}

/// The parameters that are strings, by function: their values are not read as literals.
pub(super) type StringParameters = [(String, String)];

/// Bytes in which the head of a call ends.
const MAX_HEAD: usize = 512;

impl CallSyntax {
    /// The texts around the name of a function.
    fn name_ends(self) -> (&'static str, &'static str) {
        match self {
            CallSyntax::Json => ("{", "}"),
            CallSyntax::Named(end) => ("", end),
            CallSyntax::Tagged(tags) => tags.function,
            CallSyntax::Braces => ("call:", "{"),
            CallSyntax::Python => ("", "("),
        }
    }

    /// The offset of the end of the head that `text` begins with; `None` if it is not there.
    pub fn find_head_end(self, text: &[u8]) -> Option<usize> {
        let end = self.name_ends().1.as_bytes();
        let head = &text[..text.len().min(MAX_HEAD)];
        head.windows(end.len()).position(|bytes| bytes == end).map(|at| at + end.len())
    }

    /// Splits the name of the call that `text` begins with from the rest of the call.
    fn split_name(self, text: &str) -> Option<(String, &str)> {
        let (before, after) = self.name_ends();
        let (head, rest) = text.trim_start().strip_prefix(before)?.split_once(after)?;
        // Mistral and gpt-oss may write more before the arguments.
        let cut = if matches!(self, CallSyntax::Named(_)) { &['[', '<', ' '][..] } else { &[] };
        let name = head.split(cut).next()?.trim();
        is_function_name(name).then(|| (name.to_owned(), rest))
    }

    /// Parses the name of the call that `text` begins with, if it is there.
    pub fn parse_name(self, text: &str) -> Option<String> {
        match self {
            CallSyntax::Json => tool_calls::parse_name(text),
            CallSyntax::Python => Some(self.split_name(text.trim_start().trim_start_matches('['))?.0),
            _ => Some(self.split_name(text)?.0),
        }
    }

    /// Parses text that consists only of calls; `None` if it contains anything else.
    pub fn parse_all(self, text: &str, strings: &StringParameters) -> Option<Vec<ParsedCall>> {
        let calls = match self {
            CallSyntax::Json => return tool_calls::parse_all(text),
            CallSyntax::Named(_) => {
                let (name, rest) = self.split_name(text)?;
                vec![(name, serde_json::from_str::<&RawValue>(rest).ok()?.get().to_owned())]
            }
            CallSyntax::Tagged(tags) => {
                let (mut calls, mut rest) = (Vec::new(), text);
                while !rest.trim().is_empty() {
                    let (name, after) = self.split_name(rest)?;
                    let (arguments, after) = tags.read_arguments(&name, after, strings)?;
                    calls.push((name, arguments));
                    rest = after;
                }
                calls
            }
            CallSyntax::Braces => {
                let (name, rest) = self.split_name(text)?;
                let mut reader = LiteralReader { rest, json: String::new() };
                reader.read_fields(":", "}", 0)?;
                reader.rest.trim().is_empty().then(|| vec![(name, reader.json)])?
            }
            // LFM can be told to write JSON.
            CallSyntax::Python => match tool_calls::parse_all(text) {
                Some(calls) => return Some(calls),
                None => self.parse_python(text)?,
            },
        };
        let sound = calls.iter().all(|(_, json)| tool_calls::are_arguments(json));
        Some(calls).filter(|calls| sound && !calls.is_empty())
    }

    fn parse_python(self, text: &str) -> Option<Vec<ParsedCall>> {
        let text = text.trim();
        let inner = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
        let mut reader = LiteralReader { rest: inner, json: String::new() };
        let mut calls = Vec::new();
        while !reader.rest.trim().is_empty() {
            let (name, rest) = self.split_name(reader.rest)?;
            reader.rest = rest;
            reader.read_fields("=", ")", 0)?;
            calls.push((name, std::mem::take(&mut reader.json)));
            if !reader.skip_token(",") && !reader.rest.is_empty() {
                return None;
            }
        }
        Some(calls)
    }
}

impl Tags {
    /// Reads the parameters of a call; returns its arguments, and the text after the call.
    fn read_arguments<'a>(
        &self,
        function: &str,
        text: &'a str,
        strings: &StringParameters,
    ) -> Option<(String, &'a str)> {
        let (mut fields, mut rest) = (Vec::new(), text.trim_start());
        while let Some(after) = rest.strip_prefix(self.parameter.0) {
            let (name, after) = after.split_once(self.parameter.1)?;
            let (value, after) = self.read_value(after)?;
            let name = name.trim();
            let is_string = strings.iter().any(|(f, parameter)| f == function && parameter == name);
            let json = match value {
                Ok(quoted) => Value::from(quoted).to_string(),
                Err(bare) => Some(bare)
                    .filter(|_| !is_string)
                    .and_then(convert_literal)
                    .unwrap_or_else(|| Value::from(bare).to_string()),
            };
            fields.push(format!("{}: {json}", Value::from(name)));
            rest = after.trim_start();
        }
        rest = rest.strip_prefix(self.function_end.trim_end()).unwrap_or(rest);
        Some((format!("{{{}}}", fields.join(", ")), rest))
    }

    /// Reads a value, `Ok` if it is quoted as text, up to the end of its parameter.
    fn read_value<'a>(&self, text: &'a str) -> Option<(Result<&'a str, &'a str>, &'a str)> {
        let quoted = text.trim_start().strip_prefix(self.quotes.0).filter(|_| self.quotes.1 != self.end);
        if let Some(quoted) = quoted {
            let (value, after) = quoted.split_once(self.quotes.1)?;
            return Some((Ok(value), after.trim_start().strip_prefix(self.end)?));
        }
        let (value, after) = text.split_once(self.end)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        Some((Err(value.strip_suffix('\n').unwrap_or(value)), after))
    }
}
