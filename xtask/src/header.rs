//! `cargo xtask header`: writes `include/antigravity.h` from the public items of `src/ffi`, which say all that C needs:
//! numbers, structs of numbers, a callback, functions. `tidy` checks that the header is up to date.

use crate::command;
use crate::error::{AtPath, Error, Result};
use std::fs;
use std::path::PathBuf;

/// The files of `src/ffi` with public items, in the order of the header.
const SOURCES: [&str; 3] = ["status.rs", "engine.rs", "session.rs"];

/// Types of Rust and of C.
const TYPES: [(&str, &str); 14] = [
    ("EngineHandle", "antigravity_engine"),
    ("SessionHandle", "antigravity_session"),
    ("MemoryNeed", "antigravity_memory"),
    ("TextResult", "antigravity_result"),
    ("PieceCallback", "antigravity_callback"),
    ("c_char", "char"),
    ("c_void", "void"),
    ("f32", "float"),
    ("f64", "double"),
    ("i32", "int32_t"),
    ("u32", "uint32_t"),
    ("u64", "uint64_t"),
    ("usize", "size_t"),
    ("()", "void"),
];

/// Characters of parameters that fit on the line of their function.
const MAX_PARAMETERS: usize = 80;

const TOP: &str = "\
/* antigravity: one language model as a library. Written by `cargo xtask header` from src/ffi; do not edit.
 *
 * Texts are UTF-8 with a length in bytes and need no byte 0 at the end; only what antigravity_version,
 * antigravity_model_info and antigravity_last_error return ends with one. Every pointer to an input or to a place for a
 * result may be NULL only where that is said. Nothing else may write it during the call, and nothing keeps it
 * afterwards.
 *
 * Functions return a status: ANTIGRAVITY_OK or an error, whose message antigravity_last_error returns.
 *
 * Handles are checked: NULL, a freed or a foreign one is an error. An engine can be used by any number of threads at
 * the same time, and freed in any order with its sessions. A session can move between threads, but only one call at a time
 * may use it: a second one is an error. Only antigravity_cancel and antigravity_session_free may be called meanwhile.
 * Threads need 2 MiB of stack. The library must not be unloaded. After fork, a child must not use it.
 */
#ifndef ANTIGRAVITY_H
#define ANTIGRAVITY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern \"C\" {
#endif
";

const END: &str = "
#ifdef __cplusplus
}
#endif

#endif
";

/// Writes the header.
pub fn run() -> Result<()> {
    let path = header_path();
    fs::write(&path, generate_header()?).at(&path)?;
    println!("{}", path.display());
    Ok(())
}

/// The problem of a header that is not up to date.
pub fn find_problem() -> Result<Option<String>> {
    let path = header_path();
    let stale = fs::read_to_string(&path).at(&path)? != generate_header()?;
    Ok(stale.then(|| "include/antigravity.h: not up to date: run cargo xtask header".into()))
}

/// The path of the header in the sources.
pub fn header_path() -> PathBuf {
    command::root().join("include/antigravity.h")
}

fn generate_header() -> Result<String> {
    let mut out = TOP.to_string();
    for name in SOURCES {
        let path = command::root().join("src/ffi").join(name);
        let text = fs::read_to_string(&path).at(&path)?;
        let written = declare_items(&text).map_err(|line| Error::at(&path, format!("not for C: {line}")))?;
        out += &written;
    }
    Ok(out + END)
}

/// The public items of a source file, in C; an error has the line that has no form in C.
fn declare_items(text: &str) -> std::result::Result<String, String> {
    let (mut out, mut docs) = (String::new(), Vec::new());
    let mut lines = text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
    while let Some(line) = lines.next() {
        if let Some(doc) = line.strip_prefix("///") {
            docs.push(doc.trim().to_owned());
            continue;
        }
        // Up to the brace or semicolon that ends the signature.
        let is_item = ["pub const ANTIGRAVITY", "pub type", "pub extern", "pub unsafe extern"];
        let mut item = line.to_owned();
        while is_item.iter().any(|begin| line.starts_with(begin)) && !item.ends_with(['{', ';']) {
            item += lines.next().unwrap_or(";").trim();
        }
        let declared = if let Some(rest) = item.strip_prefix("pub const ANTIGRAVITY") {
            rest.split_once(':').zip(rest.split_once("= ")).map(|((name, _), (_, value))| {
                format!("#define ANTIGRAVITY{name} {}", value.trim_end_matches(';'))
            })
        } else if let Some((_, signature)) =
            item.split_once("extern \"C\" fn").filter(|_| line.starts_with("pub"))
        {
            declare_function(signature)
        } else if let Some(name) = line.strip_prefix("pub struct ").and_then(|rest| rest.strip_suffix(" {")) {
            // Other structs are not for C.
            match c_name(name) {
                Some(name) => declare_struct(name, &mut lines),
                None => continue,
            }
        } else {
            if !line.starts_with("#[") {
                docs.clear();
            }
            continue;
        };
        out += &format!("\n{}{}\n", comment(&docs, ""), declared.ok_or(item)?);
        docs.clear();
    }
    Ok(out)
}

fn comment(docs: &[String], indent: &str) -> String {
    format!("{indent}/* {} */\n", docs.join(&format!("\n{indent} * ")))
}

fn declare_struct<'a>(name: &str, lines: &mut impl Iterator<Item = &'a str>) -> Option<String> {
    let (mut fields, mut docs) = (String::new(), Vec::new());
    for line in lines.map(str::trim).take_while(|line| *line != "}") {
        if let Some(doc) = line.strip_prefix("///") {
            docs.push(doc.trim().to_owned());
        } else if let Some(field) = line.strip_prefix("pub ") {
            let (field, kind) = field.trim_end_matches(',').split_once(": ")?;
            fields += &format!("{}    {};\n", comment(&docs, "    "), declare(field, kind)?);
            docs.clear();
        }
    }
    Some(match fields.as_str() {
        "" => format!("typedef struct {name} {name};"),
        _ => format!("typedef struct {name} {{\n{fields}}} {name};"),
    })
}

/// A function or, if its signature has no name, the type of a callback.
fn declare_function(signature: &str) -> Option<String> {
    let (name, rest) = signature.trim_start().split_once('(')?;
    let (parameters, result) = rest.split_once(") -> ").unwrap_or((rest.split_once(')')?.0, "()"));
    let result = result.trim_end_matches([' ', '{', ';', '>', ',']);
    let parameters = parameters.split(',').map(str::trim).filter(|p| !p.is_empty());
    let parameters: Option<Vec<String>> =
        parameters.map(|p| p.split_once(": ")).map(|p| declare(p?.0, p?.1)).collect();
    let parameters = parameters?;
    let long = parameters.iter().map(|p| p.len() + 2).sum::<usize>() > MAX_PARAMETERS;
    let parameters = match parameters.join(if long { ",\n    " } else { ", " }).as_str() {
        "" => "void".into(),
        all if long => format!("\n    {all}"),
        all => all.to_owned(),
    };
    Some(match name {
        "" => format!("typedef {}({parameters});", declare("(*antigravity_callback)", result)?),
        _ => format!("{}({parameters});", declare(name, result)?),
    })
}

/// A name with its type.
fn declare(name: &str, kind: &str) -> Option<String> {
    let (mut stars, mut kind, mut is_const) = (String::new(), kind, false);
    while let Some(inner) = kind.strip_prefix("*mut ").or_else(|| kind.strip_prefix("*const ")) {
        is_const = kind.starts_with("*const ");
        kind = inner;
        stars.push('*');
    }
    let qualifier = if is_const { "const " } else { "" };
    Some(format!("{qualifier}{} {stars}{name}", c_name(kind)?))
}

fn c_name(rust: &str) -> Option<&'static str> {
    TYPES.iter().find(|(name, _)| *name == rust).map(|(_, c)| *c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_become_declarations() {
        let rust = "\
//! A file.

/// A number.
pub const ANTIGRAVITY_ONE: i32 = 1;

/// A handle.
#[repr(C)]
pub struct EngineHandle {
    _opaque: [u8; 0],
}

/// A result.
#[repr(C)]
pub struct MemoryNeed {
    /// Bytes.
    pub needed: u64,
}

/// Not for C.
pub struct LoadedModel {
    pub engine: Engine,
}

/// A callback.
pub type PieceCallback =
    Option<unsafe extern \"C\" fn(kind: i32, piece: *const c_char) -> i32>;

/// A call
/// in two lines.
#[unsafe(no_mangle)]
pub unsafe extern \"C\" fn antigravity_do(
    engine: *mut *mut EngineHandle,
    out: *const MemoryNeed,
) -> i32 {
}

/// A text.
#[unsafe(no_mangle)]
pub extern \"C\" fn antigravity_text() -> *const c_char {
}
";
        let c = "
/* A number. */
#define ANTIGRAVITY_ONE 1

/* A handle. */
typedef struct antigravity_engine antigravity_engine;

/* A result. */
typedef struct antigravity_memory {
    /* Bytes. */
    uint64_t needed;
} antigravity_memory;

/* A callback. */
typedef int32_t (*antigravity_callback)(int32_t kind, const char *piece);

/* A call
 * in two lines. */
int32_t antigravity_do(antigravity_engine **engine, const antigravity_memory *out);

/* A text. */
const char *antigravity_text(void);
";
        assert_eq!(declare_items(rust).as_deref(), Ok(c));
        let unknown = "/// A call.\npub extern \"C\" fn antigravity_do(x: Vec<u8>) {\n";
        assert!(declare_items(unknown).is_err());
    }
}
