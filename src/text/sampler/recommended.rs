//! Sampling options that a model's files recommend for chat.

use super::SamplerOptions;
use crate::tokenizer::files::{SettingsSource, find_settings, format_json_value, read_settings};
use crate::{Error, Result};
use files::source::gguf::Gguf;
use std::path::Path;

const CONFIG: &str = "generation_config.json";

/// A recommended value: its field in `generation_config.json`, its key in a GGUF file after `general.sampling.`, and
/// its setter. An empty name means that this kind of file has no such value.
type Field = (&'static str, &'static str, fn(&mut SamplerOptions, f64));

const FIELDS: [Field; 9] = [
    ("temperature", "temp", |o, x| o.temperature = x as f32),
    ("top_k", "top_k", |o, x| o.top_k = x as usize),
    ("top_p", "top_p", |o, x| o.top_p = x as f32),
    ("min_p", "min_p", |o, x| o.min_p = x as f32),
    ("typical_p", "", |o, x| o.typical_p = x as f32),
    ("repetition_penalty", "penalty_repeat", |o, x| o.repetition_penalty = x as f32),
    ("", "penalty_last_n", |o, x| o.repetition_window = if x < 0.0 { usize::MAX } else { x as usize }),
    ("", "xtc_probability", |o, x| o.xtc.probability = x as f32),
    ("", "xtc_threshold", |o, x| o.xtc.threshold = x as f32),
];

impl SamplerOptions {
    /// Default options for chat: without a repetition penalty, which spoils names and code.
    pub fn for_conversations() -> Self {
        Self { repetition_penalty: 1.0, ..Self::default() }
    }

    /// Options for chat with the model at `path`, from its `generation_config.json` or the keys `general.sampling.*`
    /// of a GGUF file.
    ///
    /// # Errors
    ///
    /// `Model` for a value that is not a number or out of range; the message names file and field.
    pub fn recommended_at(path: &Path) -> Result<Self> {
        match find_settings(path)? {
            SettingsSource::Gguf(gguf) => Self::recommended_in_gguf(&gguf),
            SettingsSource::Files(folder) => {
                let fields = read_settings(&folder, CONFIG)?.unwrap_or_default();
                let value = |(name, _, _): &Field| match fields.get(*name) {
                    None | Some(serde_json::Value::Null) => Ok(None),
                    Some(_) if name.is_empty() => Ok(None),
                    Some(value) => value.as_f64().map(Some).ok_or_else(|| format_json_value(value)),
                };
                read_fields(value, |(name, _, _)| (*name).to_owned(), &folder.path(CONFIG))
            }
        }
    }

    /// [`SamplerOptions::recommended_at`] for an open GGUF file.
    ///
    /// # Errors
    ///
    /// Fails where [`SamplerOptions::recommended_at`] does.
    pub fn recommended_in_gguf(gguf: &Gguf) -> Result<Self> {
        let key = |(_, name, _): &Field| format!("general.sampling.{name}");
        let value = |field: &Field| match gguf.metadata().get(&key(field)) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or_else(|| "not a number".to_owned()),
        };
        read_fields(value, key, gguf.path())
    }
}

/// Reads the fields of one file.
fn read_fields(
    value: impl Fn(&Field) -> std::result::Result<Option<f64>, String>,
    name: impl Fn(&Field) -> String,
    path: &Path,
) -> Result<SamplerOptions> {
    let mut options = SamplerOptions::for_conversations();
    for field in &FIELDS {
        let wrong = |what: String| {
            let what = format!("field `{}` is {what}; use the file published with the model", name(field));
            Error::model(path, what)
        };
        if let Some(x) = value(field).map_err(wrong)? {
            (field.2)(&mut options, x);
            options.validate().map_err(|_| wrong(x.to_string()))?;
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_recommends_what_its_file_says_and_no_penalty_else() {
        let dir = std::env::temp_dir().join(format!("antigravity-recommended-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a temporary directory");
        let read = |config: &str| {
            std::fs::write(dir.join(CONFIG), config).expect("a file");
            SamplerOptions::recommended_at(&dir)
        };
        let plain = SamplerOptions::for_conversations();
        assert_eq!((plain.repetition_penalty, plain.temperature), (1.0, 0.8));
        assert_eq!(read(r#"{"eos_token_id": 2, "temperature": null, "": 7}"#), Ok(plain.clone()));
        let found = read(
            r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}"#,
        );
        let expected = SamplerOptions {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.1,
            repetition_penalty: 1.05,
            ..plain
        };
        assert_eq!(found, Ok(expected));
        for (config, words) in [
            (r#"{"temperature": "0.6"}"#, "field `temperature` is \"0.6\""),
            (r#"{"top_p": 1.5}"#, "field `top_p` is 1.5"),
            (r#"{"repetition_penalty": 0}"#, "field `repetition_penalty` is 0"),
        ] {
            let said = read(config).expect_err(config).to_string();
            assert!(said.contains(words) && said.contains(CONFIG), "{said}");
        }
        std::fs::remove_dir_all(&dir).expect("removable");
    }
}
