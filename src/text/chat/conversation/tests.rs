//! Questions after an answer, and long conversations.

use super::super::{Jinja, builtin};
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
        assert_eq!(text_after(&whole(kept), &head, said), rest, "{said:?}");
    }
    assert_eq!(text_after(&whole("a"), &head, "<think>x</think>a"), None);
    assert_eq!(text_after(&whole("a")[1..], &head, "a"), None);
    assert_eq!(text_after(&head, &whole("a"), "a"), None);
    // Plain paragraphs: all of it is one part.
    assert_eq!(text_after(&[text("q\na\nr\n")], &[text("q\n")], "a"), Some(vec![text("\nr\n")]));
    // The head ends with a control token.
    assert_eq!(
        text_after(&[control("<"), text("a"), control(">")], &[control("<")], "a"),
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

/// The question that is taken back.
fn forgotten(conversation: &mut Conversation) -> Option<String> {
    conversation.pop_question().map(|messages| messages.into_iter().map(|m| m.content).collect())
}

/// Asks and answers so many times.
fn talk(conversation: &mut Conversation, tokenizer: &Tokenizer, turns: std::ops::Range<usize>) {
    for turn in turns {
        conversation.add_question(tokenizer, &format!("What is {turn}? ")).expect("renders");
        let answer = tokenizer.encode_plain(&format!("It is number {turn}.")).expect("ids");
        conversation.add_answer(tokenizer, &answer);
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
    for (template, alone) in [
        (whole("llama3.2"), true),
        (whole("qwen2.5"), true),
        (Template::BuiltIn(&builtin::CHATML_AFTER_BOS), true),
        (Template::PLAIN, true),
        (template("", ""), true),
        // What follows an answer depends on what was before.
        (template("", "{{ loop.index if m.role == 'user' else '' }}"), false),
        (template("", "{{ messages[1].content if m.role == 'user' else '' }}"), false),
        // No question begins with what was said before it.
        (template("", "{{ loop.index }}"), true),
        (template("{{ messages|length }}", ""), true),
    ] {
        let system = Some("Be brief.".to_owned());
        let mut short = Conversation::new(template.clone(), system.clone());
        let mut all = Conversation { verified_questions: None, ..Conversation::new(template, system) };
        all.now = short.now;
        for turn in 0..12 {
            talk(&mut short, &tokenizer, turn..turn + 1);
            talk(&mut all, &tokenizer, turn..turn + 1);
            assert_eq!(short.ids, all.ids, "{} turn {turn}", short.template.name());
        }
        assert_eq!(short.verified_questions.is_some(), alone, "{}", short.template.name());
    }
}

#[test]
fn a_turn_does_not_render_what_was_long_before() {
    let refuses = "{% if messages|length > 20 %}{{ raise_exception('too long') }}{% endif %}";
    let tokenizer = story();
    let mut conversation = Conversation::new(template(refuses, ""), None);
    talk(&mut conversation, &tokenizer, 0..60);
    assert_eq!(
        (conversation.count_questions(), conversation.verified_questions),
        (60, Some(ENOUGH_QUESTIONS))
    );
}

#[test]
fn the_oldest_turns_are_forgotten_and_the_others_stay_as_they_were() {
    let tokenizer = story();
    let new = || Conversation::new(template("", ""), Some("Be brief.".into()));
    let mut conversation = new();
    talk(&mut conversation, &tokenizer, 0..40);
    let turn = conversation.ids.len() / 40;
    conversation.remove_oldest(&tokenizer, usize::MAX).expect("nothing to do");
    assert_eq!(conversation.count_questions(), 40);
    conversation.remove_oldest(&tokenizer, 10 * turn).expect("renders");
    let left = conversation.count_questions();
    assert!((8..=10).contains(&left), "{left}");
    let mut same = new();
    talk(&mut same, &tokenizer, 40 - left..40);
    assert_eq!((&conversation.ids, &conversation.messages), (&same.ids, &same.messages));
    assert_eq!(conversation.undo, same.undo);
    talk(&mut conversation, &tokenizer, 40..41);
    assert_eq!(forgotten(&mut conversation).as_deref(), Some("What is 40? "));
    assert_eq!(conversation.ids, same.ids);
    // The last turn stays, however long it is.
    conversation.remove_oldest(&tokenizer, 0).expect("renders");
    assert_eq!(conversation.count_questions(), 1);
}

#[test]
fn the_opening_is_what_all_conversations_with_a_system_message_share() {
    let tokenizer = story();
    let opening = |template: &Template, system: Option<&str>| {
        let conversation = Conversation::new(template.clone(), system.map(String::from));
        conversation.count_shared_prefix(&tokenizer).expect("renders")
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

/// As Qwen: calls and results in tags, and thoughts of the last turn only.
fn with_tools() -> Template {
    let source = "{% if tools %}<|im_start|>system\n{{ tools|tojson }}<|im_end|>\n{% endif %}\
        {% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}\
        {% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}\
        {% if m.reasoning_content and loop.index > ns.last %}{{ '<think>\n' + m.reasoning_content.strip('\n') + \
        '\n</think>\n\n' }}{% endif %}{{ m.content.lstrip('\n') }}{% for call in m.tool_calls %}\
        {% if m.content or not loop.first %}{{ '\n' }}{% endif %}{{ '<tool_call>\n{\"name\": \"' + call.function.name + \
        '\", \"arguments\": ' }}{{ call.function.arguments|tojson }}{{ '}\n</tool_call>' }}{% endfor %}\
        {{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
        {% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}";
    Template::Jinja(
        Jinja::new("t", source, vec![]).and_then(|t| t.for_tokenizer(&story())).expect("compiles"),
    )
}

const CALL: &str = "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"now\", \"arguments\": {\"b\": 1, \"a\": 2}}\n</tool_call>";

/// A conversation in which `now` was called.
fn called(tokenizer: &Tokenizer) -> Conversation {
    let tools = Tools::parse_json(r#"[{"function": {"name": "now"}}]"#).expect("tools");
    let variables = TemplateKwargs::with_tools(tools);
    let template = with_tools();
    let form = OutputFormat::for_template(&template, tokenizer);
    let mut chat = Conversation::new(template, None).with_format(variables, form);
    chat.add_question(tokenizer, "What time is it?").expect("renders");
    chat.add_answer(tokenizer, &tokenizer.encode_plain(CALL).expect("ids"));
    chat
}

#[test]
fn a_call_and_its_result_append_to_the_conversation() {
    let tokenizer = story();
    let mut chat = called(&tokenizer);
    let before = chat.ids().to_vec();
    let answer = chat.messages.last().expect("an answer").clone();
    assert_eq!((answer.content.as_str(), answer.reasoning.as_deref()), ("", Some("hm\n")));
    assert_eq!(answer.generated_text(), CALL);
    let [call] = chat.last_tool_calls() else { panic!("{:?}", chat.last_tool_calls()) };
    assert_eq!(
        (call.id.as_str(), call.name.as_str(), call.arguments.as_str()),
        ("call_0", "now", "{\"b\": 1, \"a\": 2}")
    );
    let result = Message::tool_result(call, "noon");
    chat.add_messages_until(&tokenizer, std::slice::from_ref(&result), &|| false).expect("renders");
    assert!(chat.last_tool_calls().is_empty());
    assert_eq!(&chat.ids()[..before.len()], before);
    let text = tokenizer.decode_with_special(&chat.ids()[before.len()..]);
    assert_eq!(text, "<|im_end|>\n<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n");
    chat.add_answer(&tokenizer, &tokenizer.encode_plain("It is noon.").expect("ids"));
    // Saved and restored, it is the same, tools included.
    let json = serde_json::to_string(&chat.state()).expect("JSON");
    let mut again =
        Conversation::new(with_tools(), None).with_format(TemplateKwargs::default(), chat.output_format());
    again.restore_state(serde_json::from_str(&json).expect("a state"));
    for chat in [&mut chat, &mut again] {
        chat.add_question(&tokenizer, "Thanks").expect("renders");
        let text = tokenizer.decode_with_special(chat.ids());
        // The thoughts are over; the call stays, with its fields in their order.
        assert!(text.contains("\"b\": 1, \"a\": 2") && !text.contains("<think>"), "{text}");
        assert!(text.contains("\"function\": {\"name\": \"now\"}"), "{text}");
        assert_eq!(forgotten(chat).as_deref(), Some("Thanks"));
        assert_eq!(chat.pop_question(), Some(vec![result.clone()]));
        assert_eq!((chat.ids(), chat.last_tool_calls().len()), (&before[..], 1));
    }
    assert_eq!(again.state(), chat.state());
}

#[test]
fn results_stay_with_their_calls_when_the_oldest_turns_go() {
    let tokenizer = story();
    let mut chat = called(&tokenizer);
    let result = Message::tool_result(&chat.last_tool_calls()[0], "noon");
    chat.add_messages_until(&tokenizer, &[result], &|| false).expect("renders");
    chat.add_answer(&tokenizer, &tokenizer.encode_plain("It is noon.").expect("ids"));
    let all = chat.state();
    // Only the result's answer would fit: its question came with the call.
    chat.remove_oldest(&tokenizer, 5).expect("renders");
    assert_eq!(chat.state(), all);
    talk(&mut chat, &tokenizer, 0..3);
    chat.remove_oldest(&tokenizer, 5).expect("renders");
    assert_eq!(
        (chat.count_questions(), chat.messages.len(), chat.messages[0].content.as_str()),
        (1, 2, "What is 2? ")
    );
    assert!(chat.state().tools.is_some());
}

#[test]
fn thoughts_that_the_prompt_ends_are_none_of_the_answer() {
    let tokenizer = story();
    let mut variables = TemplateKwargs::default();
    variables.set_variable("enable_thinking", "false").expect("a name");
    let form = OutputFormat::for_template(&with_tools(), &tokenizer);
    assert!(form.has_thinking());
    let mut chat = Conversation::new(with_tools(), None).with_format(variables, form.without_tools());
    chat.add_question(&tokenizer, "Hi").expect("renders");
    assert!(tokenizer.decode_with_special(chat.ids()).ends_with("assistant\n<think>\n\n</think>\n\n"));
    assert!(!chat.output_parser(&tokenizer).is_thinking());
    chat.add_answer(
        &tokenizer,
        &tokenizer.encode_plain(CALL.split("\n\n").nth(1).expect("a call")).expect("ids"),
    );
    // Nobody gave it a tool, so that is text.
    assert!(chat.last_tool_calls().is_empty() && chat.messages[1].content.starts_with("<tool_call>"));
    let empty = chat.new_with_system(Some("s".into()));
    assert_eq!(
        (empty.count_questions(), empty.template_kwargs(), empty.output_format()),
        (0, chat.template_kwargs(), chat.output_format())
    );
}

#[test]
fn what_follows_an_answer_with_control_tokens() {
    let head = [control("<"), text("bot\n")];
    let whole = [
        control("<"),
        text("bot\n"),
        control("<call>"),
        text("{}"),
        control("</call>"),
        control(">"),
        text("x"),
    ];
    let rest = Some(vec![control(">"), text("x")]);
    assert_eq!(text_after(&whole, &head, "<call>{}</call>"), rest);
    assert_eq!(text_after(&whole, &head, "<call>{ }</call>"), None);
    assert_eq!(text_after(&whole, &head, "<call>{}</call>>x and more"), None);
}
