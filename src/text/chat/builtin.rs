//! Built-in chat templates, in Jinja, for models without one of their own.

/// A built-in chat template.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltIn {
    pub(super) name: &'static str,
    pub(super) source: &'static str,
    /// The control tokens that it writes, except the begin-of-text token.
    pub(super) controls: &'static [&'static str],
    /// The token that ends an answer.
    pub(super) end: Option<&'static str>,
}

/// ChatML, `<|im_start|>role\ncontent<|im_end|>\n` (Qwen and many others).
pub(super) static CHATML: BuiltIn = BuiltIn {
    name: "chatml",
    source: "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
             {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    controls: &["<|im_start|>", "<|im_end|>"],
    end: Some("<|im_end|>"),
};

/// [`CHATML`] after the begin-of-text token.
pub(super) static CHATML_AFTER_BOS: BuiltIn = BuiltIn {
    source: "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
             {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ..CHATML
};

pub(super) static LLAMA3: BuiltIn = BuiltIn {
    name: "llama3",
    source: "{{ bos_token }}{% for m in messages %}\
             <|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}\
             {% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    controls: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    end: Some("<|eot_id|>"),
};

/// Gemma's template: the system message begins the first question.
pub(super) static GEMMA: BuiltIn = BuiltIn {
    name: "gemma",
    source: "{{ bos_token }}{% set before = namespace(text='') %}{% for m in messages %}\
             {% if loop.first and m.role == 'system' %}{% set before.text = m.content %}{% else %}\
             <start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n\
             {{ before.text ~ '\n\n' if before.text }}{{ m.content | trim }}<end_of_turn>\n\
             {% set before.text = '' %}{% endif %}{% endfor %}\
             {% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    controls: &["<start_of_turn>", "<end_of_turn>"],
    end: Some("<end_of_turn>"),
};

pub(super) static PHI3: BuiltIn = BuiltIn {
    name: "phi3",
    source: "{% set roles = {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|tool|>'} %}\
             {% for m in messages %}{{ roles[m.role] }}\n{{ m.content }}<|end|>\n{% endfor %}\
             {% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    controls: &["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"],
    end: Some("<|end|>"),
};

/// Phi-4-mini's template: tools are a text in the system message.
pub(super) static PHI4: BuiltIn = BuiltIn {
    name: "phi4",
    source: "{% set roles = {'system': '<|system|>', 'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|tool|>'} %}\
             {% set system = messages and messages[0].role == 'system' %}\
             {% if tools_json %}\
             <|system|>{{ messages[0].content if system }}<|tool|>{{ tools_json }}<|/tool|><|end|>{% endif %}\
             {% for m in messages %}{% if not (loop.first and system and tools_json) %}\
             {{ roles[m.role] }}{{ m.content }}<|end|>{% endif %}{% endfor %}\
             {% if add_generation_prompt %}<|assistant|>{% endif %}",
    controls: &["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|end|>"],
    end: Some("<|end|>"),
};

pub(super) static GRANITE: BuiltIn = BuiltIn {
    name: "granite",
    source: "{% for m in messages %}\
             <|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}\
             {% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    controls: &["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    end: Some("<|end_of_text|>"),
};

/// The template of a base model: paragraphs.
pub(super) static PLAIN: BuiltIn = BuiltIn {
    name: "plain",
    source: "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}",
    controls: &[],
    end: None,
};

/// Templates that a user may ask for by name.
pub(super) static NAMED: [&BuiltIn; 6] = [&CHATML, &LLAMA3, &GEMMA, &PHI3, &PHI4, &GRANITE];
