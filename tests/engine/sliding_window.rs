//! Layers that see a window keep the rows of the latest positions alone. Each test holds for any model, and says
//! something of those with such layers only.

use crate::eviction::reference::Reference;
use crate::support::paths;
use antigravity::dims::{SLIDING_LAYERS, VOCAB, WINDOW, attention_layers, is_sliding};
use antigravity::model::device::KvRows;
use antigravity::model::weights::WeightType;
use antigravity::plan::Plan;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::session::{CancelToken, Session, forward};
use antigravity::{Engine, EngineOptions};
use numeric::kv::{KvType, KvTypes};

/// Slots of the caches, and tokens of the texts: rows of m9's rings, 256 with small chunks, come round twice.
const SLOTS: usize = 640;
const ALL: usize = 600;
/// Tokens of a pass: of a ring as small as it gets, and of one with all rows.
const SMALL: usize = 3;

fn options(chunk: usize) -> EngineOptions {
    let eviction = Eviction { memory_threshold: 0, ..Eviction::NEVER };
    let options = EngineOptions::new(paths::model());
    EngineOptions { threads: 2, max_seq_len: SLOTS, prefill_chunk: chunk, eviction, ..options }
}

fn ids(n: usize) -> Vec<u32> {
    (1..=n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect()
}

fn go() -> CancelToken {
    CancelToken::default()
}

/// Bits of the logits after each of the last tokens of `ids`, one by one after a prompt.
fn decoded(session: &mut Session, ids: &[u32]) -> Vec<Vec<u32>> {
    let next = |session: &mut Session, &id: &u32| {
        session.decode(id).unwrap();
        session.logits().iter().map(|x| x.to_bits()).collect()
    };
    ids.iter().map(|id| next(session, id)).collect()
}

/// Saves `from` and restores it as `into`.
fn become_of(into: &mut Session, from: &mut Session) {
    let sequence = from.sequence();
    let give = |layer: usize, rows: &mut KvRows, mass: &mut Vec<f32>| {
        let (room, massed) = ((rows.k.len(), rows.v.len()), mass.len());
        from.read_rows(layer, rows)?;
        from.read_mass(layer, mass)?;
        assert_eq!(((rows.k.len(), rows.v.len()), mass.len()), (room, massed), "the right lengths");
        Ok(())
    };
    into.restore(sequence, give).unwrap();
}

#[test]
fn reused_rows_of_a_ring_change_no_bit() {
    let ids = ids(ALL);
    for kv in KvType::ALL {
        let with = |chunk| {
            let engine =
                Engine::load(EngineOptions { kv_types: KvTypes::same(kv), ..options(chunk) }).unwrap();
            let mut session = engine.session().unwrap();
            session.prefill(&ids[..ALL - 40], &go()).unwrap();
            (decoded(&mut session, &ids[ALL - 40..]), session.extent())
        };
        let ((small, ring), (whole, all)) = (with(SMALL), with(SLOTS));
        assert_eq!(small, whole, "{kv:?}");
        if SLIDING_LAYERS != 0 && WINDOW < 64 {
            assert!(
                2 * ring.ring < ALL && all.ring == SLOTS && ring.total_bytes() < all.total_bytes(),
                "{ring:?} {all:?}"
            );
        }
    }
}

#[test]
fn a_rewind_further_than_the_ring_computes_the_text_again() {
    let ids = ids(ALL);
    let engine = Engine::load(options(SMALL)).unwrap();
    let fresh = |n: usize| {
        let mut session = engine.session().unwrap();
        session.prefill(&ids[..n], &go()).unwrap();
        decoded(&mut session, &ids[n..n + 4])
    };
    for n in [ALL - 5, 300, 30, 1] {
        let mut session = engine.session().unwrap();
        session.prefill(&ids, &go()).unwrap();
        session.rewind(n).unwrap();
        assert_eq!((session.tokens(), session.slots()), (&ids[..n], n));
        assert_eq!(decoded(&mut session, &ids[n..n + 4]), fresh(n), "{n}");
    }
    // What another text shares with this one is kept where the rows are there still.
    for (n, near) in [(ALL - 4, true), (100, false)] {
        let mut session = engine.session().unwrap();
        session.prefill(&ids, &go()).unwrap();
        let held = session.reuse_prefix(&ids[..n]).unwrap();
        let kept = if near || SLIDING_LAYERS == 0 { n - 1 } else { 0 };
        assert_eq!((held, session.slots()), (kept, kept));
        session.sync_prompt(&ids[..n], &go()).unwrap();
        assert_eq!(decoded(&mut session, &ids[n..n + 2]), fresh(n)[..2], "{n}");
    }
}

#[test]
fn a_saved_sequence_goes_on_in_rings_of_any_size() {
    let ids = ids(ALL);
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let engines = [SMALL, 100].map(|chunk| {
            let mut o = options(chunk);
            if policy != Policy::None {
                (o.max_seq_len, o.eviction.policy, o.eviction.window) = (64, policy, 40);
            }
            Engine::load(o).unwrap()
        });
        for (from, to) in [(0, 1), (1, 0)] {
            let mut one = engines[from].session().unwrap();
            decoded(&mut one, &ids[..400]);
            let mut other = engines[to].session().unwrap();
            decoded(&mut other, &ids[200..300]);
            become_of(&mut other, &mut one);
            assert_eq!(decoded(&mut one, &ids[400..]), decoded(&mut other, &ids[400..]), "{policy:?} {from}");
        }
    }
}

#[test]
fn an_exported_cache_keeps_the_positions_of_each_layer() {
    let ids = ids(ALL);
    for (kv, policy) in [(KvType::F32, Policy::None), (KvType::F16, Policy::Sliding)] {
        let mut o = EngineOptions { kv_types: KvTypes::same(kv), ..options(SMALL) };
        if policy != Policy::None {
            (o.max_seq_len, o.eviction.policy, o.eviction.window) = (64, policy, 40);
        }
        let engine = Engine::load(o).unwrap();
        let mut one = engine.session().unwrap();
        decoded(&mut one, &ids[..ALL - 20]);
        let past = one.past_key_values(&engine).unwrap();
        for layer in attention_layers().filter(|&i| is_sliding(i)).map(|i| &past.layers[i]) {
            let positions = &layer.positions[..layer.slots()];
            assert!((WINDOW..=ALL).contains(&(positions.len() + 1)));
            assert_eq!(positions.last(), Some(&(ALL as u32 - 21)));
            assert!(positions.windows(2).all(|p| p[0] + 1 == p[1]), "{policy:?}: {positions:?}");
        }
        let mut other = engine.session().unwrap().with_past(&past, &engine).unwrap();
        assert!(other.past_key_values(&engine).unwrap() == past, "{policy:?}");
        let end = &ids[ALL - 20..];
        assert!(decoded(&mut one, end) == decoded(&mut other, end), "{policy:?}");
    }
}

#[test]
fn sequences_of_a_pass_have_rings_of_their_own() {
    let ids = ids(ALL);
    let engine = Engine::load(options(SMALL)).unwrap();
    let lengths = [ALL - 60, 250, 7];
    let mut together = engine.sessions_with(engine.options(), 3).unwrap();
    for (session, n) in together.iter_mut().zip(lengths) {
        session.prefill(&ids[..n], &go()).unwrap();
    }
    for step in 0..50 {
        for (session, n) in together.iter_mut().zip(lengths) {
            session.stage_token(ids[n + step]).unwrap();
        }
        forward(&mut together.iter_mut().collect::<Vec<_>>(), None).unwrap();
    }
    for (session, n) in together.iter().zip(lengths) {
        let mut alone = engine.session().unwrap();
        alone.prefill(&ids[..n + 50], &go()).unwrap();
        assert_eq!(alone.logits(), session.logits(), "{n}");
    }
}

#[test]
fn eviction_leaves_sliding_window_layers_alone() {
    let (slots, all) = (20, 120);
    let mut o = options(SMALL);
    (o.max_seq_len, o.weight_type, o.kv_types) = (slots, WeightType::F32, KvTypes::same(KvType::F32));
    o.eviction = Eviction { policy: Policy::Sliding, window: slots, prefix: Some(4), memory_threshold: 0 };
    let engine = Engine::load(o).unwrap();
    let ids = ids(all);
    let mut session = engine.session().unwrap();
    decoded(&mut session, &ids);
    // The first four, and the last ones that an eighth of the slots leaves; in sliding-window layers the window.
    let (mut held, mut global, mut local) = (Vec::new(), Vec::new(), Vec::new());
    for t in 0..all {
        if held.len() == slots {
            held.drain(4..4 + slots / 8);
        }
        held.push(t);
        global.push(held.clone());
        local.push(((t + 1).saturating_sub(WINDOW)..=t).collect::<Vec<_>>());
    }
    let model = Reference::load(&paths::model().join("model.safetensors"));
    let far = |visible: [&[Vec<usize>]; 2]| {
        let expected = model.logits_of(visible, &ids);
        let diff = |(e, &f): (&f64, &f32)| (e - f64::from(f)).powi(2);
        let diff: f64 = expected.iter().zip(session.logits()).map(diff).sum();
        (diff / expected.iter().map(|e| e * e).sum::<f64>()).sqrt()
    };
    assert!(far([&global, &local]) < 1e-4, "relative distance {:.1e}", far([&global, &local]));
    if SLIDING_LAYERS != 0 {
        let evicted = |seen: &[Vec<usize>]| -> Vec<Vec<usize>> {
            seen.iter().map(|s| s[s.len().saturating_sub(WINDOW)..].to_vec()).collect()
        };
        let everything: Vec<Vec<usize>> = (0..all).map(|t| (0..=t).collect()).collect();
        let others = [far([&everything, &local]), far([&global, &evicted(&global)])];
        assert!(others.iter().all(|&d| d > 1e-3), "{others:?}");
    }
}

#[test]
fn the_plan_counts_the_rows_that_there_are() {
    for policy in [Policy::None, Policy::Sliding] {
        for (slots, chunk) in [(64, 9), (SLOTS, SMALL), (SLOTS, 200)] {
            let mut o = options(chunk);
            (o.max_seq_len, o.eviction.policy, o.eviction.window) = (slots, policy, 50);
            let engine = Engine::load(o.clone()).unwrap();
            let bytes = engine.session().unwrap().extent().total_bytes() as u64;
            let items = Plan::new(&o).unwrap().plan_items();
            let planned: u64 =
                items.iter().filter(|i| i.purpose.starts_with("KV cache")).map(|i| i.bytes).sum();
            assert_eq!(planned, bytes, "{policy:?} {slots} {chunk}");
        }
    }
}
