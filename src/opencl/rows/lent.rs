//! Rows in the CPU's hands: all buffers mapped, until the memory is dropped.

use super::{LayerRows, Rows};
use crate::model::backend::{Lent, RowMemory};
use files::{Error, Result};
use opencl_runtime::buffer::{Buffer, MapFor, Mapped};
use opencl_runtime::failure::{self, Failure};
use std::sync::{Arc, OnceLock};

/// By which the rows are known when they come back, and where it is noted how unmapping them failed.
pub struct Ticket(Arc<OnceLock<Failure>>);

/// Keys and values of all layers, mapped.
struct MappedRows {
    /// By layer.
    layers: Vec<(Mapped<'static>, Mapped<'static>)>,
    failed: Arc<OnceLock<Failure>>,
}

impl RowMemory for MappedRows {
    fn layer(&self, layer: usize) -> (&[u8], &[u8]) {
        let (k, v) = &self.layers[layer];
        (k, v)
    }

    fn layer_mut(&mut self, layer: usize) -> (&mut [u8], &mut [u8]) {
        let (k, v) = &mut self.layers[layer];
        (k.bytes_mut(), v.bytes_mut())
    }
}

impl Drop for MappedRows {
    fn drop(&mut self) {
        for view in self.layers.drain(..).flat_map(|(k, v)| [k, v]) {
            if let Err(failure) = view.unmap() {
                // The first says most.
                let _ = self.failed.set(failure);
            }
        }
    }
}

/// Whatever it is, the sequence can go on elsewhere.
fn lost(failure: Failure) -> Error {
    Error::Device(failure.to_string())
}

impl Rows {
    /// Hands all rows to the CPU, with what is queued for them done. None are here until they come back.
    pub fn lend(&mut self) -> Result<Lent> {
        self.assert_here();
        let map = |b: &Buffer| b.clone().into_map(0..b.len(), MapFor::ReadingAndWriting);
        let both = |l: &LayerRows| Ok((map(&l.k)?, map(&l.v)?));
        let layers = self.layers.iter().map(both).collect::<failure::Result<_>>().map_err(lost)?;
        let failed = Arc::new(OnceLock::new());
        self.lent = Some(Ticket(Arc::clone(&failed)));
        let memory = Box::new(MappedRows { layers, failed });
        Ok(Lent { memory, capacity: self.capacity, len: std::mem::take(&mut self.len) })
    }

    /// Takes them back.
    pub fn take_back(&mut self, rows: Lent) -> Result<()> {
        let Lent { memory, capacity, len } = rows;
        let Ticket(failed) = self.lent.take().expect("rows come back to who lent them");
        assert!(capacity == self.capacity && len <= capacity, "other rows come back than were lent");
        drop(memory);
        let failed = Arc::into_inner(failed).expect("the rows that come back are those that were lent");
        match failed.into_inner() {
            Some(failure) => Err(lost(failure)),
            None => {
                self.len = len;
                Ok(())
            }
        }
    }

    /// Panics while the CPU has the rows.
    pub fn assert_here(&self) {
        assert!(self.lent.is_none(), "rows that are lent to the CPU are used");
    }
}
