//! Compiles and runs a template, with bounds on time and memory.
//!
//! The interpreter charges fuel for steps, for bytes and for items of lists. It charges nothing for a list that is
//! repeated, added or nested without being copied: thirty doublings make a small object that takes forever to write
//! out, compare or copy. So the operators that make or write such lists are replaced by filters that refuse large
//! lists.

use super::limits::{check_nested, check_value, consume_fuel, template_error, value_size};
use super::source::{self, CHECK_FILTER, CHECK_IN_NAMESPACE, CONST_ONE};
use super::{python, repr};
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{AutoEscape, Environment, Error, State, Value, filters};
use std::sync::Arc;

// Names of the filters in place of operators; `in` is also the name of a test.
const ADD: &str = "+";
const MULTIPLY: &str = "*";
const REMAINDER: &str = "%";
const CONCAT: &str = "~";
const IN: &str = "in";
const LIST: &str = "[]";
const TUPLE: &str = "()";
const MAP: &str = "{}";

/// Checks the syntax of `source`.
pub(super) fn check_syntax(source: &str) -> Result<(), Error> {
    compile_template(source).map(drop)
}

/// Renders `source` with `values`.
pub(super) fn render_template(
    environment: &Environment<'_>,
    source: &str,
    values: Value,
) -> Result<String, Error> {
    let mut program = compile_template(source)?;
    replace_operators(&mut program.instructions);
    program.blocks.values_mut().for_each(replace_operators);
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    eval(environment, &program.instructions, values, &program.blocks, &mut out, AutoEscape::None)?;
    drop(out);
    Ok(text)
}

fn compile_template(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let default_auto_escape = Arc::new(|_: &str| AutoEscape::None);
    let config = TemplateConfig { syntax_config: source::syntax_config()?, default_auto_escape };
    CompiledTemplate::new("", source, &config)
}

fn replace_operators(code: &mut Instructions<'_>) {
    let count = |n: usize| u16::try_from(n).ok();
    for at in 0.. {
        let Some(instruction) = code.get_mut(at) else { break };
        let (filter, arguments) = match instruction {
            Instruction::Add => (ADD, Some(2)),
            Instruction::Mul => (MULTIPLY, Some(2)),
            Instruction::Rem => (REMAINDER, Some(2)),
            Instruction::StringConcat => (CONCAT, Some(2)),
            Instruction::In => (IN, Some(2)),
            Instruction::BuildList(Some(n)) => (LIST, count(*n)),
            Instruction::BuildTuple(Some(n)) => (TUPLE, count(*n)),
            Instruction::BuildMap(n) => (MAP, count(*n * 2)),
            _ => continue,
        };
        if arguments.is_some() {
            *instruction = Instruction::ApplyFilter(filter, arguments, !0);
        }
    }
}

/// Adds the filters and variables that [`render_template`] and [`source`] put into a template.
pub(super) fn add_operators(environment: &mut Environment<'_>) {
    environment.add_global(CONST_ONE, 1);
    environment.add_filter(CHECK_FILTER, check_value);
    environment.add_filter(CHECK_IN_NAMESPACE, check_nested);
    environment.add_filter(ADD, add_values);
    environment.add_filter(MULTIPLY, multiply_values);
    environment.add_filter(REMAINDER, format_or_remainder);
    environment.add_filter(CONCAT, |state: &State<'_, '_>, a: Value, b: Value| {
        consume_fuel(state, value_size(&a)? + value_size(&b)?)?;
        Ok::<_, Error>(Value::from([repr::to_str(&a), repr::to_str(&b)].concat()))
    });
    environment.add_filter(IN, is_in);
    environment.add_test(IN, is_in);
    environment.add_filter(LIST, |items: Rest<Value>| check_value(Value::from(items.0)));
    environment.add_filter(TUPLE, |items: Rest<Value>| check_value(Value::from(Tuple::from(items.0))));
    environment.add_filter(MAP, |items: Rest<Value>| {
        check_value(Value::from(items.0.clone()))?;
        let pairs = items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone()));
        Ok::<_, Error>(Value::from_pairs(pairs))
    });
}

/// Adds two numbers, texts or lists.
pub(super) fn add_values(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        consume_fuel(state, left.len() + right.len())?;
        // As in jinja2, text added to safe text is escaped.
        if a.is_safe() || b.is_safe() {
            return Ok(Value::from_safe_string([repr::escape_html(&a), repr::escape_html(&b)].concat()));
        }
        return Ok(Value::from([left, right].concat()));
    }
    if a.is_undefined() || b.is_undefined() {
        return Err(template_error("adds a value that is undefined"));
    }
    if is_list(&a) && is_list(&b) && a.is_tuple() == b.is_tuple() {
        let (is_tuple, a, b) = (a.is_tuple(), check_value(a)?, check_value(b)?);
        return list_like(is_tuple, a.try_iter()?.chain(b.try_iter()?).collect());
    }
    // Only numbers and errors are left.
    let no_names = std::iter::empty::<(String, Value)>().collect();
    filters::sum(state, Value::from(vec![b]), None, Some(a), no_names)
}

fn list_like(is_tuple: bool, items: Vec<Value>) -> Result<Value, Error> {
    check_value(if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

/// The operator `%`: formats a text, or gives the remainder of a division with the sign of the divisor.
fn format_or_remainder(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    if let Some(text) = a.as_str() {
        return python::format_percent(state, text, b);
    }
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    if !b.is_true() {
        return Err(template_error("divides by zero"));
    }
    if is_float(&a) || is_float(&b) {
        let (a, b) = (f64::try_from(a)?, f64::try_from(b)?);
        let left = a % b;
        return Ok(Value::from(if left != 0.0 && (left < 0.0) != (b < 0.0) { left + b } else { left }));
    }
    let (a, b) = (i128::try_from(a)?, i128::try_from(b)?);
    let left = a.checked_rem(b).unwrap_or(0);
    Ok(integer_value(if left != 0 && (left < 0) != (b < 0) { left + b } else { left }))
}

/// An integer value of the smallest type that holds `number`.
pub(super) fn integer_value(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

/// True if `value` is in `container`. Charges for both, as they may be written out or compared as a whole.
fn is_in(state: &State<'_, '_>, value: Value, container: Value) -> Result<bool, Error> {
    consume_fuel(state, value_size(&value)? + value_size(&container)?)?;
    minijinja::tests::is_in(state, &value, &container)
}

fn multiply_values(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    // Either operand may be the number.
    for (many, times) in [(&a, &b), (&b, &a)] {
        let Some(times) = i64::try_from(times.clone()).ok().map(|n| usize::try_from(n).unwrap_or(0)) else {
            continue;
        };
        if let Some(text) = many.as_str() {
            consume_fuel(state, text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        if many.kind() == ValueKind::Seq {
            consume_fuel(state, value_size(many)?.saturating_mul(times))?;
            let items: Vec<Value> = many.try_iter()?.collect();
            let count = items.len() * times;
            return list_like(many.is_tuple(), items.into_iter().cycle().take(count).collect());
        }
    }
    if let Some(other) =
        [&a, &b].into_iter().find(|v| !matches!(v.kind(), ValueKind::Number | ValueKind::Bool))
    {
        return Err(template_error(format!("multiplies a {}", other.kind())));
    }
    if a.is_number() && b.is_number() && !(a.is_integer() && b.is_integer()) {
        return Ok(Value::from(f64::try_from(a)? * f64::try_from(b)?));
    }
    let product = i128::try_from(a)?.checked_mul(i128::try_from(b)?);
    product.map(integer_value).ok_or_else(|| template_error("multiplies numbers that are too large"))
}
