//! Jinja's functions that make objects with a state.

use super::limits::checked_inside;
use minijinja::value::{Object, Rest};
use minijinja::{Error, ErrorKind, State, Value};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Calls after the first one give its text.
#[derive(Debug)]
struct Joiner {
    between: Value,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        Ok(if self.calls.fetch_add(1, Relaxed) == 0 { Value::from("") } else { self.between.clone() })
    }
}

pub(super) fn joiner(between: Option<Value>) -> Result<Value, Error> {
    let between = checked_inside(between.unwrap_or_else(|| Value::from(", ")))?;
    Ok(Value::from_object(Joiner { between, calls: AtomicUsize::new(0) }))
}

/// Values in turn.
#[derive(Debug)]
struct Cycler {
    values: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Option<Value> {
        self.values.get(self.at.load(Relaxed) % self.values.len().max(1)).cloned()
    }
}

impl Object for Cycler {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())?
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        let current = self.current().unwrap_or_default();
        match method {
            "next" => self.at.fetch_add(1, Relaxed),
            "reset" => self.at.swap(0, Relaxed),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        };
        Ok(current)
    }
}

pub(super) fn cycler(values: Rest<Value>) -> Result<Value, Error> {
    let values: Result<_, Error> = values.0.into_iter().map(checked_inside).collect();
    Ok(Value::from_object(Cycler { values: values?, at: AtomicUsize::new(0) }))
}
