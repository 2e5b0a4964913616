//! A device that computes nothing, but whose logits depend on every row of the cache.

use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS, VOCAB};
use crate::model::device::{
    CancelToken, Device, Extent, HostRows, KvCache, KvRows, Logits, LogitsBuffer, Run,
};
use crate::model::trace::Trace;
use crate::run::placement::DeviceCache;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Content of a slot: the token, its position, and the attention that it received.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    pub token: u32,
    pub pos: u32,
    pub mass: f32,
}

const FREE: Slot = Slot { token: u32::MAX, pos: 0, mass: 0.0 };

/// Rows by layer and KV head.
pub type Layout = Vec<Vec<Vec<Slot>>>;

/// Calls of a device and of its caches until it is lost.
#[derive(Clone)]
struct Lives(&'static str, Arc<AtomicUsize>);

impl Lives {
    fn call(&self) -> Result<()> {
        let alive = self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        alive.map(|_| ()).map_err(|_| Error::Device(format!("{} is lost", self.0)))
    }
}

pub struct Fake {
    max_tokens: usize,
    lives: Lives,
    /// Asks to stop in the pass of this number.
    asks: Option<(CancelToken, usize)>,
    passes: usize,
    /// Addresses of the memory for logits that it has lent; `None` if it lends none.
    lent: Option<Addresses>,
}

/// Addresses of memory.
pub type Addresses = Arc<Mutex<Vec<usize>>>;

struct FakeCache {
    layout: Layout,
    len: usize,
    slots: usize,
    lives: Lives,
}

pub const ROW: usize = KvType::F32.row_bytes(HEAD_DIM);

impl Fake {
    pub fn new(name: &'static str, max_tokens: usize) -> Self {
        let lives = Lives(name, Arc::new(AtomicUsize::new(usize::MAX)));
        Self { max_tokens, lives, asks: None, passes: 0, lent: None }
    }

    /// A counter of calls after which the device is lost.
    pub fn mortal(mut self, lives: &Arc<AtomicUsize>) -> Self {
        self.lives.1 = Arc::clone(lives);
        self
    }

    /// Somebody cancels in its pass of this number, counted from 1.
    pub fn asking(mut self, cancel: &CancelToken, pass: usize) -> Self {
        self.asks = Some((cancel.clone(), pass));
        self
    }

    /// It lends memory for logits, and notes where.
    pub fn lending(mut self, lent: &Addresses) -> Self {
        self.lent = Some(Arc::clone(lent));
        self
    }

    /// The device with a cache.
    pub fn with_slots(self, slots: usize) -> DeviceCache {
        DeviceCache::new(Arc::new(Mutex::new(self)), slots).expect("a fake has room")
    }
}

/// Attention that a token draws in a head.
fn weight(token: u32, head: usize) -> f32 {
    ((token as usize * 37 + head * 11) % 101) as f32
}

/// A number that depends on all rows.
fn hash(layout: &Layout, len: usize) -> u64 {
    let slots = layout.iter().flatten().flat_map(|head| head[..len].iter().enumerate());
    slots.fold(7, |h: u64, (i, s)| {
        (h ^ (u64::from(s.token) << 32 | u64::from(s.pos)) ^ i as u64)
            .wrapping_mul(0x100_0000_01b3)
            .rotate_left(9)
    })
}

impl Device for Fake {
    fn name(&self) -> String {
        self.lives.0.into()
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn KvCache>> {
        let layout = vec![vec![Vec::new(); KV_HEADS]; LAYERS];
        Ok(Box::new(FakeCache { layout, len: 0, slots, lives: self.lives.clone() }))
    }

    fn logits_buffer(&mut self, now: &[f32]) -> Option<LogitsBuffer> {
        let mut lent = self.lent.as_ref()?.lock().expect("nobody panics");
        if lent.contains(&now.as_ptr().addr()) {
            return None;
        }
        let row = vec![0.0; VOCAB];
        lent.push(row.as_ptr().addr());
        Some(Box::new(row))
    }

    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        self.lives.call()?;
        assert!(runs.iter().map(|run| run.tokens.len()).sum::<usize>() <= self.max_tokens);
        if cancel.is_some_and(CancelToken::is_cancelled) {
            return Err(Error::Interrupted);
        }
        self.passes += 1;
        if let Some((cancel, _)) = self.asks.as_ref().filter(|(_, pass)| *pass == self.passes) {
            cancel.cancel();
        }
        for Run { cache, tokens, pos, logits, observed_tokens: observe, .. } in runs {
            let cache =
                (&mut **cache as &mut dyn Any).downcast_mut::<FakeCache>().expect("a cache of a fake");
            cache.append(tokens, *pos, (logits, *observe));
        }
        Ok(())
    }

    fn set_trace(&mut self, _: Option<Trace>) -> Option<Trace> {
        None
    }
}

impl FakeCache {
    fn append(&mut self, tokens: &[u32], pos: usize, (out, observe): (&mut Logits<'_>, usize)) {
        assert!(self.len + tokens.len() <= self.slots);
        let fill = |hash: u64, logits: &mut [f32]| {
            logits.iter_mut().enumerate().for_each(|(i, x)| *x = ((hash >> (i % 40)) & 0xffff) as f32);
        };
        let mut last = 0;
        for (i, &token) in tokens.iter().enumerate() {
            let observed = i.saturating_add(observe) >= tokens.len();
            for layer in &mut self.layout {
                for (h, head) in layer.iter_mut().enumerate() {
                    head.truncate(self.len);
                    head.push(Slot { token, pos: (pos + i) as u32, mass: 0.0 });
                    head.iter_mut().filter(|_| observed).for_each(|s| s.mass += weight(s.token ^ token, h));
                }
            }
            self.len += 1;
            last = hash(&self.layout, self.len);
            if let Logits::All(rows) = out {
                fill(last, &mut rows[i * VOCAB..][..VOCAB]);
            }
        }
        if let Logits::Last(logits) = out {
            fill(last, logits);
        }
    }
}

impl KvCache for FakeCache {
    fn extent(&self) -> Extent {
        Extent { types: KvTypes::same(KvType::F32), slots: self.slots, ring: 0, len: self.len }
    }

    fn read_state(&mut self, _state: &mut [f32]) -> Result<()> {
        Ok(())
    }

    fn write_state(&mut self, _state: &[f32]) -> Result<()> {
        Ok(())
    }

    fn restore_first_state(&mut self) -> Result<()> {
        Ok(())
    }

    fn set_len(&mut self, len: usize) {
        assert!(len <= self.slots);
        let before = self.len;
        self.len = len;
        for head in self.layout.iter_mut().flatten() {
            head.resize(len.max(head.len()), FREE);
            head[before.min(len)..len].iter_mut().for_each(|s| s.mass = 0.0);
        }
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        self.slots = slots;
        Ok(())
    }

    fn reserve_window_rows(&mut self) -> Result<()> {
        Ok(())
    }

    fn retain_slots(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        self.lives.call()?;
        numeric::kv::check_kept_slots(slots, self.len)?;
        let head = &mut self.layout[layer][kv_head];
        *head = slots.iter().map(|&s| head[s as usize]).collect();
        Ok(())
    }

    fn read_rows(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        self.lives.call()?;
        *rows = KvRows::zeroed(self.extent().types, slots.len(), HEAD_DIM);
        let all = self.layout[layer].iter().flat_map(|head| &head[slots.clone()]);
        for (row, slot) in rows.k.chunks_exact_mut(ROW).zip(all) {
            row[..4].copy_from_slice(&slot.token.to_le_bytes());
            row[4..8].copy_from_slice(&slot.pos.to_le_bytes());
        }
        Ok(())
    }

    fn write_rows(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.lives.call()?;
        let mut from = rows.k.chunks_exact(ROW);
        for head in &mut self.layout[layer] {
            head.resize(slots.end.max(head.len()), FREE);
            for slot in &mut head[slots.clone()] {
                let row = from.next().expect("a row for each slot");
                let word = |at: usize| u32::from_le_bytes(row[at..at + 4].try_into().expect("four bytes"));
                *slot = Slot { token: word(0), pos: word(4), mass: 0.0 };
            }
        }
        Ok(())
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        self.lives.call()?;
        let slots = self.layout[layer].iter().flat_map(|head| &head[..self.len]);
        mass.iter_mut().zip(slots).for_each(|(m, s)| *m = s.mass);
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        self.lives.call()?;
        assert_eq!(mass.len(), KV_HEADS * self.len);
        let len = self.len;
        let slots = self.layout[layer].iter_mut().flat_map(|head| &mut head[..len]);
        slots.zip(mass).for_each(|(s, m)| s.mass = *m);
        Ok(())
    }

    fn host_rows(&mut self) -> Result<&mut dyn HostRows> {
        unreachable!("the rows of a fake are its own")
    }
}
