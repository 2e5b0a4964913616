//! Launches of recurrent layers between their products.

use super::Binder;
use crate::dims::{STATE_WIDTH, state_range};
use crate::opencl::kernels::{KernelName, RecurrentStep};
use crate::opencl::step_launch::Launch;
use crate::opencl::weights::LayerWeights;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::failure::Result;
use std::ops::Range;

impl Binder<'_> {
    /// Preparation and gate of a delta net or of Mamba2.
    pub(super) fn bind_around_update(&mut self, l: &LayerWeights) -> Result<[Launch; 2]> {
        let s = self.scratch;
        let or_none = |buffer| Option::as_ref(buffer).unwrap_or(&s.none);
        let prepare = [&s.mix, &s.conv, or_none(&l.head_factors)];
        let gate = [&s.mix, &s.mixed, or_none(&l.mixed_norm)];
        Ok([
            self.bind_launch(KernelName::Recurrent(RecurrentStep::Prepare), &prepare)?,
            self.bind_launch(KernelName::Recurrent(RecurrentStep::Gate), &gate)?,
        ])
    }

    /// Launches of a recurrent layer, one of those of the device, that use the state of a sequence.
    pub(super) fn recurrent_layer(
        &mut self,
        l: &LayerWeights,
        state: &Buffer,
        (layers, layer): (Range<usize>, usize),
    ) -> Result<[Option<Launch>; 2]> {
        let s = self.scratch;
        let [taps, heads] = [&l.taps, &l.head_factors].map(|buffer| buffer.as_ref().unwrap_or(&s.none));
        let out = if STATE_WIDTH != 0 { &s.conv } else { &s.mixed };
        let mut bind = |step, buffers: &[&Buffer]| {
            let mut launch = self.bind_launch(KernelName::Recurrent(step), buffers)?;
            let [before, all] =
                [layers.start..layer, layers.clone()].map(|layers| state_range(&layers).len() as i32);
            launch.set_second_ints(&[before, l.shared_run as i32, all, 0])?;
            Ok(launch)
        };
        let convolve = Some(bind(RecurrentStep::Convolve, &[&s.mix, taps, state, out])?);
        let update = (STATE_WIDTH != 0)
            .then(|| bind(RecurrentStep::Update, &[&s.mix, &s.conv, heads, state, &s.mixed]))
            .transpose()?;
        Ok([convolve, update])
    }
}
