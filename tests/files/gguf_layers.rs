//! Tests that a GGUF header gives each layer its mixer, its window and its position encoding, as llama.cpp has them.

use crate::gguf_model::Made;
use crate::support::gguf::writer::{ARRAY, BOOL, F32, STRING, U32, array, text};
use files::config::{Arch, DeltaNetSizes, LayerKind, QueryGrowth, RopeScaling};
use files::source::gguf::names::ROPE_FREQS;

const PATTERN: &str = "attention.sliding_window_pattern";
const WINDOW: &str = "attention.sliding_window";

fn refused(made: Made, field: &str, value: &str) {
    let e = made.read(&[]).unwrap_err();
    assert!(e.field == field && e.value.contains(value) && !e.supported.is_empty(), "{field}: {e}");
}

fn numbers(made: Made, key: &str, values: &[u32]) -> Made {
    let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    made.with(key, ARRAY, array(U32, values.len() as u64, bytes))
}

#[test]
fn scales_of_granite_and_layers_of_gemma_are_those_of_llama_cpp() {
    let scale = |value: Option<f32>| {
        let made = Made::new("granite").with("logit_scale", F32, 4f32.to_le_bytes());
        let made = value.into_iter().fold(made, |m, x| m.with("attention.scale", F32, x.to_le_bytes()));
        made.read(&[]).unwrap().scales
    };
    assert_eq!([None, Some(0.0), Some(0.5)].map(|x| scale(x).attention), [0.25, 0.25, 0.5]);
    assert_eq!(scale(None).logits, 0.25);

    let gemma = || Made::new("gemma3").number("block_count", 7).number("attention.sliding_window", 512);
    let pattern = "attention.sliding_window_pattern";
    let flags = |kind, bytes: &[u8]| array(kind, 7, bytes);
    let words = [1u32, 1, 0, 1, 1, 1, 1].map(u32::to_le_bytes).concat();
    for (made, full) in [
        (gemma(), vec![5]),
        (gemma().number(pattern, 3), vec![2, 5]),
        (gemma().number(pattern, 0), vec![]),
        (gemma().with(pattern, ARRAY, flags(BOOL, &[1, 1, 0, 1, 1, 1, 0])), vec![2, 6]),
        (gemma().with(pattern, ARRAY, flags(U32, &words)), vec![2]),
        (gemma().number("attention.sliding_window", 0), (0..7).collect()),
        (gemma().without("attention.sliding_window").number(pattern, 3), (0..7).collect()),
    ] {
        let kinds = made.read(&[]).unwrap().layer_kinds;
        let found: Vec<usize> = (0..7).filter(|&layer| kinds[layer] == LayerKind::FullAttention).collect();
        assert_eq!(found, full);
    }
    let short = gemma().with(pattern, ARRAY, array(BOOL, 2, [1, 0])).read(&[]).unwrap_err();
    assert!(short.field.ends_with(pattern) && short.supported.contains("each of 7"), "{short}");
}

/// OLMo 3 is OLMo 2 with a window; EXAONE 4 with a window has full layers without RoPE.
#[test]
fn a_window_tells_families_and_layers_apart() {
    use LayerKind::{FullAttention, NoRope, SlidingWindow};
    let made = |arch| Made::new(arch).number("block_count", 5);
    let flags = array(BOOL, 5, [1, 0, 1, 1, 0]);
    for (arch, full, without, with) in [
        ("olmo2", FullAttention, Arch::Olmo2, Arch::Olmo3),
        ("exaone4", NoRope, Arch::Exaone4, Arch::Exaone4),
    ] {
        for plain in [made(arch), made(arch).number(WINDOW, 0).number(PATTERN, 4)] {
            let found = plain.read(&[]).unwrap();
            assert_eq!((found.arch, found.layer_kinds), (without, vec![FullAttention; 5]));
            assert_eq!(found.sliding_window, 0);
        }
        for (windowed, at) in [
            (made(arch).number(WINDOW, 20), vec![3]),
            (made(arch).number(WINDOW, 20).with(PATTERN, ARRAY, &flags), vec![1, 4]),
        ] {
            let found = windowed.read(&[]).unwrap();
            let kind = |layer| if at.contains(&layer) { full } else { SlidingWindow };
            let kinds: Vec<_> = (0..5).map(kind).collect();
            assert_eq!((found.arch, found.layer_kinds, found.sliding_window), (with, kinds, 20));
        }
    }
    // EXAONE 4 scales frequencies where it rotates: in its windowed layers.
    let scaled = made("exaone4").number(WINDOW, 20).tensor(ROPE_FREQS, &[8]).read(&[2.0; 8]).unwrap();
    assert!(matches!(scaled.rope.for_sliding_window().scaling, RopeScaling::Divisors(d) if d == [2.0; 8]));
}

#[test]
fn layers_without_kv_heads_are_convolutions() {
    let heads = "attention.head_count_kv";
    let made = || Made::new("lfm2").number("block_count", 3).number("shortconv.l_cache", 3);
    let found = numbers(made(), heads, &[0, 2, 0]).read(&[]).unwrap();
    let kinds = [LayerKind::ShortConv, LayerKind::FullAttention, LayerKind::ShortConv];
    assert_eq!((found.kv_heads, found.conv_taps, &found.layer_kinds[..]), (2, 3, &kinds[..]));
    assert_eq!(made().number(heads, 2).read(&[]).unwrap().layer_kinds, [LayerKind::FullAttention; 3]);
    let key = "lfm2.attention.head_count_kv";
    refused(made(), key, "missing");
    refused(numbers(made(), heads, &[0, 2, 4]), key, "an array of 3");
    refused(numbers(made(), heads, &[0, 0, 0]), key, "an array of 3");
    refused(numbers(made(), heads, &[0, 2]), key, "an array of 2");
    refused(
        numbers(made(), heads, &[0, 2, 0]).without("shortconv.l_cache"),
        "lfm2.shortconv.l_cache",
        "missing",
    );
    refused(numbers(Made::new("qwen3"), heads, &[0, 2]), "qwen3.attention.head_count_kv", "an array of 2");
}

fn qwen35() -> Made {
    let sizes = [
        ("block_count", 5),
        ("attention.key_length", 32),
        ("rope.dimension_count", 8),
        ("nextn_predict_layers", 1),
        ("full_attention_interval", 2),
        ("ssm.conv_kernel", 4),
        ("ssm.state_size", 16),
        ("ssm.group_count", 2),
        ("ssm.time_step_rank", 6),
        ("ssm.inner_size", 192),
    ];
    let made = sizes.into_iter().fold(Made::new("qwen35"), |made, (key, n)| made.number(key, n));
    numbers(made, "rope.dimension_sections", &[2, 1, 1, 0]).tensor("blk.4.nextn.eh_proj.weight", &[128, 64])
}

#[test]
fn delta_nets_have_their_sizes_and_further_predictions_are_left_out() {
    use LayerKind::{DeltaNet, FullAttention};
    let found = qwen35().read(&[]).unwrap();
    assert_eq!((found.arch, found.layers, found.rope.dim, found.conv_taps), (Arch::Qwen35, 4, 8, 4));
    let sizes = DeltaNetSizes { key_heads: 2, value_heads: 6, key_dim: 16, value_dim: 32 };
    assert_eq!(found.delta_net, sizes);
    assert_eq!(found.layer_kinds, [DeltaNet, FullAttention, DeltaNet, FullAttention]);
    let each = qwen35().with("attention.recurrent_layers", ARRAY, array(BOOL, 5, [1, 1, 1, 0, 0]));
    assert_eq!(each.read(&[]).unwrap().layer_kinds, [DeltaNet, DeltaNet, DeltaNet, FullAttention]);

    let short = qwen35().with("attention.recurrent_layers", ARRAY, array(BOOL, 4, [1, 1, 1, 0]));
    refused(short, "qwen35.attention.recurrent_layers", "an array of 4");
    for key in ["conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size"] {
        let key = format!("ssm.{key}");
        refused(qwen35().without(&key), &format!("qwen35.{key}"), "missing");
        refused(qwen35().number(&key, 0), &format!("qwen35.{key}"), "0");
    }
    refused(qwen35().number("ssm.inner_size", 190), "qwen35.ssm.inner_size", "190");
    refused(qwen35().number("nextn_predict_layers", 5), "qwen35.block_count", "0");
    refused(qwen35().tensor("blk.5.nextn.eh_proj.weight", &[64]), "tensors", "blk.5.nextn");
    refused(qwen35().tensor("blk.3.nextn.eh_proj.weight", &[64]), "tensors", "blk.3.nextn");
    refused(Made::new("qwen3").number("nextn_predict_layers", 1), "qwen3.nextn_predict_layers", "1");
}

#[test]
fn queries_of_ministral_grow_with_their_position() {
    let made = |beta: f32| {
        let made = Made::new("mistral3").number("rope.scaling.original_context_length", 16);
        made.with("attention.temperature_scale", F32, beta.to_le_bytes())
    };
    let growth = Some(QueryGrowth { beta: 0.1, original_context: 16 });
    assert_eq!(made(0.1).read(&[]).unwrap().query_growth, growth);
    let scaled = made(0.1).with("rope.scaling.type", STRING, text("yarn"));
    let scaled = scaled.with("rope.scaling.factor", F32, 4f32.to_le_bytes()).read(&[]).unwrap();
    assert_eq!(scaled.query_growth, growth);
    assert!(matches!(scaled.rope.scaling, RopeScaling::Divisors(_)));
    assert_eq!(made(0.0).read(&[]).unwrap().query_growth, None);
    refused(made(-1.0), "mistral3.attention.temperature_scale", "-1.0");
}
