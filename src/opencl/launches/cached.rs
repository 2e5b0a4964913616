//! Launches that use the KV cache and the recurrent state of one sequence.

use super::{AttendOn, Binder};
use crate::dims::*;
use crate::opencl::by_layer::ByLayer;
use crate::opencl::defines::LayerView;
use crate::opencl::kernels::{KernelName, Observed};
use crate::opencl::kv::{DeviceKv, LayerRows};
use crate::opencl::mass::AttentionMass;
use crate::opencl::nvidia::BoundDecode;
use crate::opencl::step_launch::Launch;
use crate::opencl::weights::LayerWeights;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::failure::Result;

/// Launches that use one cache, bound to its buffers.
pub struct CacheLaunches {
    /// By layer.
    pub layers: ByLayer<CacheLayer>,
    /// Whole pass of one token, if the device supports it.
    pub decode: Option<BoundDecode>,
    /// Value of [`Scratch::slots`](crate::opencl::scratch::Scratch::slots) when they were bound.
    pub slots: usize,
}

/// Launches of one layer; `None` if the device does not need them.
#[derive(Default)]
pub struct CacheLayer {
    /// RoPE, and new rows of the cache.
    pub rope: Option<Launch>,
    /// Attention of many tokens.
    pub attend: Option<Launch>,
    /// rope and attend of one token.
    pub attend_one: Option<Launch>,
    /// Adds the attention of many tokens to the mass; `None` until attention is observed.
    pub observe: Option<Launch>,
    /// Adds the attention of one token to the mass.
    pub observe_one: Option<Launch>,
    /// Convolution of a recurrent layer.
    pub convolve: Option<Launch>,
    /// Update of the state of a delta net or of Mamba2.
    pub update: Option<Launch>,
}

impl CacheLayer {
    /// True if the kernels for one token compute attention of a run of `tokens` tokens.
    pub fn is_single(&self, tokens: usize) -> bool {
        tokens == 1 && self.attend_one.is_some()
    }
}

impl Binder<'_> {
    /// Binds the launches of a cache. They observe attention if there is `mass`.
    pub fn bind_cache(
        &mut self,
        rows: &DeviceKv,
        mass: Option<&AttentionMass>,
        state: Option<&Buffer>,
    ) -> Result<CacheLaunches> {
        let weights = &self.matrices.layers;
        let layers = ByLayer::try_new(weights.layer_range(), |i| {
            let l = &weights[i];
            let calibration = self.calibration.get(kv_layer(i)).unwrap_or(&self.scratch.none);
            let mass = mass.filter(|_| has_mass(i)).and_then(|mass| mass.on_device(i));
            let mut cached = if has_attention(i) {
                self.cache_layer((l, calibration, LayerView::of(i)), rows.layer(kv_layer(i)), mass)?
            } else {
                CacheLayer::default()
            };
            if let Some(state) = state.filter(|_| is_recurrent(i)) {
                [cached.convolve, cached.update] =
                    self.recurrent_layer(l, state, (weights.layer_range(), i))?;
            }
            Ok(cached)
        });
        Ok(CacheLaunches { layers: layers?, decode: None, slots: self.scratch.slots })
    }

    fn cache_layer(
        &mut self,
        (l, calibration, view): (&LayerWeights, &Buffer, LayerView),
        rows: Option<&LayerRows>,
        mass: Option<&Buffer>,
    ) -> Result<CacheLayer> {
        let (s, many) = (self.scratch, self.scratch.max_tokens > 1);
        let (state, norm) = (s.state.buffer(), l.qk_norm.as_ref().unwrap_or(&s.none));
        let softmax = s.softmax.as_ref().unwrap_or(&s.none);
        let (on_device, one_token) = (self.attend == AttendOn::Device, self.needs_one);
        let mut bind = |wanted: bool, name: KernelName, buffers: &[&Buffer]| {
            wanted.then(|| self.bind_launch(name, buffers)).transpose()
        };
        // If the host computes attention, new rows are written to buffers that are idle meanwhile.
        let [k, v] = rows.map_or([&s.acts, &s.gate_up], |rows| [&rows.k, &rows.v]);
        let rope = [state, &s.qkv, norm, calibration, k, v];
        let attend_one = [&rope[..], &[&s.partials, &s.ml]].concat();
        let attend: [&Buffer; 6] = [&s.qkv, k, v, &s.att, softmax, calibration];
        let attend = &attend[..5 + ATTENTION_SINKS as usize];
        let observe = |softmax, mass| [state, &s.qkv, norm, calibration, k, softmax, mass];
        let (observed, mass) = (on_device && mass.is_some(), mass.unwrap_or(&s.none));
        let [one, several] =
            [Observed::OneToken, Observed::ManyTokens].map(|observed| KernelName::Observe(observed, view));
        Ok(CacheLayer {
            rope: bind(many || !on_device, KernelName::Rope(view), &rope)?,
            attend: bind(many && on_device, KernelName::Attend(view), attend)?,
            attend_one: bind(on_device && one_token, KernelName::AttendOne(view), &attend_one)?,
            observe: bind(observed && many, several, &observe(softmax, mass))?,
            observe_one: bind(observed && one_token, one, &observe(&s.ml, mass))?,
            ..CacheLayer::default()
        })
    }

    /// Kernel that compacts the rows of a layer; its buffers are bound later.
    pub fn bind_compaction(&mut self) -> Result<Launch> {
        Ok(Launch { ints: 2, ..self.bind_launch(KernelName::CompactKv, &[])? })
    }
}
