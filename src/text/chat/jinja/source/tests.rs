//! Marks and checks put into templates.

use super::*;

fn prepared(source: &str) -> String {
    let marks = Marks::new([("<|a|>", 'Ⓐ'), ("<|a|>b", 'Ⓑ'), ("[0]", 'Ⓞ')].into_iter());
    let text = prepare_source(source, &marks).expect("sound");
    text.replace(CHECK_IN_NAMESPACE, "N").replace(CHECK_FILTER, "S")
}

#[test]
fn control_tokens_are_marked_in_text_and_strings_only() {
    for (source, text) in [
        ("<|a|>{{ x }}<|a|>b", "Ⓐ{{ x }}Ⓑ"),
        ("{{ '<|a|>' ~ x[0] }}", "{{ 'Ⓐ' ~ x[0] }}"),
        ("{{- \"\\\"[0]\" -}}[0]", "{{- \"\\\"Ⓞ\" -}}Ⓞ"),
        ("{# <|a|> '#}{% if x[0] == '[0]' %}", "{# <|a|> '#}{% if x[0] == 'Ⓞ' %}"),
        ("{% raw %}{{ [0] }}{% endraw %}", "{% raw %}{{ Ⓞ }}{% endraw %}"),
        ("{{ {'a': {'b': 1}}['<|a|>'] }}", "{{ {'a': {'b': 1}}['Ⓐ'] }}"),
        ("  <|a|>\n  {%- if x %}\n  <|a|>  {% endif -%}  <|a|>", "  Ⓐ\n  {%- if x %}\n  Ⓐ  {% endif -%}  Ⓐ"),
        ("{{ 'never ends <|a|>", "{{ 'never ends <|a|>"),
        ("{%- generation -%}x{% endgeneration %}", "{%- set generation_ = 0 -%}x{% set generation_ = 0 %}"),
    ] {
        assert_eq!(prepared(source), text, "{source}");
    }
}

#[test]
fn what_set_stores_is_checked_and_products_are_not_folded() {
    for (source, text) in [
        ("{%- set x = y + 1 -%}", "{%- set x =( y + 1 )|S -%}"),
        ("{% set n.x=f(a=b.c)%}", "{% set n.x=(f(a=b.c))|N %}"),
        ("{% set a, b = 1, 2 +%}", "{% set a, b =( 1, 2 )|S +%}"),
        ("{% set x %}{{ set }}{% endset %}", "{% set x %}{{ set }}{% endset %}"),
        ("{{ [1] * 3 ** 2 }}", "{{ [1] * one_ * 3 ** 2 }}"),
        ("{% if set == 1 %}{% with a = 1 %}", "{% if set == 1 %}{% with a = 1 %}"),
    ] {
        assert_eq!(prepared(source), text, "{source}");
    }
}
