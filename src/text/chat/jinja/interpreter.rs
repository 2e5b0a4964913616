//! Compiles and runs a template, with bounds on time and memory.
//!
//! The interpreter's fuel pays for steps, for bytes and for the items of lists. It does not pay for a list that is
//! repeated, added or nested without being copied: thirty doublings make a small object that takes for ever to write
//! out, compare or copy. So the operators that make or write such lists are replaced by filters that refuse lists
//! above a size, and no larger list comes about.

use super::source::{self, CHECK_FILTER, CHECK_IN_NAMESPACE, CONST_ONE};
use super::{python, repr};
use minijinja::machinery::{
    CompiledTemplate, Instruction, Instructions, TemplateConfig, eval, make_string_output,
};
use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value, filters};
use std::borrow::Cow;
use std::sync::Arc;

/// Lists in lists.
const MAX_NESTING: usize = 32;
/// Values in a list, those in its lists included; 6,000 messages.
const MAX_VALUES: usize = 20_000;
/// Bytes of text in a list: no context holds that much, and one step may compare or write out all of it.
const MAX_TEXT: usize = 8 << 20;
/// Bytes of a value in a list.
const VALUE_BYTES: usize = 32;
/// Bytes that one unit of the interpreter's fuel pays for.
const BYTES_PER_FUEL: usize = 64;

/// Filters in place of operators; `in` is also the name of a test.
const ADD: &str = "+";
const MULTIPLY: &str = "*";
const REMAINDER: &str = "%";
const CONCAT: &str = "~";
const IN: &str = "in";
const LIST: &str = "[]";
const TUPLE: &str = "()";
const MAP: &str = "{}";

/// Checks the syntax of `source`.
pub(super) fn check(source: &str) -> Result<(), Error> {
    compile(source).map(drop)
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
    let config = TemplateConfig { syntax_config: source::syntax()?, default_auto_escape };
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

/// Adds what [`run`] and [`source`] put into a template.
pub(super) fn add_operators(environment: &mut Environment<'_>) {
    environment.add_global(CONST_ONE, 1);
    environment.add_filter(CHECK_FILTER, check_value);
    environment.add_filter(CHECK_IN_NAMESPACE, check_nested);
    environment.add_filter(ADD, add);
    environment.add_filter(MULTIPLY, multiply);
    environment.add_filter(REMAINDER, remainder);
    environment.add_filter(CONCAT, |state: &State<'_, '_>, a: Value, b: Value| {
        consume_fuel(state, size(&a)? + size(&b)?)?;
        Ok::<_, Error>(Value::from([repr::text(&a), repr::text(&b)].concat()))
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

/// The sum of two numbers, texts or lists.
pub(super) fn add(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        consume_fuel(state, left.len() + right.len())?;
        return Ok(Value::from([left, right].concat()));
    }
    if a.is_undefined() || b.is_undefined() {
        return Err(failed("adds a value that is undefined"));
    }
    if is_list(&a) && is_list(&b) && a.is_tuple() == b.is_tuple() {
        let (is_tuple, a, b) = (a.is_tuple(), check_value(a)?, check_value(b)?);
        return list_like(is_tuple, a.try_iter()?.chain(b.try_iter()?).collect());
    }
    // What is left are numbers, and errors.
    let no_names = std::iter::empty::<(String, Value)>().collect();
    filters::sum(state, Value::from(vec![b]), None, Some(a), no_names)
}

fn list_like(is_tuple: bool, items: Vec<Value>) -> Result<Value, Error> {
    check_value(if is_tuple { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

/// A text with values in its fields, or the remainder of a division; it has the divisor's sign.
fn remainder(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    if let Some(text) = a.as_str() {
        return python::percent(state, text, b);
    }
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    if !b.is_true() {
        return Err(failed("divides by zero"));
    }
    if is_float(&a) || is_float(&b) {
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

/// True if `value` is in `container`; both may be written out or compared as a whole.
fn is_in(state: &State<'_, '_>, value: Value, container: Value) -> Result<bool, Error> {
    consume_fuel(state, size(&value)? + size(&container)?)?;
    minijinja::tests::is_in(state, &value, &container)
}

fn multiply(state: &State<'_, '_>, a: Value, b: Value) -> Result<Value, Error> {
    // Either may be the number.
    for (many, times) in [(&a, &b), (&b, &a)] {
        let Some(times) = i64::try_from(times.clone()).ok().map(|n| usize::try_from(n).unwrap_or(0)) else {
            continue;
        };
        if let Some(text) = many.as_str() {
            consume_fuel(state, text.len().saturating_mul(times))?;
            return Ok(Value::from(text.repeat(times)));
        }
        if many.kind() == ValueKind::Seq {
            consume_fuel(state, size(many)?.saturating_mul(times))?;
            let items: Vec<Value> = many.try_iter()?.collect();
            let count = items.len() * times;
            return list_like(many.is_tuple(), items.into_iter().cycle().take(count).collect());
        }
    }
    if let Some(other) =
        [&a, &b].into_iter().find(|v| !matches!(v.kind(), ValueKind::Number | ValueKind::Bool))
    {
        return Err(failed(format!("multiplies a {}", other.kind())));
    }
    if a.is_number() && b.is_number() && !(a.is_integer() && b.is_integer()) {
        return Ok(Value::from(f64::try_from(a)? * f64::try_from(b)?));
    }
    let product = i128::try_from(a)?.checked_mul(i128::try_from(b)?);
    product.map(integer).ok_or_else(|| failed("multiplies numbers that are too large"))
}

/// Takes what `bytes` cost from the fuel.
pub(super) fn consume_fuel(state: &State<'_, '_>, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// [`check_value`] for what a namespace or a list holds: a namespace that holds itself has no end.
pub(super) fn check_nested(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return Err(failed("puts a namespace into a namespace or a list"));
    }
    check_value(value)
}

/// The value, a list in place of a view of one: views of views take long. Refuses a value that takes too long, or too
/// much stack, to write out or compare.
pub(super) fn check_value(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() || is_namespace(&value) {
        return Ok(value);
    }
    measure(&value, 0, &mut ValueSize::default())?;
    match value.kind() {
        ValueKind::Iterable if value.len().is_some() => {
            Ok(Value::from(value.try_iter()?.collect::<Vec<_>>()))
        }
        _ => Ok(value),
    }
}

/// About the bytes of a value written out. Refuses as [`check_value`].
pub(super) fn size(value: &Value) -> Result<usize, Error> {
    if value.as_object().is_none() {
        return Ok(value.as_str().map_or(0, str::len));
    }
    let mut size = ValueSize::default();
    measure(value, 0, &mut size)?;
    Ok(size.text + size.values * VALUE_BYTES)
}

/// The contents of a list.
#[derive(Default)]
struct ValueSize {
    values: usize,
    text: usize,
}

/// The interpreter has no other way to tell.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().contains("Namespace"))
}

fn measure(value: &Value, depth: usize, size: &mut ValueSize) -> Result<(), Error> {
    size.values += 1;
    size.text += value.as_str().map_or(0, str::len);
    if depth > MAX_NESTING {
        return Err(failed(format!("makes lists nested more than {MAX_NESTING} levels deep")));
    }
    if size.values > MAX_VALUES {
        return Err(failed(format!("makes a list of more than {MAX_VALUES} values")));
    }
    if size.text > MAX_TEXT {
        return Err(failed(format!("makes a list with more than {} MiB of text", MAX_TEXT >> 20)));
    }
    if is_namespace(value) {
        return Err(failed("puts a namespace into a namespace or a list"));
    }
    // What is an iterator without a length would be used up.
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable);
    if !is_list || value.len().is_none() {
        return Ok(());
    }
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            measure(&value.get_item(&item)?, depth + 1, size)?;
        }
        measure(&item, depth + 1, size)?;
    }
    Ok(())
}

/// Ends a template that does what it may not.
pub(super) fn failed(why: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}
