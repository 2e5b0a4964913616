//! What is put into templates.

use super::*;

fn prepared(source: &str) -> String {
    let marks = Marks::new([("<|a|>", 'Ⓐ'), ("<|a|>b", 'Ⓑ'), ("[0]", 'Ⓞ')].into_iter());
    let text = prepare(source, &marks).expect("sound");
    let text = text.replace(STORED, "S").replace(KEPT, "K").replace(COUNT_PART, "M");
    text.replace(CHARGE, "C").replace(CHARGE_PLACES, "P").replace(NUMBER, "N").replace(CHARGE_BYTES, "B")
}

#[test]
fn control_tokens_are_marked_in_text_and_strings_only() {
    for (source, text) in [
        ("<|a|>{{ x }}<|a|>b", "Ⓐ{{ x }}Ⓑ"),
        ("{{ '<|a|>' ~ x[0] }}", "{{ 'Ⓐ'|C ~ x[0]|C }}"),
        ("{{- \"\\\"[0]\" -}}[0]", "{{- \"\\\"Ⓞ\" -}}Ⓞ"),
        ("{# <|a|> '#}{% if x[0] == '[0]' %}", "{# <|a|> '#}{% if x[0] == 'Ⓞ' %}"),
        ("{% raw %}{{ [0] }}{% endraw %}", "{% raw %}{{ Ⓞ }}{% endraw %}"),
        ("{{ 'never ends <|a|>", "{{ 'never ends <|a|>"),
        ("{%- generation -%}x{% endgeneration %}", "{%- set generation_ = 0 -%}x{% set generation_ = 0 %}"),
    ] {
        assert_eq!(prepared(source), text, "{source}");
    }
}

#[test]
fn operands_are_counted() {
    for (source, text) in [
        ("{{ a + b }}", "{{ a|P + b|C }}"),
        ("{{ a ~ b ~ c }}", "{{ a|C ~ b|C ~ c|C }}"),
        (
            "{{ a.b['+']|trim(x + 1) + -f(y)[0].z|upper }}",
            "{{ a.b['+']|trim(x|P + 1|C)|P + -f(y)[0].z|upper|C }}",
        ),
        ("{{+ x +}}", "{{+ x +}}"),
        ("{%- set x = +1 -%}", "{%- set x = (+1)|S -%}"),
        ("{{ (a + b) * 2 }}", "{{ (a|P + b|C)|N * 2|N }}"),
        ("{{ a ** 2 // b }}", "{{ a ** 2 // b }}"),
        ("{{ {'a': {'b': x ~ y}} }}", "{{ {'a': {'b': x|C ~ y|C}|S}|S }}"),
        ("{{ a + 'x' 'y' if b + 1.5 else c }}", "{{ a|P + 'x' 'y'|C if b|P + 1.5|C else c }}"),
        ("{%- set n.x = a + b -%}", "{%- set n.x = (a|P + b|C)|K -%}"),
        ("{% set n.x %}{% set x = n.x %}", "{% set n.x %}{% set x = (n.x)|S %}"),
        ("{% for (a, b) in [(1, 2), (x)] %}", "{% for (a, b) in [(1, 2)|S, (x)]|S %}"),
        (
            "{{ [1][::-1] ~ {'a': 1}.items()|list }}",
            "{{ [1].M()[::-1].M()|C|S ~ {'a': 1}.items()|list|C|S }}",
        ),
        ("{{ x in ['a'] or x[0][1:] }}", "{{ x|C in ['a']|C|S or x[0].M()[1:].M() }}"),
        ("{{ x[1:][a[:2]:][{'b': 1}] }}", "{{ x.M()[1:].M()[a.M()[:2].M():].M()[{'b': 1}|S] }}"),
        ("{% for a in b if a not in c.d %}", "{% for a in b if a|C not in c.d|C %}"),
        ("{{ a is in b and c is not in d }}", "{{ a is in b and c is not in d }}"),
        ("{{ n.is in b or is + n.in + 1 }}", "{{ n.is|C in b|C or is|P + n.in|C|P + 1|C }}"),
        ("{{ a + }}{{ ~ b }}{{ (a ~ }}", "{{ a|P + }}{{ ~ b }}{{ (a ~ }}"),
    ] {
        assert_eq!(prepared(source), text, "{source}");
    }
}

#[test]
fn long_text_counts_itself_and_keeps_its_lines() {
    let long = "y".repeat(70);
    assert_eq!(
        prepared(&format!("\n x{long}\n{{% if x %}}")),
        format!("\n x{{{{ B(74) }}}}{long}\n{{% if x %}}")
    );
    assert_eq!(prepared(&format!("<|a|>b{long}")), format!("Ⓑ{{{{ B(76) }}}}{long}"));
    let blanks = format!("x{}", " ".repeat(70));
    assert_eq!(prepared(&blanks), blanks);
    assert!(prepare(&" ".repeat(1025), &Marks::new([].into_iter())).is_err());
    let raw = format!("{{% raw %}}{}{{% endraw %}}", "x".repeat(5000));
    assert!(prepare(&raw, &Marks::new([].into_iter())).is_err());
}
