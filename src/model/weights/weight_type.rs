//! The type that matrices are converted to when a model is loaded.

use files::Error;
use std::fmt;
use std::str::FromStr;

/// Type that matrices are converted to when a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightType {
    /// Chosen by the file: native for GGUF and quantised checkpoints, Q4_0 for others, its own type for a packed file.
    #[default]
    Auto,
    /// Not quantised again: blocks in the layout that kernels read, elements as stored.
    Native,
    /// Quantised to Q4_0 if rows are whole blocks; stored Q4_0 stays bit for bit.
    Q4_0,
    /// Quantised to IQ4_NL, with scales that make the errors small that a text's activations would enlarge.
    Iq4Nl,
    /// Computed in f32 as the reference: elements as stored, blocks decoded to f32 in memory.
    F32,
}

impl WeightType {
    /// True if it is quantised by [the text](super::LoadOptions::text).
    pub fn is_calibrated(self) -> bool {
        self == WeightType::Iq4Nl
    }

    /// All types by their names on the command line.
    const NAMES: [(&str, WeightType); 5] = [
        ("auto", WeightType::Auto),
        ("native", WeightType::Native),
        ("q4_0", WeightType::Q4_0),
        ("iq4_nl", WeightType::Iq4Nl),
        ("f32", WeightType::F32),
    ];
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let name = if s == "q4" { "q4_0" } else { s };
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        let (_, found) = found.ok_or_else(|| {
            Error::Usage(format!(
                "`EngineOptions::weight_type` {name}: use auto, native, q4_0, iq4_nl or f32"
            ))
        })?;
        Ok(*found)
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::NAMES.iter().find(|(_, t)| t == self);
        f.write_str(found.map_or("", |(name, _)| name))
    }
}
