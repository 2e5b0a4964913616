//! Limits on a JSON schema, checked before it is compiled: the compiler follows references by recursion, and copies
//! alternatives that it combines.

use super::limits::{MAX_LEVELS, MAX_PATTERN};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Maximum length of a chain of references.
const MAX_REFERENCES: usize = 64;
/// Maximum number of values in a schema.
const MAX_VALUES: usize = 1 << 16;
/// Maximum number of properties of an object: the compiler goes from each to the next by recursion, and takes four
/// times as long for twice as many.
const MAX_PROPERTIES: usize = 2048;
/// Maximum number of patterns for an object's properties: the compiler intersects all pairs.
const MAX_PATTERNS: usize = 64;
/// Maximum number of parts of the combined schema that the compiler builds.
const MAX_PARTS: usize = 200_000;

/// Keywords whose schemas apply to the same value, so that a cycle of them never ends.
const IN_PLACE: [&str; 3] = ["allOf", "anyOf", "oneOf"];
/// Keywords with one schema.
const SINGLE_SCHEMA: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// Keywords with a schema for each name.
const SCHEMA_MAP: [&str; 2] = ["properties", "patternProperties"];
/// Keywords with a list of schemas.
const SCHEMA_LIST: [&str; 2] = ["items", "prefixItems"];
/// Keywords with a number.
const NUMBERS: [&str; 3] = ["minimum", "maximum", "multipleOf"];
/// Maximum number of digits of `multipleOf`: more overflow in the compiler.
const MAX_DIGITS: i32 = 8;
/// Keywords with a count.
const COUNTS: [&str; 6] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"];

/// The largest bound of a number, 2^53, up to which every integer is exact in f64: the compiler overflows soon after.
const MAX_BOUND: f64 = 9_007_199_254_740_992.0;

type Result<T> = std::result::Result<T, String>;

/// Replaces bounds that exclude next to nothing by ones that the compiler can handle.
pub(super) fn clamp_bounds(of: &mut Value) {
    match of {
        Value::Array(all) => all.iter_mut().for_each(clamp_bounds),
        Value::Object(fields) => {
            for (keyword, value) in fields {
                let number = value.as_f64();
                match keyword.as_str() {
                    "const" | "enum" | "default" | "examples" => {}
                    "minimum" | "exclusiveMinimum" if number.is_some_and(|n| n < -MAX_BOUND) => {
                        *value = json!(-MAX_BOUND as i64);
                    }
                    "maximum" | "exclusiveMaximum" if number.is_some_and(|n| n > MAX_BOUND) => {
                        *value = json!(MAX_BOUND as i64);
                    }
                    _ => clamp_bounds(value),
                }
            }
        }
        _ => {}
    }
}

/// Refuses a schema that would take the compiler too deep or too long.
pub(super) fn check_schema(schema: &Value) -> Result<()> {
    let mut left = MAX_VALUES;
    count_values(schema, &mut left)?;
    let mut walk = SchemaWalk { root: schema, known: HashMap::new() };
    let size = walk.measure_schema(schema, WalkDepth::default())?;
    let all = walk.known.values().flatten().fold(size.parts, |sum, of| sum.saturating_add(of.parts));
    if all > MAX_PARTS {
        return Err(format!("combines to more than {MAX_PARTS} parts; use fewer alternatives"));
    }
    walk.check_cycles()
}

fn count_values(value: &Value, left: &mut usize) -> Result<()> {
    *left = left.checked_sub(1).ok_or(format!("has more than {MAX_VALUES} values; use a smaller one"))?;
    match value {
        Value::Array(all) => all.iter().try_for_each(|value| count_values(value, left)),
        Value::Object(all) => all.values().try_for_each(|value| count_values(value, left)),
        _ => Ok(()),
    }
}

/// The depth of the walk: levels and references above.
#[derive(Clone, Copy, Default)]
struct WalkDepth {
    levels: usize,
    references: usize,
}

/// The approximate size of a compiled schema.
#[derive(Clone, Copy)]
struct SchemaSize {
    parts: usize,
    /// Number of alternatives.
    options: usize,
    /// Parts behind a reference, which are copied only where the reference is combined.
    reference: Option<usize>,
    /// True if anything fits.
    any: bool,
}

impl SchemaSize {
    const ANY: Self = Self { parts: 1, options: 1, reference: None, any: true };

    fn with_parts(parts: usize, options: usize) -> Self {
        Self { parts, options, reference: None, any: false }
    }

    /// The size of the intersection: each alternative of one with each of the other.
    fn intersect_with(self, other: Self) -> Self {
        if self.any {
            return other;
        }
        let [a, b] = [self, other].map(|of| (of.parts.max(of.reference.unwrap_or(0)), of.options));
        let parts = a.0.saturating_mul(b.1).saturating_add(b.0.saturating_mul(a.1));
        Self::with_parts(parts, a.1.saturating_mul(b.1))
    }
}

/// A walk in the compiler's order: each reference is followed where it is first met.
struct SchemaWalk<'a> {
    root: &'a Value,
    /// Sizes by reference; `None` while it is being followed.
    known: HashMap<&'a str, Option<SchemaSize>>,
}

impl<'a> SchemaWalk<'a> {
    fn measure_schema(&mut self, of: &'a Value, at: WalkDepth) -> Result<SchemaSize> {
        let Value::Object(fields) = of else { return Ok(SchemaSize::ANY) };
        if at.levels == MAX_LEVELS {
            return Err(format!("is nested more than {MAX_LEVELS} levels deep; use a flatter one"));
        }
        check_types(fields)?;
        let at = WalkDepth { levels: at.levels + 1, ..at };
        let mut size = SchemaSize::ANY;
        for (keyword, value) in fields {
            size = match (keyword.as_str(), value) {
                ("$ref", Value::String(to)) => {
                    let to = self.measure_reference(to, at)?;
                    size.intersect_with(to)
                }
                ("allOf", Value::Array(all)) => {
                    let add = |size: SchemaSize, of| {
                        Ok::<_, String>(size.intersect_with(self.measure_schema(of, at)?))
                    };
                    all.iter().try_fold(size, add)?
                }
                ("anyOf" | "oneOf", Value::Array(all)) => {
                    let sizes =
                        all.iter().map(|of| self.measure_schema(of, at)).collect::<Result<Vec<_>>>()?;
                    let sum =
                        |of: fn(&SchemaSize) -> usize| sizes.iter().map(of).fold(0, usize::saturating_add);
                    // The compiler compares all pairs.
                    let pairs = if keyword == "oneOf" { all.len() * all.len() / 64 } else { 0 };
                    size.intersect_with(SchemaSize::with_parts(
                        sum(|s| s.parts).saturating_add(pairs),
                        sum(|s| s.options),
                    ))
                }
                ("enum", Value::Array(all)) => {
                    size.intersect_with(SchemaSize::with_parts(all.len(), all.len()))
                }
                _ => size,
            };
        }
        let inner = self.measure_inner(fields, at)?;
        Ok(if inner > 0 { size.intersect_with(SchemaSize::with_parts(inner, 1)) } else { size })
    }

    /// The number of parts inside of an object or an array.
    fn measure_inner(&mut self, fields: &'a Map<String, Value>, at: WalkDepth) -> Result<usize> {
        let mut parts = 0usize;
        let mut add = |size: SchemaSize| parts = parts.saturating_add(size.parts);
        for keyword in SINGLE_SCHEMA {
            if let Some(of @ Value::Object(_)) = fields.get(keyword) {
                add(self.measure_schema(of, at)?);
            }
        }
        for keyword in SCHEMA_LIST {
            for of in fields.get(keyword).and_then(Value::as_array).into_iter().flatten() {
                add(self.measure_schema(of, at)?);
            }
        }
        for keyword in SCHEMA_MAP {
            for of in fields.get(keyword).and_then(Value::as_object).into_iter().flat_map(Map::values) {
                add(self.measure_schema(of, at)?);
            }
        }
        Ok(parts)
    }

    fn measure_reference(&mut self, to: &'a str, at: WalkDepth) -> Result<SchemaSize> {
        if !self.known.contains_key(to) {
            if at.references == MAX_REFERENCES {
                return Err(format!("`$ref` leads through more than {MAX_REFERENCES} references; use fewer"));
            }
            self.known.insert(to, None);
            let target = self.resolve_reference(to)?;
            let size = self.measure_schema(target, WalkDepth { references: at.references + 1, ..at })?;
            self.known.insert(to, Some(size));
        }
        let parts = self.known.get(to).copied().flatten().map_or(1, |size| size.parts);
        Ok(SchemaSize { reference: Some(parts), ..SchemaSize::with_parts(1, 1) })
    }

    /// The target of a reference, resolved as the compiler does.
    fn resolve_reference(&self, to: &str) -> Result<&'a Value> {
        if to == "#" || to == "#/" {
            return Ok(self.root);
        }
        let path = to.strip_prefix("#/");
        let path = path.ok_or(format!("`$ref` {to:.64?}: use a path in the schema, such as #/$defs/x"))?;
        let step = |value: &'a Value, name: &str| match value {
            Value::Array(all) => all.get(name.parse::<usize>().ok()?),
            other => other.get(name),
        };
        let found = path.split('/').try_fold(self.root, step);
        found.ok_or(format!("`$ref` {to:.64?}: not found"))
    }

    /// Refuses references that lead back to themselves without a step into an object or an array.
    fn check_cycles(&self) -> Result<()> {
        let names: Vec<&str> = std::iter::once("#").chain(self.known.keys().copied()).collect();
        let mut leads: HashMap<&str, Vec<&str>> = HashMap::new();
        for &name in &names {
            let mut found = Vec::new();
            collect_references(self.resolve_reference(name)?, &mut found);
            leads.insert(name, found);
        }
        // A schema without references ends, and so does one that refers only to schemas that end.
        let mut waits: HashMap<&str, usize> = leads.iter().map(|(&name, to)| (name, to.len())).collect();
        let mut back: HashMap<&str, Vec<&str>> = HashMap::new();
        for (&name, to) in &leads {
            to.iter().for_each(|&to| back.entry(to).or_default().push(name));
        }
        let mut ended: Vec<&str> = names.iter().copied().filter(|name| waits[name] == 0).collect();
        while let Some(name) = ended.pop() {
            for &from in back.get(name).into_iter().flatten() {
                if let Some(left) = waits.get_mut(from) {
                    *left -= 1;
                    if *left == 0 {
                        ended.push(from);
                    }
                }
            }
        }
        match names.iter().find(|name| waits[*name] > 0) {
            Some(name) => Err(format!(
                "`$ref` {name:.64?} refers to itself without a step into an object or an array; give it a definition of its own"
            )),
            None => Ok(()),
        }
    }
}

/// Collects the references of a schema that apply to the same value as the schema itself.
fn collect_references<'a>(of: &'a Value, found: &mut Vec<&'a str>) {
    if let Some(Value::String(to)) = of.get("$ref") {
        found.push(if to == "#/" { "#" } else { to });
    }
    for keyword in IN_PLACE {
        let all = of.get(keyword).and_then(Value::as_array);
        all.into_iter().flatten().for_each(|of| collect_references(of, found));
    }
}

fn has_few_digits(number: f64) -> bool {
    let most = 10f64.powi(MAX_DIGITS);
    let whole = (0..=MAX_DIGITS).find(|&digits| (number * 10f64.powi(digits)).fract() == 0.0);
    whole.is_some_and(|digits| number.abs() * 10f64.powi(digits) <= most)
}

/// A kind of value: its name with an article, and the test for it.
type ValueKind = (&'static str, fn(&Value) -> bool);

/// The kind of value that a keyword must have.
fn kind_of(keyword: &str) -> Option<ValueKind> {
    fn is_names(value: &Value) -> bool {
        value.as_array().is_some_and(|all| all.iter().all(Value::is_string))
    }
    Some(match keyword {
        _ if COUNTS.contains(&keyword) => ("a whole number from 0", Value::is_u64),
        _ if NUMBERS.contains(&keyword) => ("a number", Value::is_number),
        _ if keyword.starts_with("exclusiveM") => {
            ("a number", |value| value.is_number() || value.is_boolean())
        }
        _ if SCHEMA_MAP.contains(&keyword) => ("an object", Value::is_object),
        _ if IN_PLACE.contains(&keyword) => ("an array", Value::is_array),
        "prefixItems" | "enum" => ("an array", Value::is_array),
        "$ref" | "pattern" | "format" => ("a string", Value::is_string),
        "required" => ("an array of strings", is_names),
        _ => return None,
    })
}

/// Refuses values of a wrong type, and long lists: the compiler cuts the text of a wrong value anywhere to show it,
/// even within a character.
fn check_types(fields: &Map<String, Value>) -> Result<()> {
    for (keyword, value) in fields {
        let name = keyword.as_str();
        let (length, most) = match (name, value) {
            ("pattern", Value::String(text)) => (text.len(), MAX_PATTERN),
            ("properties", Value::Object(all)) => (all.len(), MAX_PROPERTIES),
            ("patternProperties", Value::Object(all)) => (all.len(), MAX_PATTERNS),
            ("required", Value::Array(all)) => (all.len(), MAX_PROPERTIES),
            _ => (0, 0),
        };
        if length > most {
            let unit = if name == "pattern" { " bytes" } else { "" };
            return Err(format!("`{name}` has more than {most}{unit}; use fewer"));
        }
        if let Some((kind, _)) = kind_of(name).filter(|(_, is)| !is(value)) {
            return Err(format!("`{name}` is not {kind}"));
        }
        let is_bound = name.ends_with("inimum") || name.ends_with("aximum");
        if is_bound && value.as_f64().is_some_and(|n| n.abs() > MAX_BOUND) {
            return Err(format!("`{name}` {value} is out of range; use a number up to {MAX_BOUND}"));
        }
        if name == "multipleOf" && !value.as_f64().is_some_and(has_few_digits) {
            return Err(format!("`multipleOf` has more than {MAX_DIGITS} digits; use fewer"));
        }
    }
    Ok(())
}
