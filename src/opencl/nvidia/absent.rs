//! Replaces `nvidia.rs` in builds without it: no device has persistent kernels or usable tensor cores.

use super::cache::OpenClCache;
use super::defines::Defines;
use super::kv::DeviceKv;
use super::scratch::Scratch;
use super::storage::{MatrixStorage, Step};
use super::weights::Model;
use crate::model::device::{LogitsBuffer, Run};
use numeric::kv::KvTypes;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceInfo;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Program;

/// Always false.
pub fn has_persistent_kernels(_: &DeviceInfo) -> bool {
    false
}

/// Never exists.
pub enum PersistentKernels {}

/// Never exists.
pub enum BoundDecode {}

/// Never exists.
#[derive(Debug, Clone, Copy)]
pub enum TensorCores {}

#[rustfmt::skip]
#[allow(missing_docs, reason = "nothing calls them")]
impl PersistentKernels {
    pub fn new(_: &Model, _: &[Buffer], _: (KvTypes, usize), _: &Scratch) -> Result<Option<Self>> { Ok(None) }
    pub fn programs(&self) -> impl Iterator<Item = &Program> { match *self {}; #[allow(unreachable_code)] [].into_iter() }
    pub fn reserve(&mut self, _: &Device, _: &Scratch) -> Result<()> { match *self {} }
    pub fn bind(&self, _: &Scratch, _: &DeviceKv) -> Result<Option<BoundDecode>> { match *self {} }
    pub fn lend_row(&mut self, _: &Device, _: &[f32]) -> Option<LogitsBuffer> { match *self {} }
    pub fn runs_at_once(&self, _: usize, _: usize) -> usize { match *self {} }
    pub fn takes(&self, _: usize, cache: &mut OpenClCache) -> bool { cache.bound_decode().is_some() }
    pub fn set_header(&self, _: &mut Scratch, _: &mut OpenClCache) { match *self {} }
    pub fn run(&mut self, _: &Device, _: &Scratch, _: &mut [Run<'_>]) -> Result<bool> { match *self {} }
}

#[rustfmt::skip]
#[allow(missing_docs, reason = "nothing calls them")]
impl TensorCores {
    pub fn of(_: &DeviceInfo) -> Option<Self> { None }
    pub fn takes(self, _: MatrixStorage) -> bool { match self {} }
    pub fn takes_few(self, _: Step, _: MatrixStorage) -> bool { match self {} }
    pub fn tile(self, _: Step) -> [usize; 2] { match self {} }
    pub fn few_tile(self) -> [usize; 2] { match self {} }
    pub fn source(self, _: Defines, _: [usize; 2]) -> (&'static [&'static str], Defines) { match self {} }
}
