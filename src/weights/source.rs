//! stub
use super::region::*;
use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    BF16,
    U8,
}
impl Dtype {
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::U8 => 1,
            _ => 2,
        }
    }
    pub fn from_name(n: &str) -> Option<Self> {
        Some(match n {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            "BF16" => Dtype::BF16,
            "U8" => Dtype::U8,
            _ => return None,
        })
    }
    pub fn to_f32(self, b: &[u8]) -> Vec<f32> {
        b.chunks_exact(self.size()).map(|c| self.one(c)).collect()
    }
    fn one(self, c: &[u8]) -> f32 {
        match self {
            Dtype::F32 => f32::from_le_bytes([c[0], c[1], c[2], c[3]]),
            Dtype::F16 => half::f16::from_le_bytes([c[0], c[1]]).to_f32(),
            Dtype::BF16 => half::bf16::from_le_bytes([c[0], c[1]]).to_f32(),
            Dtype::U8 => 0.0,
        }
    }
    pub fn block_to_f32(self, b: &[u8]) -> [f32; 32] {
        let s = self.size();
        std::array::from_fn(|i| self.one(&b[i * s..][..s]))
    }
}
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Plane,
}
pub struct Source {
    t: BTreeMap<String, Tensor>,
    m: BTreeMap<String, String>,
    p: PathBuf,
}
impl Source {
    pub fn open(path: &Path) -> Result<Source> {
        let mut files = vec![];
        if path.is_dir() {
            for e in std::fs::read_dir(path).unwrap().flatten() {
                let n = e.file_name().to_string_lossy().into_owned();
                if n.ends_with(".safetensors") && !n.contains("packed") {
                    files.push(e.path())
                }
            }
        } else {
            files.push(path.into())
        }
        let mut t = BTreeMap::new();
        let mut m = BTreeMap::new();
        for f in files {
            let b = std::fs::read(&f).map_err(|e| Error::model(&f, e))?;
            let (n, md) = safetensors::SafeTensors::read_metadata(&b).map_err(|e| Error::model(&f, e))?;
            if let Some(x) = md.metadata() {
                m.extend(x.clone())
            }
            let mut a = AlignedBytes::zeroed(b.len() - n - 8)?;
            a.as_mut_slice().copy_from_slice(&b[n + 8..]);
            let p = a.into_plane();
            for (name, i) in md.tensors() {
                let d = format!("{:?}", i.dtype);
                t.insert(
                    name.clone(),
                    Tensor {
                        name,
                        dtype: Dtype::from_name(&d).unwrap(),
                        shape: i.shape.clone(),
                        data: p.slice(i.data_offsets.0..i.data_offsets.1).unwrap(),
                    },
                );
            }
        }
        Ok(Source { t, m, p: path.into() })
    }
    pub fn get(&self, n: &str) -> Option<&Tensor> {
        self.t.get(n)
    }
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.t.values()
    }
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.m
    }
    pub fn path(&self) -> &Path {
        &self.p
    }
    pub fn fingerprint(&self) -> String {
        "x".into()
    }
}
