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
    /// Not quantised again: blocks in the layout that kernels read, elements as stored. What adapters change is rounded
    /// to the stored type, as if the model had been saved with them.
    Native,
    /// Quantised to Q4_0 if rows are whole blocks; stored Q4_0 stays bit for bit.
    Q4_0,
    /// Quantised to IQ4_NL, with scales that make the errors small that a text's activations would enlarge.
    Iq4Nl,
    /// Quantised to IQ4_XS with such scales, and to Q5_0 where more bits help most: at most 4.6 bits a weight.
    Q4,
    /// Computed in f32 as the reference: elements as stored, blocks decoded to f32 in memory, and so is what adapters
    /// change.
    F32,
}

impl WeightType {
    /// True if it is quantised by [the text](super::LoadOptions::text).
    pub fn is_calibrated(self) -> bool {
        matches!(self, WeightType::Iq4Nl | WeightType::Q4)
    }

    /// All types by their names on the command line.
    const NAMES: [(&str, WeightType); 6] = [
        ("auto", WeightType::Auto),
        ("native", WeightType::Native),
        ("q4_0", WeightType::Q4_0),
        ("iq4_nl", WeightType::Iq4Nl),
        ("q4", WeightType::Q4),
        ("f32", WeightType::F32),
    ];
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self, Error> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == s);
        let (_, found) = found.ok_or_else(|| {
            Error::Usage(format!(
                "`EngineOptions::weight_type` {s}: use auto, native, q4_0, iq4_nl, q4 or f32"
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
