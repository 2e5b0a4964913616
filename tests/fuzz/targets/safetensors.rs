//! A safetensors file: its header, then all tensors.
#![no_main]

use files::source::Safetensors;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // Half of the inputs are only the header: its length is put before it, and zeros after it.
    let path = match data.split_first() {
        None => return,
        Some((odd, header)) if odd % 2 == 1 => {
            let content = [&(header.len() as u64).to_le_bytes(), header].concat();
            let len = content.len() as u64 + (u64::from(*odd) << 8);
            antigravity_fuzz::long_file("model.safetensors", &content, len)
        }
        Some((_, file)) => antigravity_fuzz::file("model.safetensors", file),
    };
    let Ok(source) = Safetensors::open(&path) else { return };
    source.hash_files();
    for tensor in source.tensors() {
        assert_eq!(tensor.shape.iter().product::<usize>() * tensor.dtype.size(), tensor.data.bytes().len());
        if tensor.data.bytes().len() < 1 << 16 {
            tensor.dtype.to_f32(tensor.data.bytes());
        }
    }
    source.unsupported_tensors().for_each(|tensor| assert!(source.get_required(&tensor.name).is_err()));
});
