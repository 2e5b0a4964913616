//! A packed file of the baked model: its header with another text, before planes of zeros.
#![no_main]

use antigravity::model::weights::{LoadOptions, ModelPath, WeightType, Weights};
use libfuzzer_sys::fuzz_target;

/// Longer than the planes of the bundled model.
const LEN: u64 = 24 << 20;

fuzz_target!(|header: &[u8]| {
    let content = [&(header.len() as u64).to_le_bytes(), header].concat();
    let path = antigravity_fuzz::long_file("model.packed.safetensors", &content, LEN);
    let Ok(path) = ModelPath::new(&path) else { return };
    let options = LoadOptions::new(WeightType::Auto, 1);
    let Ok(model) = path.open(options.weight_type) else { return };
    let _ = Weights::load(&model, &options);
});
