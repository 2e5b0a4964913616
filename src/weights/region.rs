//! stub
use crate::error::{Error, Result};
use std::ops::Range;
use std::sync::Arc;
pub struct AlignedBytes(Vec<u64>, usize);
impl AlignedBytes {
    pub fn zeroed(len: usize) -> Result<Self> {
        let _ = Error::Other;
        Ok(Self(vec![0; len.div_ceil(8)], len))
    }
    pub fn as_slice(&self) -> &[u8] {
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.1) }
    }
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.1) }
    }
    pub fn into_plane(self) -> Plane {
        let n = self.1;
        Plane(Arc::new(self), 0..n)
    }
}
#[derive(Clone)]
pub struct Plane(Arc<AlignedBytes>, Range<usize>);
impl Plane {
    pub fn bytes(&self) -> &[u8] {
        &self.0.as_slice()[self.1.clone()]
    }
    pub fn slice(&self, r: Range<usize>) -> Option<Plane> {
        (r.end <= self.1.len()).then(|| Plane(self.0.clone(), self.1.start + r.start..self.1.start + r.end))
    }
    pub fn release(&self) {}
}
