//! Quantised matrices of `tests/fixtures/quantised`, which a script packed, decode to that script's values.

use super::*;
use crate::blocks::gguf::decode_values;
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

const NAME: &str = "model.layers.0.self_attn.q_proj.weight";

fn fixture(name: &str) -> PathBuf {
    crate::project().join("tests/fixtures/quantised").join(name)
}

/// Bits of values, where zero has no sign.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| (x + 0.0).to_bits()).collect()
}

#[test]
fn every_method_decodes_to_the_values_of_its_script() {
    use BlockType::{MXFP4, Q4_0, Q5_0, Q8_0};
    for (name, block, loss) in [
        ("fp8-tensor", Q8_0, Some(Loss::Fp8)),
        ("fp8-block", Q8_0, Some(Loss::Fp8)),
        ("fp8-e5m2-channel", Q8_0, Some(Loss::Fp8)),
        ("int4-group", Q4_0, None),
        ("int4-zeros", Q5_0, None),
        ("int4-plain-zeros", Q5_0, None),
        ("int4-act-order", Q8_0, Some(Loss::Groups)),
        ("int4-groups-of-16", Q8_0, Some(Loss::Groups)),
        ("int8-channel", Q8_0, None),
        ("int8-zeros", Q8_0, Some(Loss::ZeroPoints)),
        ("int8-f32-scales", Q8_0, Some(Loss::Scales)),
        ("int8-signed-zeros", Q8_0, Some(Loss::ZeroPoints)),
        ("gptq-int4", Q4_0, None),
        ("gptq-int4-zeros", Q5_0, None),
        ("gptq-int4-v2", Q5_0, None),
        ("gptq-int8", Q8_0, None),
        ("gptq-int8-act-order", Q8_0, Some(Loss::Groups)),
        ("awq", Q5_0, None),
        ("mxfp4", MXFP4, None),
        ("nvfp4", Q8_0, Some(Loss::Nvfp4)),
    ] {
        let source = Safetensors::open(&fixture(name)).unwrap();
        let expected = source.get_required("expected").unwrap();
        let (rows, cols) = (expected.shape[0], expected.shape[1]);
        let tensor = source.find_quantised(NAME, (rows, cols)).unwrap().expect(name);
        assert_eq!((tensor.block, tensor.loss), (block, loss), "{name}");
        let expected = Dtype::F32.to_f32(expected.data.bytes());
        for (row, want) in expected.chunks(cols).enumerate() {
            let (mut exact, mut stored) = (vec![0.0; cols], vec![0.0; cols]);
            tensor.decode_row(row, &mut exact);
            assert_eq!(bits(&exact), bits(want), "{name}, row {row}");
            decode_values(block, &tensor.encode_row(row), &mut stored);
            match loss {
                None => assert_eq!(bits(&stored), bits(want), "{name}, row {row} of blocks"),
                // Half a step of an f16's last bit.
                Some(Loss::Scales) => assert!(
                    stored.iter().zip(want).all(|(a, b)| (a - b).abs() <= b.abs() / 2048.0),
                    "{name}, row {row} of blocks"
                ),
                Some(_) => {
                    for (stored, want) in stored.chunks(BLOCK).zip(want.chunks(BLOCK)) {
                        let max = want.iter().fold(0f32, |max, x| max.max(x.abs()));
                        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= max / 127.0 * 0.54;
                        assert!(stored.iter().zip(want).all(close), "{name}, row {row} of blocks");
                    }
                }
            }
        }
    }
}

/// Changes a fixture's header, or its config, and returns the one line of the error.
fn refused(name: &str, edit: impl FnOnce(&mut Value, &mut Value, &mut [u8])) -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let unique = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let dir = std::env::temp_dir().join(format!("antigravity-quantised-{}-{}", unique.0, unique.1));
    fs::create_dir_all(&dir).unwrap();
    let bytes = fs::read(fixture(name).join("model.safetensors")).unwrap();
    let split = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..split]).unwrap();
    let mut config: Value =
        serde_json::from_slice(&fs::read(fixture(name).join("config.json")).unwrap()).unwrap();
    let mut data = bytes[split..].to_vec();
    let shape = header["expected"]["shape"].clone();
    edit(&mut header, &mut config, &mut data);
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(dir.join("model.safetensors"), file).unwrap();
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let source = Safetensors::open(&dir).unwrap();
    fs::remove_dir_all(&dir).unwrap();
    let sizes = [0, 1].map(|i| shape[i].as_u64().unwrap() as usize);
    let e = source.find_quantised(NAME, (sizes[0], sizes[1])).expect_err(name).to_string();
    assert!(!e.contains('\n') && e.len() <= 400, "{e}");
    e
}

/// Renames a tensor of the matrix, so that it is missing.
fn remove(header: &mut Value, part: &str) {
    let name = NAME.replace("weight", part);
    let entry = header.as_object_mut().unwrap().remove(&name).unwrap();
    header["unused"] = entry;
}

#[test]
fn missing_and_wrong_tensors_are_refused_by_name() {
    for (name, part) in [
        ("fp8-tensor", "weight_scale_inv"),
        ("int4-group", "weight_scale"),
        ("gptq-int4", "scales"),
        ("gptq-int4", "qzeros"),
        ("awq", "qzeros"),
        ("nvfp4", "weight_global_scale"),
    ] {
        let e = refused(name, |header, _, _| remove(header, part));
        let missing = if part == "weight_scale_inv" { "weight_scale" } else { part };
        assert!(
            e.contains(&format!("{} is missing", NAME.replace("weight", missing))) || e.contains(missing),
            "{e}"
        );
        assert!(e.contains("is missing; download"), "{e}");
    }
    for (name, part, shape) in [
        ("fp8-tensor", "weight", json!([96, 24])),
        ("int4-group", "weight_packed", json!([16, 20])),
        ("int4-group", "weight_scale", json!([4, 20])),
        ("int4-zeros", "weight_zero_point", json!([2, 3])),
        ("gptq-int4", "qweight", json!([32, 16])),
        ("gptq-int4", "qzeros", json!([4, 2])),
        ("gptq-int4", "scales", json!([32, 2])),
        ("awq", "qweight", json!([4, 128])),
    ] {
        let full = NAME.replace("weight", part);
        let e = refused(name, |header, _, _| header[&full]["shape"] = shape.clone());
        assert!(e.contains(&full) && e.contains("has shape [") && e.contains("config.json makes it"), "{e}");
    }
    for (name, part, dtype) in [("int4-group", "weight_scale", "I16"), ("gptq-int4", "g_idx", "F32")] {
        let full = NAME.replace("weight", part);
        let e = refused(name, |header, _, _| header[&full]["dtype"] = dtype.into());
        assert!(e.contains(&full) && e.contains(dtype), "{e}");
    }
    // Groups that there are not.
    for bad in [2i32, -1, i32::MIN] {
        let e = refused("gptq-int4", |header, _, data| {
            let at = header[NAME.replace("weight", "g_idx")]["data_offsets"][0].as_u64().unwrap() as usize;
            data[at + 4 * 7..][..4].copy_from_slice(&bad.to_le_bytes());
        });
        assert!(e.contains(&format!("g_idx: element 7 is {bad}; supported: 0 to 1")), "{e}");
    }
    let e = refused("int4-group", |header, _, data| {
        let at = header[NAME.replace("weight", "weight_shape")]["data_offsets"][0].as_u64().unwrap() as usize;
        data[at..at + 8].copy_from_slice(&19i64.to_le_bytes());
    });
    assert!(e.contains("weight_shape holds [19.0, 128.0]; config.json makes it [20, 128]"), "{e}");
}
