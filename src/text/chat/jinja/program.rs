//! Compiles and runs a template, with bounds on time and memory.
//!
//! The interpreter's fuel pays for steps, for bytes and for the items of lists. It does not pay for a list that is
//! repeated, added or nested without being copied: thirty doublings make a small object that takes for ever to write
//! out, compare or copy. So the operators that make or write such lists are replaced by filters that refuse lists
//! above a size, and no larger list comes about.

use super::limits::{checked, checked_inside, failed, pay_for, size};
use super::source::{self, EXTRA, ONE, STORED, STORED_IN_NAMESPACE};
use super::value::Reads;
use super::{python, written};
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{AutoEscape, Environment, Error, State, Value, filters};
use std::sync::Arc;

/// Filters in place of operators; `in` is also the name of a test.
const ADD: &str = "+";
const MULTIPLY: &str = "*";
const REMAINDER: &str = "%";
const JOIN: &str = "~";
const IN: &str = "in";
const LIST: &str = "[]";
const TUPLE: &str = "()";
const MAP: &str = "{}";

/// Checks the syntax of `source`, and finds out whether it reads `tools`.
pub(super) fn check(source: &str) -> Result<Reads, Error> {
    let program = compile(source)?;
    let mut all = program.blocks.values().chain([&program.instructions]);
    let reads_tools =
        all.any(|code| (0..).map_while(|at| code.get(at)).any(|i| matches!(i, Instruction::Lookup("tools"))));
    Ok(if reads_tools { Reads::Tools } else { Reads::Messages })
}

/// Renders `source` with `values`.
pub(super) fn run(environment: &Environment<'_>, source: &str, values: Value) -> Result<String, Error> {
    let mut program = compile(source)?;
    replace_operators(&mut program.instructions);
    program.blocks.values_mut().for_each(replace_operators);
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    eval(environment, &program.instructions, values, &program.blocks, &mut out, AutoEscape::None)?;
    drop(out);
    Ok(text)
}

fn compile(source: &str) -> Result<CompiledTemplate<'_>, Error> {
    let default_auto_escape = Arc::new(|_: &str| AutoEscape::None);
    CompiledTemplate::new(
        "",
        source,
        &TemplateConfig { syntax_config: source::syntax()?, default_auto_escape },
    )
}

fn replace_operators(code: &mut Instructions<'_>) {
    let count = |n: usize| u16::try_from(n).ok();
    for at in 0.. {
        let Some(instruction) = code.get_mut(at) else { break };
        let (filter, arguments) = match instruction {
            Instruction::Add => (ADD, Some(2)),
            Instruction::Mul => (MULTIPLY, Some(2)),
            Instruction::Rem => (REMAINDER, Some(2)),
            Instruction::StringConcat => (JOIN, Some(2)),
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

/// Adds what [`run`] and [`source`] put into a template.
pub(super) fn add_operators(environment: &mut Environment<'_>) {
    environment.add_global(ONE, 1);
    environment.add_function(EXTRA, |given: Rest<Value>| {
        list(given.0.into_iter().take_while(|value| !value.is_undefined()).collect(), true)
    });
    environment.add_filter(STORED, checked);
    environment.add_filter(STORED_IN_NAMESPACE, checked_inside);
    environment.add_filter(ADD, add);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_filter(JOIN, |state: &State<'_, '_>, a: Value, b: Value| {
        pay_for(state, size(&a)? + size(&b)?)?;
        Ok::<_, Error>(Value::from([written::text(&a), written::text(&b)].concat()))
    });
    environment.add_filter(IN, is_in);
    environment.add_test(IN, is_in);
    environment.add_filter(LIST, |items: Rest<Value>| checked(Value::from(items.0)));
    environment.add_filter(TUPLE, |items: Rest<Value>| checked(Value::from(Tuple::from(items.0))));
    environment.add_filter(MAP, |items: Rest<Value>| {
        checked(Value::from(items.0.clone()))?;
        Ok::<_, Error>(Value::from_pairs(
            items.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())),
        ))
    });
}

/// The sum of two numbers, texts or lists.
pub(super) fn add(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        pay_for(state, left.len() + right.len())?;
        return Ok(match a.is_safe() || b.is_safe() {
            true => Value::from_safe_string([written::escaped(&a), written::escaped(&b)].concat()),
            false => Value::from([left, right].concat()),
        });
    }
    if a.is_undefined() || b.is_undefined() {
        return Err(failed("adds a value that is undefined"));
    }
    if is_list(&a) && is_list(&b) && a.is_tuple() == b.is_tuple() {
        let (is_tuple, a, b) = (a.is_tuple(), checked(a)?, checked(b)?);
        return list(a.try_iter()?.chain(b.try_iter()?).collect(), is_tuple);
    }
    // What is left are numbers, and errors.
    let no_names = std::iter::empty::<(String, Value)>().collect();
    filters::sum(state, Value::from(vec![b]), None, Some(a), no_names)
}

fn list(items: Vec<Value>, is_tuple: bool) -> Result<Value, Error> {
    checked(if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

/// A text with values in its fields, or what is left of a division; it has the divisor's sign.
fn remainder(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    if let Some(text) = a.as_str() {
        return python::percent(state, text, b);
    }
    let are_floats = |value: &Value| value.is_number() && !value.is_integer();
    if !b.is_true() {
        return Err(failed("divides by zero"));
    }
    if are_floats(&a) || are_floats(&b) {
        let (a, b) = (f64::try_from(a)?, f64::try_from(b)?);
        let left = a % b;
        return Ok(Value::from(if left != 0.0 && (left < 0.0) != (b < 0.0) { left + b } else { left }));
    }
    let (a, b) = (i128::try_from(a)?, i128::try_from(b)?);
    let left = a.checked_rem(b).unwrap_or(0);
    Ok(integer(if left != 0 && (left < 0) != (b < 0) { left + b } else { left }))
}

/// The smallest kind of integer that holds it.
pub(super) fn integer(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

/// Whether `value` is in `container`; both may be written out or compared as a whole.
fn is_in(state: &State<'_, '_>, value: Value, container: Value) -> Result<bool, Error> {
    pay_for(state, size(&value)? + size(&container)?)?;
    minijinja::tests::is_in(state, &value, &container)
}

fn multiply(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    // Either may be the number.
    for (many, times) in [(&a, &b), (&b, &a)] {
        let Some(times) = i64::try_from(times.clone()).ok().map(|n| usize::try_from(n).unwrap_or(0)) else {
            continue;
        };
        if let Some(text) = many.as_str() {
            pay_for(state, text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        if many.kind() == ValueKind::Seq {
            pay_for(state, size(many)?.saturating_mul(times))?;
            let items: Vec<Value> = many.try_iter()?.collect();
            return list(items.iter().cycle().take(items.len() * times).cloned().collect(), many.is_tuple());
        }
    }
    for value in [&a, &b] {
        if !matches!(value.kind(), ValueKind::Number | ValueKind::Bool) {
            return Err(failed(format!(
                "multiplies a {}; supported: numbers, and a text or a list by a number",
                value.kind()
            )));
        }
    }
    if a.is_number() && b.is_number() && !(a.is_integer() && b.is_integer()) {
        return Ok(Value::from(f64::try_from(a)? * f64::try_from(b)?));
    }
    match i128::try_from(a)?.checked_mul(i128::try_from(b)?) {
        Some(product) => Ok(integer(product)),
        None => Err(failed("multiplies numbers that are too large")),
    }
}
