//! Flags of a conversation's format: chat template, tools, and the display of thoughts.

use super::prompt::read_text;
use clap::{Args, ValueEnum};
use files::error::escape;
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
pub struct TemplateChoiceArgs {
    /// Chat template to use instead of the model's own: a Jinja file or text, the name of one of the model's templates
    /// (such as rag, or tool_use, which is the default if there are tools), or one of chatml, llama3, gemma, phi3, phi4
    /// and granite
    #[arg(long, alias = "chat-template-file", value_name = "FILE|TEXT", allow_hyphen_values = true)]
    chat_template: Option<String>,
    /// Set a variable of the chat template, such as enable_thinking=false; the value is JSON or text; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub template_arg: Vec<String>,
}

/// The format of a conversation.
#[derive(Args, Clone)]
pub struct TemplateArgs {
    #[command(flatten)]
    pub chosen: TemplateChoiceArgs,
    /// Functions that the model may call: a file with a JSON array of tools, as in the OpenAI API. Each call is printed
    /// as a line of JSON; answer it with /tool NAME TEXT
    #[arg(long, value_name = "FILE")]
    pub tools: Option<PathBuf>,
    /// Display of a reasoning model's thoughts: show (dimmed on a terminal, separate in JSON lines, else on stderr),
    /// hide, or off (tells the model not to think, by enable_thinking=false) [default: show on a terminal and in JSON
    /// lines, else hide]
    #[arg(long, value_enum, value_name = "show|hide|off", hide_possible_values = true)]
    pub think: Option<Think>,
    /// Stop thinking after N tokens; then the answer follows
    #[arg(long, alias = "reasoning-budget", value_name = "N")]
    pub think_budget: Option<usize>,
}

impl TemplateChoiceArgs {
    /// The given template, else the model's.
    pub fn load_template(&self, source: &TemplateSource) -> Result<Template> {
        const FLAG: &str = "--chat-template";
        let Some(given) = &self.chat_template else { return source.load_template() };
        if ["{{", "{%"].iter().any(|sign| given.contains(sign)) {
            return source.load_override(FLAG, given);
        }
        // A broken template of the model must not prevent the choice of another.
        if let Some(template) =
            source.load_named(given).ok().flatten().or_else(|| Template::built_in_named(given))
        {
            return Ok(template);
        }
        let file = Path::new(given);
        if !file.exists() {
            let (given, known) = (escape(given), "chatml, llama3, gemma, phi3, phi4, granite");
            return Err(Error::Usage(format!("{FLAG} {given}: no such file; built-in templates: {known}")));
        }
        source.load_override(&format!("{FLAG} {}", file.display()), &read_text(FLAG, file)?)
    }

    /// True if a template is given.
    #[cfg(any(feature = "serve", feature = "ffi"))]
    pub fn is_given(&self) -> bool {
        self.chat_template.is_some()
    }

    /// The variables for the template.
    pub fn parse_variables(&self) -> Result<TemplateKwargs> {
        let mut variables = TemplateKwargs::default();
        for given in &self.template_arg {
            let wrong = |why: String| Error::Usage(format!("--template-arg {}: {why}", escape(given)));
            let (name, value) = given.split_once('=').ok_or_else(|| wrong("use NAME=VALUE".into()))?;
            variables.set_variable(name, value).map_err(wrong)?;
        }
        Ok(variables)
    }
}

impl TemplateArgs {
    /// The variables and tools for the template.
    pub fn parse_variables(&self) -> Result<TemplateKwargs> {
        let mut variables = self.chosen.parse_variables()?;
        const THINKING: &str = "enable_thinking";
        if self.think == Some(Think::Off) && !variables.has_variable(THINKING) {
            variables.set_variable(THINKING, "false").map_err(Error::Usage)?;
        }
        if let Some(file) = &self.tools {
            let wrong = |why: String| Error::Usage(format!("--tools {}: {why}", file.display()));
            variables.tools = Some(Tools::parse_json(&read_text("--tools", file)?).map_err(wrong)?);
        }
        Ok(variables)
    }

    /// Warnings about flags without effect: the model does not think, or the template does not use a variable.
    pub fn warn_unused_flags(&self, template: &Template, form: OutputFormat) -> Vec<String> {
        let reads = |name: &str| matches!(template, Template::Jinja(jinja) if jinja.has_text(name));
        let names = self.chosen.template_arg.iter().filter_map(|given| Some(given.split_once('=')?.0));
        let unread = names.filter(|name| !reads(name));
        let mut lines: Vec<String> = unread
            .map(|name| {
                format!("warning: --template-arg {name}: no effect: the chat template does not use it")
            })
            .collect();
        let given = [("--think", self.think.is_some()), ("--think-budget", self.think_budget.is_some())];
        let idle = given.iter().filter(|(_, given)| *given && !form.has_thinking());
        lines.extend(idle.map(|(flag, _)| format!("warning: {flag}: no effect: this model does not think")));
        lines
    }
}
