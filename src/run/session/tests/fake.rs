//! A device that computes nothing, but whose logits depend on every row of its cache.

use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS, VOCAB};
use crate::model::backend::{Backend, CancelToken, KvRows, Lent, Logits};
use crate::model::trace::Recorder;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a slot holds: the token, its position, and the attention that it received.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slot {
    pub token: u32,
    pub pos: u32,
    pub mass: f32,
}

/// Rows by layer and KV head.
pub type Layout = Vec<Vec<Vec<Slot>>>;

pub struct Fake {
    pub name: &'static str,
    pub layout: Layout,
    len: usize,
    capacity: usize,
    max_tokens: usize,
    observed: usize,
    cancel: Option<CancelToken>,
    /// Calls until the device is lost.
    lives: Arc<AtomicUsize>,
}

pub const ROW: usize = KvType::F32.row_bytes(HEAD_DIM);

impl Fake {
    pub fn new(name: &'static str, capacity: usize, max_tokens: usize) -> Self {
        let layout = vec![vec![Vec::new(); KV_HEADS]; LAYERS];
        Self {
            name,
            layout,
            len: 0,
            capacity,
            max_tokens,
            observed: 0,
            cancel: None,
            lives: Arc::new(AtomicUsize::new(usize::MAX)),
        }
    }

    /// A counter of calls after which the device is lost.
    pub fn mortal(mut self, lives: &Arc<AtomicUsize>) -> Self {
        self.lives = Arc::clone(lives);
        self
    }

    fn call(&self) -> Result<()> {
        let alive = self.lives.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        alive.map(|_| ()).map_err(|_| Error::Device(format!("{} is lost", self.name)))
    }
}

/// How much a token draws attention in a head.
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

impl Backend for Fake {
    fn name(&self) -> String {
        self.name.into()
    }

    fn forward(&mut self, tokens: &[u32], pos: usize, out: Logits<'_>) -> Result<()> {
        self.call()?;
        assert!(tokens.len() <= self.max_tokens && self.len + tokens.len() <= self.capacity);
        if self.cancel.as_ref().is_some_and(CancelToken::is_cancelled) {
            return Err(Error::Interrupted);
        }
        let fill = |hash: u64, logits: &mut [f32]| {
            logits.iter_mut().enumerate().for_each(|(i, x)| *x = ((hash >> (i % 40)) & 0xffff) as f32);
        };
        let mut out = out;
        let mut last = 0;
        for (i, &token) in tokens.iter().enumerate() {
            let observed = i.saturating_add(self.observed) >= tokens.len();
            for layer in &mut self.layout {
                for (h, head) in layer.iter_mut().enumerate() {
                    head.truncate(self.len);
                    head.push(Slot { token, pos: (pos + i) as u32, mass: 0.0 });
                    head.iter_mut().filter(|_| observed).for_each(|s| s.mass += weight(s.token ^ token, h));
                }
            }
            self.len += 1;
            last = hash(&self.layout, self.len);
            if let Logits::All(rows) = &mut out {
                fill(last, &mut rows[i * VOCAB..][..VOCAB]);
            }
        }
        if let Logits::Last(logits) = out {
            fill(last, logits);
        }
        Ok(())
    }

    fn heed(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn len(&self) -> usize {
        self.len
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn kv_types(&self) -> KvTypes {
        KvTypes::both(KvType::F32)
    }

    fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity);
        self.len = len;
        let free = Slot { token: u32::MAX, pos: 0, mass: 0.0 };
        self.layout.iter_mut().flatten().for_each(|head| head.resize(len.max(head.len()), free));
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        self.capacity = slots;
        Ok(())
    }

    fn keep(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        self.call()?;
        numeric::kv::check_kept(slots, self.len)?;
        let head = &mut self.layout[layer][kv_head];
        *head = slots.iter().map(|&s| head[s as usize]).collect();
        Ok(())
    }

    fn observe(&mut self, tokens: usize) -> Result<()> {
        self.call()?;
        self.observed = tokens;
        Ok(())
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        self.call()?;
        let slots = self.layout[layer].iter().flat_map(|head| &head[..self.len]);
        mass.iter_mut().zip(slots).for_each(|(m, s)| *m = s.mass);
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        self.call()?;
        assert_eq!(mass.len(), KV_HEADS * self.len);
        let len = self.len;
        let slots = self.layout[layer].iter_mut().flat_map(|head| &mut head[..len]);
        slots.zip(mass).for_each(|(s, m)| s.mass = *m);
        Ok(())
    }

    fn lend(&mut self) -> Result<Option<Lent>> {
        Ok(None)
    }

    fn adopt(&mut self, _: Lent) -> Result<()> {
        unreachable!("nobody lends")
    }

    fn read_kv(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        self.call()?;
        *rows = KvRows::zeroed(self.kv_types(), slots.len(), HEAD_DIM);
        let all = self.layout[layer].iter().flat_map(|head| &head[slots.clone()]);
        for (row, slot) in rows.k.chunks_exact_mut(ROW).zip(all) {
            row[..4].copy_from_slice(&slot.token.to_le_bytes());
            row[4..8].copy_from_slice(&slot.pos.to_le_bytes());
        }
        Ok(())
    }

    fn write_kv(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.call()?;
        let free = Slot { token: u32::MAX, pos: 0, mass: 0.0 };
        let mut from = rows.k.chunks_exact(ROW);
        for head in &mut self.layout[layer] {
            head.resize(slots.end.max(head.len()), free);
            for slot in &mut head[slots.clone()] {
                let row = from.next().expect("a row for each slot");
                let word = |at: usize| u32::from_le_bytes(row[at..at + 4].try_into().expect("four bytes"));
                *slot = Slot { token: word(0), pos: word(4), mass: 0.0 };
            }
        }
        Ok(())
    }

    fn record(&mut self, _: Option<Recorder>) -> Option<Recorder> {
        None
    }
}
