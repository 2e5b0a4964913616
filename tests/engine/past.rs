//! `past_key_values`: a cache that goes out and in again is the same, of every type and after evictions.

use crate::support::paths;
use antigravity::dims::{HEAD_DIM, KV_HEADS, VOCAB, attention_layers};
use antigravity::model::device::KvRows;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::session::{CancelToken, Session};
use antigravity::{Engine, EngineOptions, PastKeyValues};
use numeric::kv::{KvType, KvTypes};

fn options(kind: KvType, policy: Policy) -> EngineOptions {
    EngineOptions {
        kv_types: KvTypes::same(kind),
        max_seq_len: 64,
        eviction: Eviction { policy, window: 32, prefix: Some(4), memory_threshold: 0 },
        threads: 2,
        ..EngineOptions::new(paths::model())
    }
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * i * 31 % 200) as u32 + 10).collect()
}

/// After a prompt and some tokens.
fn fed(engine: &Engine, n: usize) -> Session {
    let mut session = engine.session().unwrap();
    let tokens = tokens(n);
    session.prefill(&tokens[..20], &CancelToken::default()).unwrap();
    tokens[20..].iter().for_each(|&t| session.decode(t).unwrap());
    session
}

fn rows(session: &mut Session) -> Vec<KvRows> {
    attention_layers()
        .map(|layer| {
            let mut rows = KvRows::default();
            session.read_rows(layer, &mut rows).unwrap();
            rows
        })
        .collect()
}

/// Blocks of four bits whose scales and integers are all negative instead: the same numbers.
fn mirrored(row: &[u8]) -> Vec<u8> {
    let block = KvType::block_len(HEAD_DIM);
    let mirror = |block: &[u8]| {
        let minus = |nibble: u8| 16 - nibble;
        let bytes = block[2..].iter().map(|b| minus(b & 15) | minus(b >> 4) << 4);
        [block[0], block[1] ^ 0x80].into_iter().chain(bytes).collect::<Vec<u8>>()
    };
    row.chunks_exact(KvType::Q4.block_bytes(block)).flat_map(mirror).collect()
}

#[test]
fn every_type_is_unchanged_by_export_and_import() {
    for kind in KvType::ALL {
        let engine = Engine::load(options(kind, Policy::None)).unwrap();
        let mut session = fed(&engine, 50);
        let past = session.past_key_values(&engine).unwrap();
        let mut again = engine.session().unwrap().with_past(&past, &engine).unwrap();
        assert_eq!((again.tokens(), again.slots()), (session.tokens(), session.slots()));
        let (before, after) = (rows(&mut session), rows(&mut again));
        match kind {
            KvType::Q4 => {
                let bytes = KvType::Q4.block_bytes(KvType::block_len(HEAD_DIM));
                for (a, b) in before.iter().zip(&after).flat_map(|(a, b)| [(&a.k, &b.k), (&a.v, &b.v)]) {
                    for (a, b) in a.chunks_exact(bytes).zip(b.chunks_exact(bytes)) {
                        // 0 in a nibble is -8, which has no mirror.
                        let has_mirror = a[2..].iter().all(|q| q & 15 != 0 && q >> 4 != 0);
                        assert!(a == b || has_mirror && mirrored(a) == b, "{a:?} became {b:?}");
                    }
                }
            }
            _ => assert!(before == after, "{}", kind.name()),
        }
        // What follows is the same bits, also in a session that knows nothing of the first.
        for token in tokens(10) {
            session.decode(token).unwrap();
            again.decode(token).unwrap();
            assert!(session.logits() == again.logits(), "{}", kind.name());
        }
        let (a, b) = (session.past_key_values(&engine).unwrap(), again.past_key_values(&engine).unwrap());
        assert!(a == b, "{}: numbers differ", kind.name());
    }
}

#[test]
fn keys_of_four_bits_are_those_that_attention_sees() {
    let of = |kind| {
        let engine = Engine::load(options(kind, Policy::None)).unwrap();
        fed(&engine, 20).past_key_values(&engine).unwrap()
    };
    let (exact, coarse) = (of(KvType::F32), of(KvType::Q4));
    // The first layer's rows depend on nothing that the cache's type changes.
    let (exact, coarse) = (&exact.layers[0], &coarse.layers[0]);
    for (exact, coarse) in [(&exact.keys, &coarse.keys), (&exact.values, &coarse.values)] {
        let squares = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x * x)).sum::<f64>();
        let miss = squares(&mut exact.iter().zip(coarse).map(|(a, b)| a - b));
        assert!(miss < 0.02 * squares(&mut exact.iter().copied()), "{miss}");
    }
}

#[test]
fn evicted_slots_keep_their_positions_and_the_text_goes_on_alike() {
    for policy in [Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let engine = Engine::load(options(KvType::F32, policy)).unwrap();
        let mut session = fed(&engine, 150);
        assert!(session.has_evicted());
        let past = session.past_key_values(&engine).unwrap();
        assert!(past.slots() < past.tokens.len());
        for head in past.layers.iter().flat_map(|layer| layer.positions.chunks_exact(past.slots())) {
            assert!(head.is_sorted() && head.last() == Some(&149) && head[..4] == [0, 1, 2, 3], "{head:?}");
        }
        let mut again = engine.session().unwrap().with_past(&past, &engine).unwrap();
        assert!(again.past_key_values(&engine).unwrap() == past);
        assert!(rows(&mut session) == rows(&mut again));
        session.decode(11).unwrap();
        again.decode(11).unwrap();
        assert!(session.logits() == again.logits(), "{}", policy.name());
        assert!(session.past_key_values(&engine).unwrap() == again.past_key_values(&engine).unwrap());
    }
}

#[test]
fn what_cannot_be_a_cache_of_the_model_is_refused_in_a_line() {
    let engine = Engine::load(options(KvType::F32, Policy::None)).unwrap();
    let good = fed(&engine, 21).past_key_values(&engine).unwrap();
    let refused = |word: &str, change: &dyn Fn(&mut PastKeyValues)| {
        let mut bad = good.clone();
        change(&mut bad);
        let error = engine.session().unwrap().with_past(&bad, &engine).err().expect(word).to_string();
        assert!(error.contains(word) && !error.contains('\n'), "{error}");
    };
    refused("layers", &|past| past.layers.truncate(1));
    refused("layer 1: ", &|past| past.layers[1].keys.truncate(7));
    refused("[kv_head][slot][head_dim]", &|past| past.layers[0].values.push(0.0));
    refused("finite", &|past| past.layers[0].values[3] = f32::NAN);
    refused("ascend", &|past| past.layers[0].positions.swap(0, 1));
    refused("below the 21 tokens", &|past| past.layers[0].positions[20] = 21);
    refused("token id", &|past| past.tokens[0] = VOCAB as u32);
    refused("slots", &|past| past.tokens.truncate(20));
    refused("max_seq_len", &|past| {
        past.tokens = tokens(100);
        for layer in &mut past.layers {
            layer.positions = (0..100).collect::<Vec<u32>>().repeat(KV_HEADS);
            layer.keys = vec![0.5; KV_HEADS * 100 * HEAD_DIM];
            layer.values = layer.keys.clone();
        }
    });
    // Heads that differ need a policy that tracks their positions.
    refused("Eviction::policy", &|past| {
        past.tokens.push(5);
        past.layers[0].positions[20] = 21;
    });
}
