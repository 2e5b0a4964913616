//! What follows an answer, and long conversations.

use super::super::Jinja;
use super::*;

fn text(t: &str) -> Segment {
    Segment::Text(t.into())
}

fn control(t: &str) -> Segment {
    Segment::Control(t.into())
}

#[test]
fn what_follows_an_answer() {
    let head = [control("<"), text("user q\n"), control("<"), text("bot\n")];
    let whole = |answer: &str| {
        let answer = format!("bot\n{answer}");
        [&head[..3], &[text(&answer), control(">"), text("\nuser")]].concat()
    };
    let rest = Some(vec![control(">"), text("\nuser")]);
    for (said, kept) in [("a b", "a b"), (" a\n", "a"), (" a\n", " a"), ("", ""), ("\n", ""), ("a ", "a ")] {
        assert_eq!(after(&whole(kept), &head, said), rest, "{said:?}");
    }
    assert_eq!(after(&whole("a"), &head, "<think>x</think>a"), None);
    assert_eq!(after(&whole("a")[1..], &head, "a"), None);
    assert_eq!(after(&head, &whole("a"), "a"), None);
    // Plain paragraphs: all of it is one part.
    assert_eq!(after(&[text("q\na\nr\n")], &[text("q\n")], "a"), Some(vec![text("\nr\n")]));
    // The head ends with a control token.
    assert_eq!(
        after(&[control("<"), text("a"), control(">")], &[control("<")], "a"),
        Some(vec![control(">")])
    );
}

/// A template of the usual form, after `before` and with `each` in every turn.
fn template(before: &str, each: &str) -> Template {
    let source = format!(
        "{before}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}{each}\n{{{{ m.content | trim }}}}<|im_end|>\n\
         {{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
    );
    Template::Jinja(Jinja::new("t", source, vec![]).expect("compiles"))
}

fn story() -> Tokenizer {
    Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads")
}

/// Asks and answers so many times.
fn talk(conversation: &mut Conversation, tokenizer: &Tokenizer, turns: std::ops::Range<usize>) {
    for turn in turns {
        conversation.ask(tokenizer, &format!("What is {turn}? ")).expect("renders");
        let answer = tokenizer.encode_plain(&format!("It is number {turn}.")).expect("ids");
        conversation.answer(tokenizer, &answer);
    }
}

#[test]
fn a_question_has_the_same_ids_however_much_is_rendered() {
    let tokenizer = story();
    let whole = |name: &str| {
        let file = crate::project().join("tests/fixtures/chat").join(format!("{name}-instruct.jinja"));
        let source = std::fs::read_to_string(file).expect("a fixture");
        Template::Jinja(Jinja::new(name, source, vec![]).expect("compiles"))
    };
    for (template, settled) in [
        (whole("llama3.2"), Rendered::LastTurn),
        (whole("qwen2.5"), Rendered::LastTurn),
        (Template::ChatMl { bos: true }, Rendered::LastTurn),
        (Template::Plain, Rendered::LastTurn),
        (template("", ""), Rendered::LastTurn),
        // What follows an answer depends on what was before.
        (template("", "{{ loop.index if m.role == 'user' else '' }}"), Rendered::All),
        (template("", "{{ messages[1].content if m.role == 'user' else '' }}"), Rendered::All),
        // No question begins with what was said before it.
        (template("", "{{ loop.index }}"), Rendered::LastTurn),
        (template("{{ messages|length }}", ""), Rendered::LastTurn),
    ] {
        let system = Some("Be brief.".to_owned());
        let mut short = Conversation::new(template.clone(), system.clone());
        let mut all = Conversation { rendered: Rendered::All, ..Conversation::new(template, system) };
        all.now = short.now;
        for turn in 0..12 {
            talk(&mut short, &tokenizer, turn..turn + 1);
            talk(&mut all, &tokenizer, turn..turn + 1);
            assert_eq!(short.ids, all.ids, "{} turn {turn}", short.template.name());
        }
        assert_eq!(short.rendered, settled, "{}", short.template.name());
    }
}

#[test]
fn a_turn_does_not_render_what_was_long_before() {
    let refuses = "{% if messages|length > 20 %}{{ raise_exception('too long') }}{% endif %}";
    let tokenizer = story();
    let mut conversation = Conversation::new(template(refuses, ""), None);
    talk(&mut conversation, &tokenizer, 0..60);
    assert_eq!((conversation.questions(), conversation.rendered), (60, Rendered::LastTurn));
}

#[test]
fn the_oldest_turns_are_forgotten_and_the_others_stay_as_they_were() {
    let tokenizer = story();
    let new = || Conversation::new(template("", ""), Some("Be brief.".into()));
    let mut conversation = new();
    talk(&mut conversation, &tokenizer, 0..40);
    let turn = conversation.ids.len() / 40;
    conversation.forget_oldest(&tokenizer, usize::MAX).expect("nothing to do");
    assert_eq!(conversation.questions(), 40);
    conversation.forget_oldest(&tokenizer, 10 * turn).expect("renders");
    let left = conversation.questions();
    assert!((8..=10).contains(&left), "{left}");
    let mut same = new();
    talk(&mut same, &tokenizer, 40 - left..40);
    assert_eq!((&conversation.ids, &conversation.messages), (&same.ids, &same.messages));
    assert_eq!(conversation.before, same.before);
    talk(&mut conversation, &tokenizer, 40..41);
    assert_eq!(conversation.forget_question().as_deref(), Some("What is 40? "));
    assert_eq!(conversation.ids, same.ids);
    // The last turn stays, however long it is.
    conversation.forget_oldest(&tokenizer, 0).expect("renders");
    assert_eq!(conversation.questions(), 1);
}

#[test]
fn the_opening_is_what_all_conversations_with_a_system_message_share() {
    let tokenizer = story();
    let opening = |template: &Template, system: Option<&str>| {
        let conversation = Conversation::new(template.clone(), system.map(String::from));
        conversation.opening(&tokenizer).expect("renders")
    };
    // Nobody has said which tokens are control tokens, so all of it is text.
    let ids = |text: &str| tokenizer.encode_plain(text).expect("ids").len();
    let turns = template("", "");
    let head = "<|im_start|>system\nYou are a cat.<|im_end|>\n<|im_start|>user\n";
    assert_eq!(opening(&turns, Some("You are a cat.")), ids(head));
    assert_eq!(opening(&turns, None), ids("<|im_start|>user\n"));
    // One that the template itself says.
    let head = "<|im_start|>system\nBe kind.<|im_end|>\n";
    assert_eq!(opening(&template(head, ""), None), ids(head) + ids("<|im_start|>user\n"));
}
