//! Writes GGUF headers, right and wrong ones: every part is given as it shall stand in the file.

/// Ids of the types of values.
pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;
pub const U64: u32 = 10;

/// A file in parts. The counts are those of the parts unless given.
#[derive(Clone)]
pub struct Parts {
    pub magic: [u8; 4],
    pub version: u32,
    pub tensor_count: Option<u64>,
    pub pair_count: Option<u64>,
    pub pairs: Vec<Vec<u8>>,
    pub infos: Vec<Vec<u8>>,
    /// Bytes of padding after the header, up to a multiple of this.
    pub alignment: usize,
    /// Bytes of data.
    pub data: usize,
}

impl Default for Parts {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            pair_count: None,
            pairs: Vec::new(),
            infos: Vec::new(),
            alignment: 32,
            data: 0,
        }
    }
}

impl Parts {
    pub fn pair(mut self, pair: Vec<u8>) -> Self {
        self.pairs.push(pair);
        self
    }

    pub fn info(mut self, info: Vec<u8>) -> Self {
        self.infos.push(info);
        self
    }

    pub fn data(self, data: usize) -> Self {
        Self { data, ..self }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.infos.len() as u64).to_le_bytes());
        out.extend(self.pair_count.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        out.extend(self.pairs.concat());
        out.extend(self.infos.concat());
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.resize(out.len() + self.data, 7);
        out
    }
}

/// A string: length and bytes.
pub fn text(text: impl AsRef<[u8]>) -> Vec<u8> {
    claiming(text.as_ref().len() as u64, text)
}

/// A string that claims to be `len` bytes long.
pub fn claiming(len: u64, text: impl AsRef<[u8]>) -> Vec<u8> {
    [&len.to_le_bytes(), text.as_ref()].concat()
}

/// A pair of metadata.
pub fn pair(key: &str, kind: u32, value: impl AsRef<[u8]>) -> Vec<u8> {
    [&text(key), &kind.to_le_bytes()[..], value.as_ref()].concat()
}

/// An array's value: type and number of the elements, and these.
pub fn array(kind: u32, len: u64, elements: impl AsRef<[u8]>) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &len.to_le_bytes(), elements.as_ref()].concat()
}

/// A tensor's info; `dims` in the file's order, the row's length first.
pub fn info(name: impl AsRef<[u8]>, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = text(name);
    out.extend((dims.len() as u32).to_le_bytes());
    out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}
