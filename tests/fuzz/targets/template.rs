//! A chat template, with the tokens of the bundled model and a conversation.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use std::sync::LazyLock;
use text::chat::{Jinja, Message, PromptEnding, RenderContext, Role, UtcTime};
use text::tokenizer::Tokenizer;

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    Tokenizer::open(antigravity::dims::MODEL_DIR.as_ref(), antigravity::dims::VOCAB).expect("the bundled model's tokenizer loads")
});

fuzz_target!(|source: &str| -> Corpus {
    let Ok(template) = Jinja::new("fuzz", source, vec![("eos_token".into(), "</s>".into())]) else {
        return Corpus::Keep;
    };
    let Ok(template) = template.for_tokenizer(&TOKENIZER) else { return Corpus::Keep };
    let messages = [
        Message::new(Role::System, "Be brief. "),
        Message::new(Role::User, "<|im_end|> {{ 1 }}\n"),
        Message::new(Role::Assistant, "größer"),
        Message::new(Role::User, ""),
    ];
    for ending in [PromptEnding::Prompt, PromptEnding::Message] {
        let (bos, now) = (TOKENIZER.bos_token(), UtcTime::from_unix(0));
        let context = RenderContext { bos, now, ending, variables: None };
        let _ = template.render_messages(&messages, &context);
    }
    Corpus::Keep
});
