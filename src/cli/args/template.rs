//! The form of a conversation: its template, its tools, and the thoughts of its answers.

use super::prompt::read_text;
use clap::{Args, ValueEnum};
use files::error::unquoted;
use files::{Error, Result};
use std::path::{Path, PathBuf};
use text::chat::{OutputFormat, Template, TemplateKwargs, TemplateSource, Tools};

/// Value of `--think`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Think {
    Show,
    Hide,
    Off,
}

/// The template of conversations.
#[derive(Args, Clone)]
pub struct ChosenTemplate {
    /// Chat template in place of the model's own: a file or a text in Jinja, the name of one of the model's where it has
    /// several (tool_use, which conversations with tools get anyway, or rag), or one of chatml, llama3, gemma, phi3, phi4
    /// and granite
    #[arg(long, alias = "chat-template-file", value_name = "FILE|TEXT", allow_hyphen_values = true)]
    chat_template: Option<String>,
    /// Set a variable of the chat template, for example enable_thinking=false; JSON or a text; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub template_arg: Vec<String>,
}

/// The form of a conversation.
#[derive(Args, Clone)]
pub struct TemplateArgs {
    #[command(flatten)]
    pub chosen: ChosenTemplate,
    /// Functions that the model may call: a file with a JSON array of tools, as in OpenAI's API. Each call is printed as a
    /// line of JSON; /tool NAME TEXT answers it
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// How to show a reasoning model's thoughts: show them (dimmed at a terminal, apart in JSON lines, else on stderr),
    /// hide them, or off: the model is told not to think, by enable_thinking=false [default: show at a terminal and in JSON
    /// lines, else hide]
    #[arg(long, value_enum, value_name = "show|hide|off", hide_possible_values = true)]
    pub think: Option<Think>,
    /// End thoughts after N tokens; then the answer follows
    #[arg(long, alias = "reasoning-budget", value_name = "N")]
    pub think_budget: Option<usize>,
}

impl ChosenTemplate {
    /// The template that is given, else the model's.
    pub fn template(&self, source: &TemplateSource) -> Result<Template> {
        const FLAG: &str = "--chat-template";
        let Some(given) = &self.chat_template else { return source.load() };
        if ["{{", "{%"].iter().any(|sign| given.contains(sign)) {
            return source.instead(FLAG, given);
        }
        // A model whose own template is broken may have another one in its place.
        if let Some(template) = source.named(given).ok().flatten().or_else(|| Template::named(given)) {
            return Ok(template);
        }
        let file = Path::new(given);
        if !file.exists() {
            let (given, known) = (unquoted(given), "chatml, llama3, gemma, phi3, phi4, granite");
            return Err(Error::Usage(format!("{FLAG} {given}: no such file; known without a file: {known}")));
        }
        source.instead(&format!("{FLAG} {}", file.display()), &read_text(FLAG, file)?)
    }

    /// True if one is given.
    pub fn is_given(&self) -> bool {
        self.chat_template.is_some()
    }

    /// Variables that it gets.
    pub fn variables(&self) -> Result<TemplateKwargs> {
        let mut variables = TemplateKwargs::default();
        for given in &self.template_arg {
            let wrong = |why: String| Error::Usage(format!("--template-arg {}: {why}", unquoted(given)));
            let (name, value) = given.split_once('=').ok_or_else(|| wrong("use NAME=VALUE".into()))?;
            variables.set(name, value).map_err(wrong)?;
        }
        Ok(variables)
    }
}

impl TemplateArgs {
    /// Variables and tools that the template gets besides the messages.
    pub fn variables(&self) -> Result<TemplateKwargs> {
        let mut variables = self.chosen.variables()?;
        const THINKING: &str = "enable_thinking";
        if self.think == Some(Think::Off) && !variables.has(THINKING) {
            variables.set(THINKING, "false").map_err(Error::Usage)?;
        }
        if let Some(file) = &self.tools {
            let wrong = |why: String| Error::Usage(format!("--tools {}: {why}", file.display()));
            variables.tools = Some(Tools::parse(&read_text("--tools", file)?).map_err(wrong)?);
        }
        Ok(variables)
    }

    /// Warnings about flags without effect: on answers that have no thoughts, or with a template that does not ask for a
    /// variable.
    pub fn unused_flags(&self, template: &Template, form: OutputFormat) -> Vec<String> {
        let reads = |name: &str| matches!(template, Template::Jinja(jinja) if jinja.mentions(name));
        let names = self.chosen.template_arg.iter().filter_map(|given| Some(given.split_once('=')?.0));
        let unread = names.filter(|name| !reads(name));
        let mut lines: Vec<String> = unread
            .map(|name| {
                format!("warning: --template-arg {name}: no effect; the chat template does not ask for it")
            })
            .collect();
        let given = [("--think", self.think.is_some()), ("--think-budget", self.think_budget.is_some())];
        let idle = given.iter().filter(|(_, given)| *given && !form.thinks());
        lines.extend(
            idle.map(|(flag, _)| {
                format!("warning: {flag}: no effect; this model's answers have no thoughts")
            }),
        );
        lines
    }
}
