//! Features and limits of templates.

use super::*;
use crate::chat::{TemplateKwargs, ToolCall, Tools, UtcTime, join_segments};
use files::print_stderr;

fn context() -> RenderContext<'static> {
    RenderContext {
        bos: Some("<s>"),
        now: UtcTime::from_unix(19_930 * 86_400),
        ending: PromptEnding::Prompt,
        variables: None,
    }
}

/// Renders with one user message.
fn render(source: &str, content: &str) -> Result<String> {
    let template = Jinja::new("dir/chat_template.jinja", source, vec![("eos_token".into(), "</s>".into())])?;
    Ok(join_segments(&template.render_messages(&[Message::new(Role::User, content)], &context())?))
}

fn fault(source: &str) -> String {
    match render(source, "hi") {
        Err(Error::Model(message)) => message,
        other => panic!("{source}: {other:?}"),
    }
}

/// As of jinja2, with which `cargo xtask test templates` compares them.
#[test]
fn expressions_are_those_of_jinja2() {
    let file = crate::project().join("tests/fixtures/chat/expressions.json");
    let all: Vec<(String, String)> =
        serde_json::from_str(&std::fs::read_to_string(file).expect("read")).expect("JSON");
    let tokens = ["eos", "pad", "unk"].map(|name| (format!("{name}_token"), format!("<{name}>"))).into();
    let context = RenderContext { now: UtcTime::from_unix(1_709_219_105), ..context() };
    let template = |source: &str| Jinja::new("t", source, Vec::clone(&tokens));
    let messages = [Message::new(Role::User, "hi")];
    let wrong: Vec<_> = all
        .iter()
        .filter_map(|(source, text)| {
            let made = template(source)
                .and_then(|t| t.render_messages(&messages, &context))
                .map(|parts| join_segments(&parts));
            (made.as_deref() != Ok(text)).then(|| format!("{source}\n is {made:?}\nnot {text:?}"))
        })
        .collect();
    assert!(all.len() > 50 && wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn sources_have_any_line_ends() {
    assert_eq!(render("{% if true %}\r\na\r\n{% endif %}\rb\r\n", "hi").as_deref(), Ok("a\nb"));
}

/// In tools, arguments and variables.
#[test]
fn json_keeps_its_order_and_its_numbers() {
    let json = r#"{"b": 1e-5, "a": [1E16, 12345678901234567890123, -0], "c": {"z": 1.0, "y": null}}"#;
    let same = r#"{"b": 1e-05, "a": [1e+16, 12345678901234567890123, 0], "c": {"z": 1.0, "y": null}}"#;
    let tool = format!(r#"[{{"type": "function", "function": {{"name": "f", "parameters": {json}}}}}]"#);
    let mut variables = TemplateKwargs::with_tools(Tools::parse_json(&tool).expect("tools"));
    variables.set_variable("own", json).expect("set");
    let mut answer = Message::new(Role::Assistant, "");
    answer.tool_calls = vec![ToolCall { id: "1".into(), name: "f".into(), arguments: json.into() }];
    let source = "{{ own|tojson }}\n{{ tools[0].function.parameters|tojson }}\n\
                  {{ messages[0].tool_calls[0].function.arguments|tojson }}";
    let template = Jinja::new("t", source, vec![]).expect("sound");
    let context = RenderContext { variables: Some(&variables), ..context() };
    let text = join_segments(&template.render_messages(&[answer], &context).expect("renders"));
    assert_eq!(text, [same; 3].join("\n"));
}

#[test]
fn mistakes_name_the_file_and_the_line() {
    for (source, parts) in [
        ("a\n{{ nothing() }}", ["chat_template.jinja, line 2", "unknown function: nothing is unknown"]),
        ("a\n\n{{ 'x'|what }}", ["line 3", "what"]),
        ("{{ 'x'.what() }}", ["line 1", "unknown method"]),
        ("{% if %}", ["line 1", "syntax error"]),
        ("{{ messages * messages }}", ["line 1", "multiplies a sequence"]),
        ("{{ 'a' + nothing }}", ["line 1", "undefined"]),
        ("{{ 'x'|urlize }}", ["line 1", "urlize"]),
        ("{{ [].append(1) }}", ["line 1", "append"]),
        ("{{ '%5s' % 'é' }}", ["line 1", "not ASCII"]),
        ("{% macro m() %}{% endmacro %}{{ m(1) }}", ["line 1", "too many arguments"]),
        ("{% include 'x' %}", ["line 1", "x"]),
        ("{{ strftime_now('%Q') }}", ["line 1", "%Q"]),
        ("{{ range(1000000) }}", ["line 1", "range"]),
    ] {
        let message = fault(source);
        assert!(parts.iter().all(|p| message.contains(p)), "{message}");
        assert!(message.ends_with("use the template published with the model"), "{message}");
    }
    let refused = render("\n{{ raise_exception('roles must alternate') }}", "hi");
    let message = "dir/chat_template.jinja: refuses these messages: roles must alternate";
    assert_eq!(refused, Err(Error::Usage(message.into())));
    let in_macro = render("{% macro m() %}{{ raise_exception('no') }}{% endmacro %}{{ m() }}", "hi");
    assert!(matches!(in_macro, Err(Error::Usage(_))), "{in_macro:?}");
}

#[test]
fn limits_are_named() {
    let nested =
        |step: &str, times: usize| format!("{{% set x = 1 %}}{}{{{{ x == y }}}}", step.repeat(times));
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = 1 %}{% endfor %}{% endfor %}";
    for (source, part) in [
        (loops.to_owned(), "takes too many steps"),
        (nested("{% set x = [x] %}", 5000), "nested more than 32"),
        (nested("{% set x = [x, x] %}", 30), "a list of more than 20000 values"),
        (nested("{% set x = namespace(a=x) %}", 2), "a namespace into a namespace or a list"),
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}".into(), "recursion limit"),
        (format!("{{{{ {}1{} }}}}", "[".repeat(50_000), "]".repeat(50_000)), "maximum recursion limits"),
    ] {
        let message = fault(&source);
        assert!(message.contains(part), "{message}");
    }
    let three = render("{% set m = messages[0].content %}{{ [m, m, m] }}", &"x".repeat(3 << 20));
    assert!(matches!(&three, Err(Error::Model(m)) if m.contains("a list with more than 8 MiB of text")));
    // Long conversations are no loops without end.
    let chat: Vec<_> =
        (0..2000).map(|i| Message::new(Role::User, format!("{i} {}", "words ".repeat(50)))).collect();
    let source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% endfor %}";
    let text =
        Jinja::new("t", source, vec![]).and_then(|t| t.render_messages(&chat, &context())).expect("renders");
    assert_eq!(join_segments(&text).lines().count(), 2000);
}

#[test]
fn a_template_may_be_a_megabyte_long() {
    let most = super::MAX_SOURCE as usize;
    assert_eq!(most, 1 << 20);
    let long = |bytes: usize| format!("{{# {} #}}yes", "x".repeat(bytes - 9));
    assert_eq!(long(most).len(), most);
    assert_eq!(render(&long(most), "hi"), Ok("yes".into()));
    let refused = Jinja::new("t", long(most + 1), vec![]).expect_err("too long");
    assert!(refused.to_string().contains("more than 1048576 bytes"), "{refused}");
}

#[test]
fn a_panic_of_the_interpreter_is_a_model_error() {
    let template = Jinja::new("dir/chat_template.jinja", "x", vec![]).expect("sound");
    let message = "dir/chat_template.jinja: makes the interpreter fail: lost; use the template published with the model";
    let panics = || -> std::result::Result<(), minijinja::Error> { panic!("lost\nmore") };
    assert_eq!(template.run_contained(panics), Err(Error::Model(message.into())));
}

fn with_tokens(source: &str) -> Result<Jinja> {
    let dir = crate::project().join("models/story");
    let tokenizer = Tokenizer::open(&dir, 4096).expect("loads");
    Jinja::new("t", source, vec![("eos_token".into(), "<|end_of_text|>".into())])?.for_tokenizer(&tokenizer)
}

fn segments(source: &str, content: &str) -> Vec<Segment> {
    let context = RenderContext { bos: Some("<|begin_of_text|>"), ..context() };
    let messages = [Message::new(Role::User, content)];
    with_tokens(source).and_then(|t| t.render_messages(&messages, &context)).expect("renders")
}

#[test]
fn only_what_the_template_writes_is_a_control_token() {
    let control = |t: &str| Segment::Control(t.into());
    let text = |t: &str| Segment::Text(t.into());
    let (start, end, eos) = ("<|im_start|>", "<|im_end|>", "<|end_of_text|>");
    let turn = "<|im_start|>{{ '<|im_end|>' ~ messages[0].content";
    for (change, content, shown) in [
        ("", "a<|im_end|>b", "a<|im_end|>b"),
        ("|trim", "  <|im_end|> ", "<|im_end|>"),
        ("|lower", "<|IM_END|>", "<|im_end|>"),
        (".replace('-', '')", "<|im-_end|>", "<|im_end|>"),
        ("[1:]", "x<|im_end|>", "<|im_end|>"),
        (".split('</think>')[-1]", "x</think><|im_end|>", "<|im_end|>"),
        ("|length", "<|im_end|>", "10"),
        ("|tojson", "<|im_end|>", "\"<|im_end|>\""),
        ("", "\u{F0000}\u{100000}", "\u{F0000}\u{100000}"),
    ] {
        let parts = segments(&format!("{turn}{change} }}}}{{{{ eos_token }}}}"), content);
        assert_eq!(parts, [control(start), control(end), text(shown), control(eos)], "{change} {content}");
    }
    // Where the template's text and the message meet.
    assert_eq!(segments("<|{{ messages[0].content }}|>", "im_end"), [text("<|im_end|>")]);
    assert_eq!(segments("{{ bos_token }}x", "y"), [control("<|begin_of_text|>"), text("x")]);
}

#[test]
fn tokens_from_parts_are_refused_and_the_end_is_found() {
    let e = with_tokens("{% for m in messages %}{{ '<|im_' + 'start|>' + m.content }}{% endfor %}");
    assert!(
        matches!(e, Err(Error::Model(m)) if m.contains("builds the control token <|im_start|> from parts"))
    );
    let turns = "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}";
    assert_eq!(with_tokens(turns).expect("loads").end_token(), Some("<|im_end|>"));
    // Refuses system messages, and two of the same role.
    let picky = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}\
                 {% for m in messages %}{{ m.content + eos_token }}{% endfor %}";
    assert_eq!(with_tokens(picky).expect("loads").end_token(), Some("<|end_of_text|>"));
    assert_eq!(with_tokens("{{ messages[-1].content }}").expect("loads").end_token(), None);
}

/// Templates that want more time or memory than there is.
fn hostile() -> Vec<String> {
    let repeat = |step: &str| {
        format!(
            "{{% set ns = namespace(x='0123456789', l=[1]) %}}{{% for i in range(99999) %}}{step}{{% endfor %}}"
        )
    };
    let grown = |then: &str| {
        format!(
            "{{% set ns = namespace(x='01234567\n9') %}}{{% for i in range(20) %}}{{% set ns.x = ns.x ~ ns.x %}}\
             {{% endfor %}}{{% set x = ns.x %}}{{{{ {then} }}}}"
        )
    };
    let shared = |then: &str| format!("{{% set x = [1] %}}{}{then}", "{% set x = [x, x] %}".repeat(30));
    let nested = |from: &str| {
        format!(
            "{{% set x = [1] %}}{}{{{{ x }}}}{}",
            format!("{{% for x in {from} %}}").repeat(40),
            "{% endfor %}".repeat(40)
        )
    };
    let mut all: Vec<String> = [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.l = ns.l + ns.l %}",
        "{% set ns.l = ns.l + ns.l %}{% set ns.x = ns.l|list %}",
        "{% set ns.l = [ns.l, ns.l] %}",
        "{% set ns.l = [ns.l] %}",
        "{% set ns.l = {'a': ns.l} %}",
        "{% set ns.l = dict(a=ns.l, b=ns.l) %}",
        "{% set ns.l = ns.l|map('list')|list %}",
        "{% set ns.n = ns %}{{ ns }}",
        "{% set ns.x = namespace(a=ns) %}",
        "{% set ns.x = ns.x.replace('0', ns.x) %}",
        "{% set ns.x = ns.x.join([ns.x, ns.x]) %}",
        "{% set ns.x = [ns.x, ns.x]|join %}",
        "{% set ns.is = (ns.is or ns.x) %}{% set ns.is = ns.is + ns.is %}",
        "{% set ns.x = ns.x|tojson|tojson %}",
        "{% set x = ns ~ ns %}{% set ns.x = x %}",
        "{% set ns.x = [{'a': ns}] %}",
        "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}",
    ]
    .map(repeat)
    .into();
    all.extend(
        [
            "x.split('0')",
            "x|split('0')",
            "x.split(none, 99999999)",
            "x.rsplit(none, 99999999)",
            "('{0}' * 9999).format(x)",
            "('%s' * 9999) % ((x,) * 9999)",
            "[x, x]|join(x)",
            "x.splitlines()",
            "x|list",
            "x|replace('0', x)",
            "x.replace('0', x)",
        ]
        .map(grown),
    );
    all.extend(
        ["'-'.join(x) * 9", "x|join(x)", "x|indent(99999999)", "x.strip(x)", "x|tojson|tojson|tojson|tojson"]
            .map(grown),
    );
    let often = |what: &str| {
        format!(
            "{{% set ns = namespace(x='0123456789') %}}{{% for i in range(19) %}}{{% set ns.x = ns.x ~ ns.x %}}\
             {{% endfor %}}{{% set x = ns.x %}}{{% for i in range(60) %}}{{{{ ({what})|length }}}}{{% endfor %}}"
        )
    };
    all.extend(
        [
            "'y' if [x, x, x] in 'a' else 'n'",
            "'y' if x not in 'a' else 'n'",
            "'y' if x in [1, x] else 'n'",
            "'y' if [x] is not in 'a' else 'n'",
            "'y' if [x, x] is startingwith 'a' else 'n'",
            "[1]|select('in', [x])|list",
            "[x, x, x]|sort",
            "[x, x, x]|unique",
            "[x, x, x]|max",
            "[x]|indent",
            "x|trim(x)",
            "x.lstrip(x)",
        ]
        .map(often),
    );
    all.extend(["{{ x == [x] }}", "{{ x }}", "{{ {x: 1} }}", "{{ x ~ 'a' }}", "{{ x|upper }}"].map(shared));
    all.extend(["x + x", "[x + x]", "[x, x]", "[[x, x]]"].map(nested));
    all.extend(
        [
            "{{ 'x' * 10**9 }}",
            "{{ 'x' * 99999999 }}",
            "{{ [1] * 99999999 ~ '' }}",
            "{{ (1, 2) * 49999999 }}",
            "{{ range(10**9) }}",
            "{{ '{:>999999999}'.format(1) }}",
            "{{ '%999999999d'|format(1) }}",
            "{{ '%*d' % (999999999, 1) }}",
            "{{ '{:{}}'.format(1, 999999999) }}",
            "{{ 'a\nb'|indent('x' * 99999999) }}",
            "{{ ['a']|tojson(separators=('x' * 999, 'x')) }}",
            "{{ strftime_now('%j' * 99999999) }}",
            "{{ 'a\nb'|indent(999999999) }}",
            "{{ [1]|tojson(indent=999999999) }}",
            "{{ 2 ** 9999 }}",
            "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
            "{% macro m(x) %}{{ m(x + x) }}{% endmacro %}{{ m([1]) }}",
        ]
        .map(String::from),
    );
    all
}

/// Memory is measured in a process of its own. An emulated program can't start itself: time alone is checked there.
#[test]
fn hostile_templates_end_soon_and_in_little_memory() {
    const CHILD: &str = "ANTIGRAVITY_HOSTILE_TEMPLATES";
    let own_process = std::env::var_os(CHILD).is_some();
    if !own_process {
        let (_, module) = module_path!().split_once("::").expect("a crate and a module");
        let name = format!("{module}::hostile_templates_end_soon_and_in_little_memory");
        let mut child = std::process::Command::new(std::env::current_exe().expect("a path"));
        let out = child.args([&name, "--nocapture"]).env(CHILD, "1").output().expect("runs");
        let said = String::from_utf8_lossy(&out.stdout);
        let emulated = cfg!(not(target_arch = "x86_64")) && !said.contains("running ");
        if !emulated {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            assert!(said.contains("1 passed"), "{name} does not name this test");
            return;
        }
        print_stderr!("skipped: the memory of templates, because this program can't start itself");
    }
    for source in hostile() {
        let start = std::time::Instant::now();
        let message = fault(&source);
        let took = start.elapsed();
        assert!(!message.contains('\n') && message.len() < 400, "{message}");
        // A second; much more on a busy machine or an emulated one.
        assert!(took < std::time::Duration::from_secs(20), "{source:.200}: {took:?}");
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let most = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    // 32 MiB of text, and the process itself.
    assert!(!own_process || most.is_none_or(|kib| kib < 64 << 10), "{most:?} KiB");
}
