//! A chat template, with the tokens of the bundled model and a conversation.
#![no_main]

use text::chat::{Context, Ending, Jinja, Message, Moment, Role};
use text::tokenizer::Tokenizer;
use libfuzzer_sys::{Corpus, fuzz_target};
use std::sync::LazyLock;

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
    for ending in [Ending::Prompt, Ending::Message] {
        let context = Context { bos: TOKENIZER.bos_token(), now: Moment::from_unix(0), ending, variables: None };
        let _ = template.render(&messages, &context);
    }
    Corpus::Keep
});
