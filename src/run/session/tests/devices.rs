//! Sequences on two devices: what moves, and what happens when one is lost or gets ready late.

use super::*;
use crate::run::placement::{Devices, PendingDevice, Schedule};

/// Two, the second of which is lost after `lives` calls. Nothing moves by itself.
fn both(capacity: usize, eviction: Eviction, lives: &Arc<AtomicUsize>) -> Session {
    let gpu = Fake::new("gpu", 16).mortal(lives).with_slots(capacity);
    let session = hybrid(Fake::new("cpu", 16).with_slots(capacity), gpu, vec![usize::MAX]);
    session.with_eviction(eviction).unwrap()
}

/// Both, with decoding on the second one from these positions on.
fn hybrid(cpu: DeviceCache, gpu: DeviceCache, to_gpu: Vec<usize>) -> Session {
    let schedule = Schedule::Fixed(FixedSchedule { prefill: Side::Cpu, to_gpu, to_cpu: vec![] });
    Session::new(cpu).with_placement(Placement::new(Notice::default()).with_second(gpu, schedule))
}

/// A placement that goes on on the CPU when its device is lost.
fn spare(cpu: impl FnOnce() -> Result<DeviceCache> + Send + 'static) -> Placement {
    Placement::new(Notice::default()).with_cpu(Box::new(cpu))
}

fn immortal() -> Arc<AtomicUsize> {
    Arc::new(AtomicUsize::new(usize::MAX))
}

#[test]
fn switching_devices_copies_only_missing_rows_and_changes_no_logits() {
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let wanted = eviction(policy, 60, 3);
        let mut one = alone(400, wanted);
        feed(&mut one, 50, 300);
        for every in [1, 7, 64] {
            let mut two = both(400, wanted, &immortal());
            let seen = events(&mut two);
            two.prefill(&tokens(50), &CancelToken::default()).unwrap();
            for i in 50..300 {
                if i % every == 0 {
                    two.switch_device("test").unwrap();
                }
                two.decode(token(i)).unwrap();
            }
            assert!(two.logits() == one.logits(), "{policy:?}, every {every}");
            assert_eq!(rows(&mut two), rows(&mut one));
            let copied = seen
                .lock()
                .unwrap()
                .iter()
                .fold(0, |n, e| n + if let SessionEvent::Switched(s) = e { s.slots } else { 0 });
            if policy == Policy::None {
                // Each slot goes over once, except those since the last move.
                assert!(copied <= 300 && copied + 2 * every >= 300, "{copied} slots in moves every {every}");
            }
        }
    }
}

#[test]
fn logits_arrive_in_memory_of_the_device_that_computes_them() {
    let (lent, lives) = (fake::Addresses::default(), immortal());
    let is_lent = |session: &Session| lent.lock().unwrap().contains(&session.logits().as_ptr().addr());
    let gpu = || Fake::new("gpu", 16).lending(&lent).mortal(&lives).with_slots(100);
    let mut plain = alone(100, Eviction::NEVER);
    feed(&mut plain, 40, 50);

    let mut session = Session::new(gpu()).with_placement(spare(|| Ok(Fake::new("cpu", 16).with_slots(100))));
    feed(&mut session, 40, 50);
    assert!(is_lent(&session) && session.logits() == plain.logits());

    let mut two = hybrid(Fake::new("cpu", 16).with_slots(100), gpu(), vec![usize::MAX]);
    feed(&mut two, 40, 50);
    assert!(!is_lent(&two));
    for _ in 0..3 {
        two.switch_device("test").unwrap();
        assert!(is_lent(&two) && two.logits() == plain.logits());
    }
    assert_eq!(lent.lock().unwrap().len(), 2, "one for each sequence");

    // What a lost device may still write to is not read.
    plain.decode(token(50)).unwrap();
    lives.store(0, Ordering::Relaxed);
    session.decode(token(50)).unwrap();
    assert!(!is_lent(&session) && session.logits() == plain.logits());
}

#[test]
fn a_sequence_switches_devices_at_the_positions_of_the_schedule() {
    let schedule = Schedule::Fixed(FixedSchedule { prefill: Side::Gpu, to_gpu: vec![60], to_cpu: vec![80] });
    let placement =
        Placement::new(Notice::default()).with_second(Fake::new("gpu", 16).with_slots(200), schedule);
    let mut session = Session::new(Fake::new("cpu", 16).with_slots(200)).with_placement(placement);
    let seen = events(&mut session);
    feed(&mut session, 40, 100);
    let moves: Vec<(usize, String)> = seen
        .lock()
        .unwrap()
        .iter()
        .map(|e| match e {
            SessionEvent::Switched(s) => (s.position, s.to.clone()),
            SessionEvent::Evicted(_) => panic!("nothing is evicted"),
        })
        .collect();
    let expected = [(0, "gpu"), (40, "cpu"), (60, "gpu"), (80, "cpu")];
    assert_eq!(moves, expected.map(|(p, to)| (p, to.to_string())));
}

#[test]
fn a_device_lost_anywhere_leaves_the_sequence_on_the_cpu() {
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let wanted = eviction(policy, 60, 3);
        let mut one = alone(400, wanted);
        feed(&mut one, 50, 200);
        let mut lost = 0;
        // Making the mass takes two calls, and nobody has left yet.
        for lives in 2..300 {
            let mut two = both(400, wanted, &Arc::new(AtomicUsize::new(lives)));
            two.prefill(&tokens(50), &CancelToken::default()).unwrap();
            for i in 50..200 {
                if i % 20 == 0 {
                    two.switch_device("test").unwrap();
                }
                two.decode(token(i)).unwrap();
            }
            assert!(two.logits() == one.logits(), "{policy:?}, lost after {lives} calls");
            assert_eq!(rows(&mut two), rows(&mut one));
            if !two.is_hybrid() {
                assert_eq!(two.device_name(), "cpu");
                lost += 1;
            }
        }
        assert!(lost > 30, "{policy:?}: lost {lost} times");
    }
}

#[test]
fn a_prompt_whose_device_is_lost_still_stops_when_asked() {
    let cancel = CancelToken::default();
    let asked = cancel.clone();
    let lost = Fake::new("gpu", 16).mortal(&Arc::new(AtomicUsize::new(1)));
    let cpu = move || {
        asked.cancel();
        Ok(Fake::new("cpu", 16).with_slots(100))
    };
    let mut session = Session::new(lost.with_slots(100)).with_placement(spare(cpu));
    assert!(matches!(session.prefill(&tokens(40), &cancel), Err(Error::Interrupted)));
    assert_eq!((session.position(), session.slots(), session.device_name().as_str()), (0, 0, "cpu"));
}

#[test]
fn computing_again_what_a_lost_device_had_stops_when_asked_and_loses_no_token() {
    let mut plain = alone(100, Eviction::NEVER);
    feed(&mut plain, 40, 61);
    // Both caches of a hybrid session have the first 20 tokens; without one that stands by, all is computed again.
    for is_hybrid in [false, true] {
        let cancel = CancelToken::default();
        let (lives, asked) = (Arc::new(AtomicUsize::new(usize::MAX)), cancel.clone());
        let gpu = Fake::new("gpu", 16).mortal(&lives);
        let mut session = if is_hybrid {
            let cpu = Fake::new("cpu", 16).asking(&asked, 4).with_slots(100);
            hybrid(cpu, gpu.with_slots(100), vec![20])
        } else {
            let cpu = move || Ok(Fake::new("cpu", 16).asking(&asked, 2).with_slots(100));
            Session::new(gpu.with_slots(100)).with_placement(spare(cpu))
        };
        session.prefill(&tokens(20), &CancelToken::default()).unwrap();
        (20..60).for_each(|i| session.decode(token(i)).unwrap());
        lives.store(0, Ordering::Relaxed);
        assert_eq!(session.step(token(60), Some(&cancel)), Err(Error::Interrupted));
        // Asked for in the second pass that computes them again, which the third one heeds.
        let left = session.position();
        assert!(left < 60 && session.tokens() == tokens(left), "{left}");
        session.sync_prompt(&tokens(61), &CancelToken::default()).unwrap();
        assert!(session.logits() == plain.logits());
        assert_eq!(rows(&mut session), rows(&mut plain));
    }
}

/// A device that is ready when it has been asked for `after` times.
fn ready(after: usize, device: Result<(SharedDevice, Devices)>) -> PendingDevice {
    let (mut device, mut asked) = (Some(device), 0);
    Box::new(move || {
        asked += 1;
        (asked > after).then(|| device.take().expect("asked once it was given"))
    })
}

#[test]
fn a_device_that_gets_ready_computes_what_is_left() {
    // Before the prompt, within it, before a token.
    for (after, position) in [(0, 0), (2, 16), (4, 40), (9, 45)] {
        let mut plain = alone(100, Eviction::NEVER);
        feed(&mut plain, 40, 60);
        let lives = immortal();
        let gpu = Fake::new("gpu", 16).mortal(&lives).with_slots(100).device();
        let placement = spare(|| Ok(Fake::new("cpu", 16).with_slots(100)));
        let mut session = Session::new(Fake::new("cpu", 16).with_slots(100))
            .with_placement(placement.with_pending(ready(after, Ok((gpu, Devices::Gpu)))));
        let seen = events(&mut session);
        feed(&mut session, 40, 60);
        let moved: Vec<_> = seen
            .lock()
            .unwrap()
            .iter()
            .map(|e| match e {
                SessionEvent::Switched(s) => (s.position, s.slots, s.to.clone()),
                SessionEvent::Evicted(_) => panic!("nothing is evicted"),
            })
            .collect();
        assert_eq!(moved, [(position, position, "gpu".into())], "asked {after} times");
        assert!(session.logits() == plain.logits() && !session.is_hybrid());
        assert_eq!(rows(&mut session), rows(&mut plain));
        // Then it is as any other that may be lost.
        lives.store(0, Ordering::Relaxed);
        session.decode(token(60)).unwrap();
        assert_eq!(session.device_name(), "cpu");
        plain.decode(token(60)).unwrap();
        assert_eq!(rows(&mut session), rows(&mut plain));
    }
}

#[test]
fn a_device_that_gets_ready_takes_its_turns_in_a_hybrid_session() {
    let moves = |session: &mut Session| {
        let seen = events(session);
        feed(session, 40, 200);
        let seen = seen.lock().unwrap();
        let moved = |e: &SessionEvent| {
            if let SessionEvent::Switched(s) = e { Some((s.position, s.to.clone())) } else { None }
        };
        seen.iter().filter_map(moved).collect::<Vec<_>>()
    };
    for policy in [Policy::None, Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let eviction = if policy == Policy::None { Eviction::NEVER } else { eviction(policy, 40, 4) };
        let mut plain = alone(256, eviction);
        feed(&mut plain, 40, 200);
        let schedule =
            Schedule::Fixed(FixedSchedule { prefill: Side::Cpu, to_gpu: vec![50, 150], to_cpu: vec![100] });
        let gpu = Fake::new("gpu", 16).with_slots(256).device();
        let pending = ready(30, Ok((gpu, Devices::Both(schedule))));
        let mut session = Session::new(Fake::new("cpu", 16).with_slots(256))
            .with_placement(Placement::new(Notice::default()).with_pending(pending))
            .with_eviction(eviction)
            .unwrap();
        // Ready after the first turn has begun.
        assert_eq!(
            moves(&mut session),
            [(66, "gpu".into()), (100, "cpu".into()), (150, "gpu".into())],
            "{policy:?}"
        );
        assert!(session.logits() == plain.logits() && session.is_hybrid(), "{policy:?}");
        assert_eq!(rows(&mut session), rows(&mut plain), "{policy:?}");
    }
}

#[test]
fn a_device_that_never_gets_ready_leaves_a_sequence_where_it_is() {
    let mut plain = alone(100, Eviction::NEVER);
    feed(&mut plain, 40, 60);
    let mortal = Fake::new("gpu", 16).mortal(&Arc::new(AtomicUsize::new(0))).with_slots(100).device();
    for (made, expected) in [
        (Err(Error::Device("no compiler".into())), 1),
        (Err(Error::Memory("full".into())), 1),
        (Ok((Arc::clone(&mortal), Devices::Gpu)), 1),
        (Ok((mortal, Devices::Cpu)), 0),
    ] {
        let said = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&said);
        let notice = Notice::new(move |line| lines.lock().unwrap().push(line.to_string()));
        let placement = Placement::new(notice).with_cpu(Box::new(|| panic!("nothing is lost")));
        let mut session = Session::new(Fake::new("cpu", 16).with_slots(100))
            .with_placement(placement.with_pending(ready(5, made)));
        feed(&mut session, 40, 60);
        assert_eq!(session.device_name(), "cpu");
        assert!(session.logits() == plain.logits());
        assert_eq!(rows(&mut session), rows(&mut plain));
        let said = said.lock().unwrap();
        assert_eq!(said.len(), expected, "{said:?}");
        assert!(said.iter().all(|line| line.ends_with("; continuing on the CPU")), "{said:?}");
    }
}

#[test]
fn a_device_lost_by_several_sequences_leaves_all_on_one_cpu() {
    let lost = Fake::new("gpu", 16).mortal(&Arc::new(AtomicUsize::new(3))).with_slots(100).device();
    let cpu = Fake::new("cpu", 16).with_slots(100).device();
    let mut sessions = [0; 2].map(|_| {
        let cpu = Arc::clone(&cpu);
        let session = Session::new(DeviceCache::new(Arc::clone(&lost), 100).unwrap());
        session.with_placement(spare(move || DeviceCache::new(cpu, 100)))
    });
    let mut plain = alone(100, Eviction::NEVER);
    feed(&mut plain, 5, 8);
    sessions.iter_mut().for_each(|s| feed(s, 5, 5));
    for i in 5..8 {
        sessions.iter_mut().for_each(|s| assert_eq!(s.stage_token(token(i)).unwrap(), Stage::Staged));
        forward(&mut sessions.iter_mut().collect::<Vec<_>>(), None).unwrap();
    }
    for session in &mut sessions {
        assert!(session.logits() == plain.logits() && session.device_name() == "cpu");
        assert_eq!(rows(session), rows(&mut plain));
    }
}
