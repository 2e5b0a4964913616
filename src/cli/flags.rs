//! The flags of the library's fields. Its messages name fields, as a program that uses the library knows no flags; what
//! the command line shows names flags.

use files::Error;

/// What the library names in backquotes, and what the command line calls it. `cargo xtask tidy` sees to it that nothing
/// is missing.
const FLAGS: &[(&str, &str)] = &[
    ("EngineOptions::model", "--model-path"),
    ("EngineOptions::weight_type", "--weight-type"),
    ("EngineOptions::kv_types", "--kv-type"),
    ("EngineOptions::max_seq_len", "--max-seq-len"),
    ("EngineOptions::prefill_chunk", "--prefill-chunk"),
    ("EngineOptions::draft", "--draft"),
    ("EngineOptions::draft_model", "--draft-model"),
    ("EngineOptions::backend", "--backend"),
    ("EngineOptions::cl_device", "--cl-device"),
    ("EngineOptions::zero_copy", "--zero-copy"),
    ("KvTypes::k", "-ctk"),
    ("KvTypes::v", "-ctv"),
    ("Eviction::policy", "--eviction-policy"),
    ("Eviction::window", "--eviction-window"),
    ("Eviction::prefix", "--protected-prefix"),
    ("GenerateOptions::stop", "--stop"),
    ("GenerateOptions::ignore_eos", "--ignore-eos"),
    ("GenerateOptions::logprobs", "--logprobs"),
    ("SamplerOptions::temperature", "--temperature"),
    ("SamplerOptions::top_p", "--top-p"),
    ("SamplerOptions::min_p", "--min-p"),
    ("SamplerOptions::typical_p", "--typical"),
    ("SamplerOptions::repetition_penalty", "--repetition-penalty"),
    ("SamplerOptions::presence_penalty", "--presence-penalty"),
    ("SamplerOptions::frequency_penalty", "--frequency-penalty"),
    ("SamplerOptions::logit_bias", "--logit-bias"),
    ("DryOptions::multiplier", "--dry-multiplier"),
    ("DryOptions::base", "--dry-base"),
    ("DryOptions::allowed_length", "--dry-allowed-length"),
    ("DryOptions::breakers", "--dry-sequence-breaker"),
    ("XtcOptions::probability", "--xtc-probability"),
    ("XtcOptions::threshold", "--xtc-threshold"),
    ("Context::Chunk", "--chunk"),
    ("Context::Row", "--depth and -p or -n"),
    ("CpuMask", "--cpu-mask"),
    ("Session", "--session"),
];

/// A message of the library with flags in place of fields.
pub fn named(message: &str) -> String {
    let name = |text: String, (field, flag): &(&str, &str)| text.replace(&format!("`{field}`"), flag);
    FLAGS.iter().fold(message.into(), name)
}

/// An error with flags in place of fields.
pub fn in_error(mut error: Error) -> Error {
    match &mut error {
        Error::Other(text)
        | Error::Usage(text)
        | Error::Model(text)
        | Error::Memory(text)
        | Error::Device(text)
        | Error::Golden(text) => *text = named(text),
        Error::Interrupted | Error::ClosedPipe => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_given_by_a_flag_that_there_is() {
        let command = crate::commands::command();
        let all: Vec<&clap::Arg> = command.get_subcommands().flat_map(|c| c.get_arguments()).collect();
        for (field, flags) in FLAGS {
            for flag in flags.split(' ').filter(|word| word.starts_with('-')) {
                let is = |arg: &&clap::Arg| match flag.strip_prefix("--") {
                    Some(long) => arg.get_long() == Some(long),
                    None => arg.get_short() == flag.chars().nth(1),
                };
                // clap reads -ctk as a long flag, see `spelling.rs`.
                assert!(flag.starts_with("-ct") || all.iter().any(is), "{field}: {flag}");
            }
        }
    }

    #[test]
    fn a_message_names_the_flags_of_its_fields() {
        let field = "`EngineOptions::kv_types` q4 with `EngineOptions::max_seq_len` 1000 or less";
        assert_eq!(named(field), "--kv-type q4 with --max-seq-len 1000 or less");
        let error = in_error(Error::Usage("`DryOptions::base` 0.5: use a number".into()));
        assert_eq!(error, Error::Usage("--dry-base 0.5: use a number".into()));
        // What a file calls so is a field of the file.
        assert_eq!(named("unknown field `model`, `base`"), "unknown field `model`, `base`");
    }
}
