//! How a GGUF file stores the values of a tensor: as elements or as blocks of quantised values.
//!
//! Ids, names and sizes are those of ggml (`ggml_type` in `ggml.h`, block structures in `ggml-common.h`). What the
//! bytes of a block mean is in [`crate::blocks::gguf`].

/// An element type or a block format. Blocks lie along a row, and a row is whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names that everybody uses")]
pub enum BlockType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

use BlockType::*;

/// What ggml says of a type.
struct Facts {
    /// Its number in a file.
    id: u32,
    /// Values in a block; 1 for element types.
    values: usize,
    /// Bytes of a block.
    bytes: usize,
}

impl BlockType {
    /// All types that this program reads.
    pub const ALL: [BlockType; 11] = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K];

    const fn facts(self) -> Facts {
        let (id, values, bytes) = match self {
            F32 => (0, 1, 4),
            F16 => (1, 1, 2),
            Q4_0 => (2, 32, 18),
            Q4_1 => (3, 32, 20),
            Q5_0 => (6, 32, 22),
            Q5_1 => (7, 32, 24),
            Q8_0 => (8, 32, 34),
            Q4_K => (12, 256, 144),
            Q5_K => (13, 256, 176),
            Q6_K => (14, 256, 210),
            BF16 => (30, 1, 2),
        };
        Facts { id, values, bytes }
    }

    /// The number of the type in a file.
    pub fn id(self) -> u32 {
        self.facts().id
    }

    /// The type with this number in a file.
    ///
    /// # Errors
    ///
    /// It is not read. The error is what to call it in a message.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.into_iter().find(|t| t.id() == id).ok_or_else(|| {
            let name = OTHERS.get(id as usize).filter(|name| !name.is_empty());
            format!("{id} ({})", name.unwrap_or(&"unknown"))
        })
    }

    /// The usual spelling, e.g. `Q4_K`.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// Values in one block; 1 for element types.
    pub const fn values(self) -> usize {
        self.facts().values
    }

    /// Bytes of one block.
    pub const fn bytes(self) -> usize {
        self.facts().bytes
    }

    /// Bytes of a row of `cols` values, which are whole blocks.
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.values() * self.bytes()
    }

    /// All names, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// The names, by id, of types that are not read; for messages. The others are empty.
const OTHERS: [&str; 41] = [
    "",
    "",
    "",
    "",
    "Q4_2, removed",
    "Q4_3, removed",
    "",
    "",
    "",
    "Q8_1",
    "Q2_K",
    "Q3_K",
    "",
    "",
    "",
    "Q8_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "I8",
    "I16",
    "I32",
    "I64",
    "F64",
    "IQ1_M",
    "",
    "",
    "",
    "",
    "TQ1_0",
    "TQ2_0",
    "",
    "",
    "",
    "MXFP4",
    "NVFP4",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_is_unique_and_found_again() {
        for t in BlockType::ALL {
            assert_eq!(BlockType::from_id(t.id()), Ok(t));
            assert!(OTHERS[t.id() as usize].is_empty() && !OTHERS.contains(&&*t.name()), "{t:?}");
        }
        assert_eq!(BlockType::from_id(10), Err("10 (Q2_K)".into()));
        assert_eq!(BlockType::from_id(36), Err("36 (unknown)".into()));
        assert_eq!(BlockType::from_id(40), Err("40 (NVFP4)".into()));
        assert_eq!(BlockType::from_id(u32::MAX), Err("4294967295 (unknown)".into()));
        assert_eq!(BlockType::names(), "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K");
    }
}
