//! Replaces field names in the library's messages by flags: `` `EngineOptions::threads` `` becomes `--threads`.

use files::Error;

/// Types of the library whose fields are flags, with the prefix of those flags.
const PREFIXES: &[(&str, &str)] = &[
    ("EngineOptions", "--"),
    ("GenerateOptions", "--"),
    ("SamplerOptions", "--"),
    ("KvTypes", "--cache-type-"),
    ("Eviction", "--eviction-"),
    ("DryOptions", "--dry-"),
    ("XtcOptions", "--xtc-"),
    ("Context", "--"),
    ("EmbedOptions", "--"),
];

/// Flags whose names do not follow from their field.
const EXCEPTIONS: &[(&str, &str)] = &[
    ("EngineOptions::kv_types", "--kv-type"),
    ("Eviction::prefix", "--protected-prefix"),
    ("DryOptions::breakers", "--dry-sequence-breaker"),
    ("Context::Row", "--depth and -p or -n"),
    ("CpuMask", "--cpu-mask"),
    ("Session", "--session"),
];

/// The flag of a field; `None` if the quoted word is not a field.
fn flag_of(field: &str) -> Option<String> {
    if let Some((_, flag)) = EXCEPTIONS.iter().find(|(name, _)| *name == field) {
        return Some(flag.to_string());
    }
    let (owner, name) = field.split_once("::")?;
    let (_, prefix) = PREFIXES.iter().find(|(known, _)| *known == owner)?;
    Some(format!("{prefix}{}", name.to_lowercase().replace('_', "-")))
}

/// A message with fields replaced by flags.
pub fn name_flags(message: &str) -> String {
    let mut parts = message.split('`');
    let mut text = parts.next().unwrap_or_default().to_owned();
    // Each turn takes a quoted word and the text up to the next backquote.
    while let Some(quoted) = parts.next() {
        match (parts.next(), flag_of(quoted)) {
            (Some(after), Some(flag)) => text += &format!("{flag}{after}"),
            (Some(after), None) => text += &format!("`{quoted}`{after}"),
            (None, _) => text += &format!("`{quoted}"),
        }
    }
    text
}

/// An error with fields in its message replaced by flags.
pub fn name_flags_in(mut error: Error) -> Error {
    match &mut error {
        Error::Other(text)
        | Error::Usage(text)
        | Error::Model(text)
        | Error::Memory(text)
        | Error::Device(text)
        | Error::Golden(text) => *text = name_flags(text),
        Error::Interrupted | Error::ClosedPipe => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// The Rust files of a folder and those below it.
    fn rust_files(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        let files = files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs"));
        files.chain(folders.iter().flat_map(|folder| rust_files(folder))).collect()
    }

    /// Needs the sources, which are not on a phone.
    #[test]
    fn every_field_that_the_library_names_has_a_flag_that_there_is() {
        let command = crate::commands::clap_command();
        let all: Vec<&clap::Arg> = command.get_subcommands().flat_map(|c| c.get_arguments()).collect();
        let is_flag = |word: &str| {
            let named = |arg: &&clap::Arg| match word.strip_prefix("--") {
                Some(long) => {
                    arg.get_long() == Some(long) || arg.get_all_aliases().is_some_and(|a| a.contains(&long))
                }
                None => arg.get_short() == word.chars().nth(1),
            };
            all.iter().any(named)
        };
        let library = ["files", "model", "numeric", "opencl", "run", "text"];
        let sources = library.map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder));
        for file in sources.iter().flat_map(|folder| rust_files(folder)) {
            let text = fs::read_to_string(&file).expect("a source file");
            for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
                for field in line.split('`').skip(1).step_by(2).filter(|quoted| flag_of(quoted).is_some()) {
                    let flags = flag_of(field).unwrap_or_default();
                    let mut words = flags.split(' ').filter(|word| word.starts_with('-'));
                    assert!(words.all(is_flag), "{}: `{field}` is no flag {flags}", file.display());
                }
            }
        }
    }

    #[test]
    fn a_message_names_the_flags_of_its_fields() {
        for (message, shown) in [
            (
                "`EngineOptions::kv_types` q4 with `EngineOptions::max_seq_len` 1000 or less",
                "--kv-type q4 with --max-seq-len 1000 or less",
            ),
            ("`KvTypes::k` q8 and `CpuMask` 3", "--cache-type-k q8 and --cpu-mask 3"),
            ("`DryOptions::base` 0.5: use a number", "--dry-base 0.5: use a number"),
            ("`Context::Chunk` 70 or less", "--chunk 70 or less"),
            // Fields of a file keep their names.
            (
                "unknown field `model`, `base` or `Other::field`",
                "unknown field `model`, `base` or `Other::field`",
            ),
            ("one ` alone", "one ` alone"),
        ] {
            assert_eq!(name_flags(message), shown);
        }
        let error = name_flags_in(Error::Usage("`Session` x: no".into()));
        assert_eq!(error, Error::Usage("--session x: no".into()));
    }
}
