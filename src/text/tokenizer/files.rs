//! Finds a model's settings and reads the text files of its directory. The files are not trusted.

use crate::{Error, Result};
use files::bundle::Bundle;
use files::error;
use files::json_depth::list_tokens;
use files::model_dir::ModelDir;
use files::packed_file::{self, PACKED_NAME};
use files::source::Safetensors;
use files::source::gguf::Gguf;
use files::text_file::parse_config_json;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maximum bytes of a settings file. Real ones have a few KB, or 1 to 2 MB with long lists of added tokens. Parsed,
/// they take up to thirty times the memory.
const MAX_SETTINGS: u64 = 4 << 20;
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Maximum nesting of brackets. serde_json itself gives up at 128; no known file goes beyond 12.
const MAX_NESTING: usize = 64;

/// The source of a model's tokenizer and chat template.
pub enum SettingsSource {
    /// The metadata of a GGUF file.
    Gguf(Gguf),
    /// The files of a directory or a bundle.
    Files(ModelDir),
}

/// Finds the settings of the model at `path`: a directory, a GGUF file, a packed file made from one, a bundle, or
/// another file of a model's directory.
pub fn find_settings(path: &Path) -> Result<SettingsSource> {
    if path.is_dir() {
        let packed = path.join(PACKED_NAME);
        let alone = packed.is_file() && !path.join(TOKENIZER_FILE).exists();
        let within = if alone { read_packed_gguf(&packed)? } else { None };
        return Ok(within.map_or_else(|| in_dir(path), SettingsSource::Gguf));
    }
    if let Some(bundle) = Bundle::open(path)? {
        let own = bundle.file_size(TOKENIZER_FILE).is_some();
        let within = if own { None } else { packed_file::open_gguf_metadata(&bundle.open_model()?)? };
        return Ok(
            within.map_or_else(|| SettingsSource::Files(ModelDir::Bundle(bundle)), SettingsSource::Gguf)
        );
    }
    let named = |extension: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension));
    // Regular files only: reading others could block forever.
    let begins = || {
        let mut magic = [0; 4];
        let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
        read.is_ok() && &magic == b"GGUF"
    };
    if named("gguf") || (path.is_file() && begins()) {
        return Gguf::open(path).map(SettingsSource::Gguf);
    }
    if path.is_file()
        && named("safetensors")
        && let Some(gguf) = read_packed_gguf(path)?
    {
        return Ok(SettingsSource::Gguf(gguf));
    }
    Ok(in_dir(match path.parent().filter(|_| path.is_file()) {
        Some(dir) if dir.as_os_str().is_empty() => Path::new("."),
        Some(dir) => dir,
        None => path,
    }))
}

fn in_dir(dir: &Path) -> SettingsSource {
    SettingsSource::Files(ModelDir::Dir(dir.into()))
}

/// The metadata of the GGUF file that the packed file at `path` was made from.
fn read_packed_gguf(path: &Path) -> Result<Option<Gguf>> {
    packed_file::open_gguf_metadata(&Safetensors::open(path)?)
}

/// A JSON object with a model's settings; `None` where there is no such file.
pub fn read_settings(folder: &ModelDir, name: &str) -> Result<Option<Map<String, Value>>> {
    let Some(bytes) = folder.read_file(name, MAX_SETTINGS)? else { return Ok(None) };
    let broken = |why: String| {
        Error::model(&folder.path(name), format!("{why}; use the file published with the model"))
    };
    check_nesting(&bytes).map_err(broken)?;
    match parse_config_json(&bytes) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(other) => Err(broken(format!("holds {}, not a JSON object", format_json_value(&other)))),
        Err(e) => Err(broken(format!("is not valid JSON ({e})"))),
    }
}

/// Refuses brackets that are nested too deep. Does not recurse.
pub fn check_nesting(json: &[u8]) -> std::result::Result<(), String> {
    if list_tokens(json).any(|mark| mark.depth > MAX_NESTING) {
        return Err(format!("is nested more than {MAX_NESTING} levels deep"));
    }
    Ok(())
}

/// Formats a value for a message, cut to a readable length.
pub fn format_json_value(value: &Value) -> String {
    error::escape(&value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    #[test]
    fn nesting_is_counted_outside_strings() {
        assert_eq!(check_nesting(br#"{"a":["\"[[[["]}"#), Ok(()));
        assert_eq!(check_nesting("[]".repeat(1000).as_bytes()), Ok(()));
        assert!(check_nesting("[".repeat(65).as_bytes()).is_err());
        assert!(check_nesting("{\"a\":".repeat(100_000).as_bytes()).is_err());
    }

    /// A packed file of nothing but a GGUF file's metadata.
    fn packed(name: &str, dir: &Path, gguf: &[u8]) -> PathBuf {
        let end = gguf.len();
        let header = format!(
            r#"{{"__metadata__":{{"antigravity.layout":"1"}},"gguf":{{"dtype":"U8","shape":[{end}],"data_offsets":[0,{end}]}}}}"#
        );
        let path = dir.join(name);
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), gguf].concat();
        fs::write(&path, bytes).expect("a file");
        path
    }

    #[test]
    fn settings_are_in_a_gguf_file_or_a_directory() {
        let dir = std::env::temp_dir().join(format!("antigravity-place-{}", std::process::id()));
        fs::create_dir_all(dir.join("x.gguf")).expect("a temporary directory");
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.join(name);
            fs::write(&path, bytes).expect("a file");
            path
        };
        let gguf = [b"GGUF\x03\0\0\0".as_slice(), &[0; 16]].concat();
        for of_gguf in
            [file("m.GGUF", &gguf), file("blob", &gguf), packed("model.packed.safetensors", &dir, &gguf)]
        {
            assert!(matches!(find_settings(&of_gguf), Ok(SettingsSource::Gguf(_))), "{}", of_gguf.display());
        }
        assert!(matches!(find_settings(&dir), Ok(SettingsSource::Gguf(_))), "in the packed file");
        let in_dir = |path: &Path, dir: &Path| matches!(find_settings(path), Ok(SettingsSource::Files(ModelDir::Dir(d))) if d == dir);
        file(TOKENIZER_FILE, b"{}");
        assert!(in_dir(&dir, &dir) && in_dir(&file("blob", b"no such file"), &dir));
        assert!(in_dir(&dir.join("x.gguf"), &dir.join("x.gguf")));
        assert!(in_dir(Path::new("/nowhere"), Path::new("/nowhere")));
        for broken in [file("m.gguf", b""), file("model.safetensors", b"\x10"), "/nowhere.gguf".into()] {
            assert!(matches!(find_settings(&broken), Err(Error::Model(_))), "{}", broken.display());
        }
        fs::remove_dir_all(&dir).expect("removable");
    }

    #[test]
    fn settings_that_are_not_a_json_object_are_refused() {
        let dir = std::env::temp_dir().join(format!("antigravity-files-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary directory");
        fs::write(dir.join("x.json"), "[1]").expect("a file");
        let e = read_settings(&ModelDir::Dir(dir.clone()), "x.json");
        assert!(matches!(e, Err(Error::Model(m)) if m.contains("[1], not a JSON object")));
        fs::remove_dir_all(&dir).expect("removable");
    }
}
