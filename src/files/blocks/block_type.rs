//! The types in which a GGUF file stores the values of a tensor: elements, or blocks of quantised values.
//!
//! Ids, names and sizes are those of ggml (`ggml_type` in `ggml.h`, block structures in `ggml-common.h`). The decoders
//! in [`mod@super::gguf`] define the bytes of a block.

/// An element type or a block format. Blocks lie along a row, and a row is whole blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "ggml's names")]
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
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    IQ3_XXS,
    IQ3_S,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ1_S,
    IQ1_M,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

use BlockType::*;

impl BlockType {
    /// All types that this program reads.
    #[rustfmt::skip]
    pub const ALL: [BlockType; 28] = [
        F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ4_NL, IQ4_XS, IQ3_XXS, IQ3_S,
        IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M, TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0, Q2_0,
    ];

    /// Id in a file, values per block (1 for element types) and bytes per block.
    const fn ggml_traits(self) -> (u32, usize, usize) {
        match self {
            F32 => (0, 1, 4),
            F16 => (1, 1, 2),
            Q4_0 => (2, 32, 18),
            Q4_1 => (3, 32, 20),
            Q5_0 => (6, 32, 22),
            Q5_1 => (7, 32, 24),
            Q8_0 => (8, 32, 34),
            Q2_K => (10, 256, 84),
            Q3_K => (11, 256, 110),
            Q4_K => (12, 256, 144),
            Q5_K => (13, 256, 176),
            Q6_K => (14, 256, 210),
            IQ2_XXS => (16, 256, 66),
            IQ2_XS => (17, 256, 74),
            IQ3_XXS => (18, 256, 98),
            IQ1_S => (19, 256, 50),
            IQ4_NL => (20, 32, 18),
            IQ3_S => (21, 256, 110),
            IQ2_S => (22, 256, 82),
            IQ4_XS => (23, 256, 136),
            IQ1_M => (29, 256, 56),
            BF16 => (30, 1, 2),
            TQ1_0 => (34, 256, 54),
            TQ2_0 => (35, 256, 66),
            MXFP4 => (39, 32, 17),
            NVFP4 => (40, 64, 36),
            Q1_0 => (41, 128, 18),
            Q2_0 => (42, 64, 18),
        }
    }

    /// Id of the type in a file.
    pub fn id(self) -> u32 {
        self.ggml_traits().0
    }

    /// Looks up a type by its id in a file.
    ///
    /// # Errors
    ///
    /// The type is not supported. The error is its id and name for a message.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.into_iter().find(|t| t.id() == id).ok_or_else(|| {
            let name = OTHERS.iter().find(|(other, _)| *other == id).map_or("unknown", |(_, name)| name);
            format!("{id} ({name})")
        })
    }

    /// ggml's name, e.g. `Q4_K`.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// Values in one block; 1 for element types.
    pub const fn values_per_block(self) -> usize {
        self.ggml_traits().1
    }

    /// Bytes of one block.
    pub const fn bytes_per_block(self) -> usize {
        self.ggml_traits().2
    }

    /// Bytes of a row of `cols` values, which are whole blocks.
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.values_per_block() * self.bytes_per_block()
    }

    /// Lists the names of all types for messages.
    pub fn list_names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }
}

/// Ids and names of unsupported types, for messages.
const OTHERS: [(u32, &str); 9] = [
    (4, "Q4_2, removed"),
    (5, "Q4_3, removed"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_is_unique_and_found_again() {
        for t in BlockType::ALL {
            assert_eq!(BlockType::from_id(t.id()), Ok(t));
            assert!(OTHERS.iter().all(|(id, name)| *id != t.id() && *name != t.name()));
        }
        for (i, (id, _)) in OTHERS.iter().enumerate() {
            assert!(OTHERS[..i].iter().all(|(other, _)| other != id), "{id}");
        }
        assert_eq!(BlockType::from_id(9), Err("9 (Q8_1)".into()));
        assert_eq!(BlockType::from_id(u32::MAX), Err("4294967295 (unknown)".into()));
        assert!(BlockType::list_names().starts_with("F32, F16, BF16, Q4_0, "));
        assert!(BlockType::list_names().ends_with(", MXFP4, NVFP4, Q1_0, Q2_0"));
    }
}
