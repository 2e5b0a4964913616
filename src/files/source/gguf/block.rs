//! How a GGUF file stores the values of a tensor: element types, and blocks of quantised values.
//!
//! Ids, names and sizes are those of ggml (`ggml_type` in `ggml.h`, block structures in `ggml-common.h`); what the
//! bytes of a block mean is told in `quant::gguf`.

/// An element type, or a format of blocks. Blocks lie along a row; a row is whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names by which everybody knows them")]
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

impl BlockType {
    /// All that are read.
    pub const ALL: [BlockType; 11] = [F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K];

    /// The number that stands for the type in a file.
    pub fn id(self) -> u32 {
        match self {
            F32 => 0,
            F16 => 1,
            Q4_0 => 2,
            Q4_1 => 3,
            Q5_0 => 6,
            Q5_1 => 7,
            Q8_0 => 8,
            Q4_K => 12,
            Q5_K => 13,
            Q6_K => 14,
            BF16 => 30,
        }
    }

    /// The type that stands in a file as `id`, or what to call it in a message if it is not read.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.into_iter().find(|t| t.id() == id).ok_or_else(|| {
            let name = OTHERS.iter().find(|(other, _)| *other == id).map_or("unknown", |(_, name)| name);
            format!("{id} ({name})")
        })
    }

    /// As files and tools spell it, e.g. `Q4_K`.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// Values in one block; 1 for element types.
    pub fn values(self) -> usize {
        match self {
            F32 | F16 | BF16 => 1,
            Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 => 32,
            Q4_K | Q5_K | Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub fn bytes(self) -> usize {
        match self {
            F32 => 4,
            F16 | BF16 => 2,
            Q4_0 => 18,
            Q4_1 => 20,
            Q5_0 => 22,
            Q5_1 => 24,
            Q8_0 => 34,
            Q4_K => 144,
            Q5_K => 176,
            Q6_K => 210,
        }
    }

    /// All names, for messages.
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// Types that are known by name only, so that a message can say what a file has.
const OTHERS: [(u32, &str); 24] = [
    (4, "Q4_2, removed"),
    (5, "Q4_3, removed"),
    (9, "Q8_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_and_found_again() {
        for t in BlockType::ALL {
            assert_eq!(BlockType::from_id(t.id()), Ok(t));
            assert!(OTHERS.iter().all(|(id, name)| *id != t.id() && *name != t.name()));
        }
        for (i, (id, _)) in OTHERS.iter().enumerate() {
            assert!(OTHERS[..i].iter().all(|(other, _)| other != id), "{id}");
        }
        assert_eq!(BlockType::from_id(10), Err("10 (Q2_K)".into()));
        assert_eq!(BlockType::from_id(u32::MAX), Err("4294967295 (unknown)".into()));
        assert_eq!(BlockType::names(), "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K");
    }
}
