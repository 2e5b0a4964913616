//! Sequences on devices that compute nothing: what is kept, what moves, what happens when a device is lost.

mod devices;
mod fake;

use super::*;
use crate::dims::LAYERS;
use crate::model::device::KvRows;
use fake::{Fake, ROW};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

fn eviction(policy: Policy, window: usize, prefix: usize) -> Eviction {
    Eviction { policy, window, prefix: Some(prefix), memory_threshold: 0 }
}

fn token(i: usize) -> u32 {
    ((i * 7919) % VOCAB) as u32
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(token).collect()
}

/// One device.
fn alone(capacity: usize, eviction: Eviction) -> Session {
    Session::new(Fake::new("one", 16).with_slots(capacity)).with_eviction(eviction).unwrap()
}

/// All rows: for each layer and head, tokens and positions.
fn rows(session: &mut Session) -> Vec<Vec<(u32, u32)>> {
    let mut heads = Vec::new();
    let mut rows = KvRows::default();
    for layer in 0..LAYERS {
        session.read_rows(layer, &mut rows).unwrap();
        let word = |row: &[u8], at: usize| u32::from_le_bytes(row[at..at + 4].try_into().unwrap());
        let all: Vec<_> = rows.k.chunks_exact(ROW).map(|r| (word(r, 0), word(r, 4))).collect();
        heads.extend(all.chunks(session.slots()).map(<[_]>::to_vec));
    }
    heads
}

/// Saves `from` and restores it as `into`.
fn become_of(into: &mut Session, from: &mut Session) {
    let sequence = from.sequence();
    let give = |layer: usize, rows: &mut KvRows, mass: &mut Vec<f32>| {
        let room = mass.len();
        from.read_rows(layer, rows)?;
        from.read_mass(layer, mass)?;
        assert_eq!(mass.len(), room, "the mass comes with the right length");
        Ok(())
    };
    into.restore(sequence, give).unwrap();
}

fn events(session: &mut Session) -> Arc<Mutex<Vec<SessionEvent>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&seen);
    session.set_observer(Box::new(move |e| kept.lock().unwrap().push(e.clone())));
    seen
}

/// A prompt and tokens one by one.
fn feed(session: &mut Session, prompt: usize, all: usize) {
    session.prefill(&tokens(prompt), &CancelToken::default()).unwrap();
    (prompt..all).for_each(|i| session.decode(token(i)).unwrap());
}

#[test]
fn sliding_keeps_the_prefix_and_the_latest_and_positions_count_on() {
    let mut session = alone(64, eviction(Policy::Sliding, 40, 4));
    let seen = events(&mut session);
    feed(&mut session, 100, 1000);
    assert_eq!(session.position(), 1000);
    let slots = session.slots();
    assert!((40..=45).contains(&slots), "{slots}");
    for head in rows(&mut session) {
        let expected: Vec<u32> = (0..4).chain(1000 - (slots as u32 - 4)..1000).collect();
        assert_eq!(head.iter().map(|r| r.1).collect::<Vec<_>>(), expected);
        assert!(head.iter().all(|&(t, pos)| t == token(pos as usize)));
    }
    let seen = seen.lock().unwrap();
    let whys: Vec<EvictionReason> = seen
        .iter()
        .map(|e| match e {
            SessionEvent::Evicted(e) => e.why,
            SessionEvent::Switched(_) => panic!("there is one device"),
        })
        .collect();
    // The prompt fills the cache twice and is cut at its end; then the window counts.
    assert_eq!(whys[..2], [EvictionReason::Full, EvictionReason::Full]);
    assert!(whys[2..].iter().all(|&w| w == EvictionReason::Window) && whys.len() > 100, "{whys:?}");
}

/// The positions of the slots of the first head, fewer than the `n` tokens that came.
fn left(session: &mut Session, n: usize) -> Vec<u32> {
    feed(session, n / 2, n);
    assert_eq!(session.position(), n);
    rows(session)[0].iter().map(|r| r.1).collect()
}

#[test]
fn first_tokens_stay_though_nobody_asked_for_it() {
    let unsaid = |policy, window| Eviction { prefix: None, ..eviction(policy, window, 0) };
    for policy in [Policy::Sliding, Policy::SnapKv] {
        assert_eq!(left(&mut alone(64, unsaid(policy, 40)), 300)[..4], [0, 1, 2, 3], "{policy:?}");
    }
    assert!(left(&mut alone(64, eviction(Policy::Sliding, 40, 0)), 300)[0] > 200);
    // In a cache of a few slots, half of them at most.
    for (capacity, window, first) in [(3, 2, 1), (3, 40, 1), (5, 40, 2), (64, 3, 1), (8, 7, 3), (64, 8, 4)] {
        let left = left(&mut alone(capacity, unsaid(Policy::Sliding, window)), 100);
        let still = left.iter().enumerate().take_while(|&(i, &p)| i == p as usize).count();
        assert_eq!((still, left.last()), (first, Some(&99)), "{capacity} slots, a window of {window}");
    }
}

/// The story model was trained for 2,048 tokens.
#[test]
fn first_tokens_that_nobody_asked_for_go_when_they_are_too_far_back() {
    for policy in [Policy::Sliding, Policy::SnapKv] {
        let first = |prefix| left(&mut alone(64, Eviction { prefix, ..eviction(policy, 40, 0) }), 2000)[0];
        assert!(first(None) > 200 && first(Some(4)) == 0, "{policy:?}");
    }
}

#[test]
fn the_system_message_stays_unless_a_number_is_given() {
    let first = |prefix, opening| {
        let mut session = alone(64, Eviction { prefix, ..eviction(Policy::H2o, 40, 0) });
        session.protect_prefix(opening);
        feed(&mut session, 40, 300);
        session.sequence().prefix
    };
    assert_eq!([first(None, 0), first(None, 9), first(None, 100)], [0, 9, 20], "half of the window at most");
    assert_eq!([first(Some(0), 9), first(Some(30), 9)], [0, 30]);
}

#[test]
fn what_stays_does_not_depend_on_the_size_of_chunks() {
    for policy in [Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let after = |chunk: usize| {
            let mut session = Session::new(Fake::new("one", chunk).with_slots(100))
                .with_eviction(eviction(policy, 60, 3))
                .unwrap();
            feed(&mut session, 500, 700);
            (rows(&mut session), session.logits().to_vec())
        };
        let one = after(1);
        assert!([7, 64, 100].into_iter().all(|chunk| after(chunk) == one), "{policy:?}");
    }
}

#[test]
fn heads_choose_for_themselves_and_keep_the_same_number() {
    let mut session = alone(100, eviction(Policy::H2o, 60, 3));
    feed(&mut session, 90, 400);
    let rows = rows(&mut session);
    assert!(rows.iter().any(|r| *r != rows[0]), "the heads' weights differ");
    for head in rows {
        assert_eq!(head[..3].iter().map(|r| r.1).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(head.last().map(|r| r.1), Some(399));
        assert!(head.is_sorted_by_key(|r| r.1));
    }
}

#[test]
fn a_prompt_that_fits_the_window_is_not_cut() {
    let mut session = alone(100, eviction(Policy::SnapKv, 60, 0));
    feed(&mut session, 60, 60);
    assert_eq!(session.slots(), 60);
    let mut longer = alone(100, eviction(Policy::SnapKv, 60, 0));
    feed(&mut longer, 99, 99);
    assert_eq!(longer.slots(), 60);
}

#[test]
fn low_memory_halves_the_cache_and_the_window_returns_when_there_is_enough() {
    static LOW: AtomicBool = AtomicBool::new(true);
    let wanted = Eviction { memory_threshold: 1, ..eviction(Policy::Sliding, 1000, 0) };
    let mut session = alone(2000, wanted);
    session.evictor.as_mut().unwrap().probe = |_| LOW.load(Ordering::Relaxed);
    let seen = events(&mut session);
    feed(&mut session, 600, 1200);
    assert!(session.slots() < 200, "{}", session.slots());
    assert!(
        matches!(&seen.lock().unwrap()[0], SessionEvent::Evicted(e) if e.why == EvictionReason::Memory && e.slots <= 320)
    );
    LOW.store(false, Ordering::Relaxed);
    (0..900).for_each(|i| session.decode(token(i)).unwrap());
    assert!(session.slots() > 800);
}

#[test]
fn a_sequence_rewinds_to_any_token_evicted_or_not() {
    for policy in [Policy::Sliding, Policy::H2o] {
        let wanted = eviction(policy, 60, 3);
        let mut session = alone(400, wanted);
        feed(&mut session, 50, 300);
        for len in [299, 290, 150, 100, 40, 3, 2] {
            let before = session.reusable_prefix(len);
            session.rewind(len).unwrap();
            assert!(session.sequence().is_consistent(), "{policy:?} {len}");
            assert_eq!(session.position(), len);
            if before != len {
                // Computed again: as if nothing had come after.
                let mut fresh = alone(400, wanted);
                feed(&mut fresh, 50.min(len), len);
                assert_eq!(rows(&mut session), rows(&mut fresh), "{policy:?} {len}");
            }
        }
        assert!(session.rewind(3).is_err());
    }
}

#[test]
fn a_text_begun_without_a_policy_keeps_its_latest_slots() {
    let mut first = alone(100, Eviction::NEVER);
    feed(&mut first, 100, 100);
    let mut session = alone(100, eviction(Policy::SnapKv, 60, 3));
    become_of(&mut session, &mut first);
    session.decode(token(100)).unwrap();
    for head in rows(&mut session) {
        let positions: Vec<u32> = head.iter().map(|r| r.1).collect();
        assert_eq!(positions, (0..3).chain(43..101).collect::<Vec<_>>());
    }
    (101..300).for_each(|i| session.decode(token(i)).unwrap());
    assert!(session.sequence().is_consistent());
    // One cut by sliding goes on under a policy that looks at attention.
    let mut slid = alone(100, eviction(Policy::Sliding, 60, 3));
    feed(&mut slid, 90, 300);
    let mut session = alone(100, eviction(Policy::H2o, 60, 3));
    become_of(&mut session, &mut slid);
    for i in 300..500 {
        session.decode(token(i)).unwrap();
        assert!(session.sequence().is_consistent(), "token {i}");
    }
}

#[test]
fn a_prompt_that_goes_on_is_not_computed_again() {
    let mut session = alone(400, eviction(Policy::Sliding, 60, 3));
    let longer = tokens(210);
    feed(&mut session, 200, 200);
    assert_eq!(session.reuse_prefix(&longer).unwrap(), 200);
    session.prefill(&longer[200..], &CancelToken::default()).unwrap();
    assert_eq!(session.position(), 210);
    // The same again needs the last token's logits only.
    assert_eq!(session.reuse_prefix(&longer).unwrap(), 209);
    // One that parts where slots were evicted goes on from the protected prefix.
    let mut other = longer.clone();
    other[100] ^= 1;
    assert_eq!(session.reuse_prefix(&other).unwrap(), 3);
    assert_eq!(session.position(), 3);
}

#[test]
fn a_saved_sequence_goes_on_as_if_never_left() {
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let wanted = eviction(policy, 60, 3);
        let mut session = alone(400, wanted);
        feed(&mut session, 100, 200);
        let sequence = session.sequence();
        let mut restored = alone(400, wanted);
        become_of(&mut restored, &mut session);
        for s in [&mut session, &mut restored] {
            (200..400).for_each(|i| {
                if !s.is_full() {
                    s.decode(token(i)).unwrap()
                }
            });
        }
        assert!(restored.logits() == session.logits(), "{policy:?}");
        assert_eq!(rows(&mut restored), rows(&mut session));
        let broken = Sequence { slots: sequence.slots + 1000, ..sequence };
        assert!(matches!(restored.restore(broken, |_, _, _| Ok(())), Err(Error::Model(_))));
    }
}

#[test]
fn a_cache_too_small_for_the_prefix_is_refused() {
    let new = |capacity, window, prefix| {
        Session::new(Fake::new("one", 16).with_slots(capacity))
            .with_eviction(eviction(Policy::Sliding, window, prefix))
            .is_ok()
    };
    assert!(new(64, 40, 38) && new(64, 64, 54));
    assert!(!new(64, 40, 39) && !new(64, 64, 60));
}

/// A text that repeats itself, or does not, chosen from the logits: what `decode` must leave as if nothing were
/// drafted.
fn next(session: &Session, i: usize) -> u32 {
    let bits = session.logits()[7] as u32;
    match (i / 60) % 3 {
        0 => token(i),
        1 => token(i % 5),
        _ => token((i + (bits % 8 / 7) as usize) % 6),
    }
}

#[test]
fn drafts_change_nothing_but_the_passes() {
    for (policy, capacity, window) in
        [(Policy::None, 700, 0), (Policy::Sliding, 64, 40), (Policy::Sliding, 30, 64)]
    {
        for most in [1, 3, 40] {
            let eviction = eviction(policy, window.max(1), 3);
            let mut plain = alone(capacity, eviction);
            let mut drafting = alone(capacity, eviction).with_drafts(most).unwrap();
            for session in [&mut plain, &mut drafting] {
                session.prefill(&tokens(20), &CancelToken::default()).unwrap();
            }
            for i in 0..600 {
                let chosen = next(&plain, i);
                assert_eq!(chosen, next(&drafting, i));
                plain.decode(chosen).unwrap();
                drafting.decode(chosen).unwrap();
                assert_eq!(plain.slots(), drafting.slots());
                assert!(plain.logits() == drafting.logits() && plain.tokens() == drafting.tokens());
                assert_eq!(plain.is_full(), drafting.is_full());
                if i % 50 == 17 {
                    assert_eq!(
                        rows(&mut plain),
                        rows(&mut drafting),
                        "{policy:?}, drafts of {most}, token {i}"
                    );
                    assert_eq!(plain.sequence(), drafting.sequence());
                }
            }
            let drafts = drafting.drafts().unwrap();
            assert!(drafts.accepted > 60 && drafts.accepted < drafts.drafted, "{drafts:?}");
            assert!(plain.drafts().is_none());
        }
    }
    assert!(alone(100, eviction(Policy::H2o, 40, 3)).with_drafts(2).is_err());
}

#[test]
fn any_other_call_discards_tokens_computed_ahead() {
    let clear = |s: &mut Session| s.clear();
    let rewind = |s: &mut Session| s.rewind(30).unwrap();
    let reuse = |s: &mut Session| assert_eq!(s.reuse_prefix(&tokens(4)).unwrap(), 3);
    let prefill = |s: &mut Session| s.prefill(&tokens(40)[30..], &CancelToken::default()).unwrap();
    let resize = |s: &mut Session| s.resize(150).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Session);
    let others: [(&str, Change<'_>); 5] = [
        ("clear", &clear),
        ("rewind", &rewind),
        ("reuse", &reuse),
        ("prefill", &prefill),
        ("resize", &resize),
    ];
    for (name, other) in others {
        let mut sessions = [alone(200, Eviction::NEVER), alone(200, Eviction::NEVER).with_drafts(8).unwrap()];
        for session in &mut sessions {
            session.prefill(&tokens(4), &CancelToken::default()).unwrap();
            (0..41).for_each(|i| session.decode(token(i % 5)).unwrap());
        }
        assert!(sessions[1].extent().len > sessions[1].slots(), "nothing is ahead");
        for session in &mut sessions {
            other(session);
            assert_eq!(session.extent().len, session.slots(), "{name}");
            session.decode(token(3)).unwrap();
        }
        let [plain, drafting] = &mut sessions;
        assert!(plain.sequence() == drafting.sequence() && plain.logits() == drafting.logits(), "{name}");
        assert_eq!(rows(plain), rows(drafting), "{name}");
        // A saved sequence has nothing ahead either.
        let mut again = alone(200, Eviction::NEVER);
        become_of(&mut again, drafting);
        assert_eq!(rows(&mut again), rows(plain), "{name}");
    }
}

#[test]
fn sequences_of_one_device_are_computed_together_as_each_alone() {
    let device = Fake::new("one", 16).with_slots(200).device();
    let session = || Session::new(DeviceCache::new(Arc::clone(&device), 200).unwrap());
    let (mut a, mut b, mut c) = (session(), session(), session());
    let (mut alone_a, mut alone_b) = (alone(200, Eviction::NEVER), alone(200, Eviction::NEVER));
    feed(&mut a, 20, 30);
    feed(&mut alone_a, 20, 31);
    feed(&mut b, 7, 9);
    feed(&mut alone_b, 7, 10);
    // A token of two, and a part of a prompt.
    let prompt = tokens(40);
    c.begin_prompt(&prompt).unwrap();
    assert_eq!(
        (a.stage_token(token(30)).unwrap(), b.stage_token(token(9)).unwrap()),
        (Stage::Staged, Stage::Staged)
    );
    assert_eq!(c.stage_prompt(&prompt[..14], 40).unwrap(), 14);
    forward(&mut [&mut a, &mut b, &mut c], None).unwrap();
    assert_eq!((c.position(), a.is_staged()), (14, false));
    for (session, alone) in [(&mut a, &mut alone_a), (&mut b, &mut alone_b)] {
        assert!(session.logits() == alone.logits());
        assert_eq!(rows(session), rows(alone));
    }
}

#[test]
fn a_cancelled_prompt_leaves_what_was_computed() {
    let mut session = alone(100, Eviction::NEVER);
    let cancel = CancelToken::default();
    session.prefill(&tokens(20), &cancel).unwrap();
    cancel.cancel();
    assert!(matches!(session.prefill(&tokens(40), &cancel), Err(Error::Interrupted)));
    assert_eq!((session.position(), session.slots()), (20, 20));
    // Only prompts are asked to end.
    session.decode(token(20)).unwrap();
}
