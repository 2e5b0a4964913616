//! Moves of a sequence from device to device.

use super::schedule::Move;
use super::{Event, Session};
use crate::model::device::locked;
use files::{Error, Result};

impl Session {
    /// Moves the sequence to the other device of a hybrid session.
    ///
    /// # Errors
    ///
    /// None from the devices: where the move fails, the sequence goes on on the CPU.
    pub fn switch(&mut self, why: &str) -> Result<()> {
        self.discard_drafts();
        match self.devices.switch(self.tokens.len(), why.into()) {
            Ok(None) => Ok(()),
            Ok(Some(switch)) => {
                let row = locked(&self.devices.device()).row(&self.logits);
                if let Some(mut row) = row {
                    row.copy_from_slice(&self.logits);
                    self.logits = row;
                }
                self.tell(&format!("switch to {}: {why}", switch.to), Event::Switched(switch));
                Ok(())
            }
            Err(e @ (Error::Device(_) | Error::Memory(_))) => self.flee(e),
            Err(e) => Err(e),
        }
    }

    /// Goes where the schedule says, if that is not here.
    pub(super) fn go(&mut self, to: Move) -> Result<()> {
        match to.to == self.devices.side() {
            true => Ok(()),
            false => self.switch(&to.why),
        }
    }

    /// Takes the device that is awaited, if it is ready.
    pub(super) fn look_for_device(&mut self) -> Result<()> {
        let Some(arrived) = self.devices.arrived() else { return Ok(()) };
        match arrived.and_then(|runs_all| self.make_evictable().map(|()| runs_all)) {
            Ok(false) => {}
            Ok(true) => {
                self.switch("its kernels are compiled")?;
                self.devices.stay();
            }
            Err(why) => self.devices.do_without(&why),
        }
        Ok(())
    }

    /// Makes room in all caches for what evictions need, if there are any.
    pub(super) fn make_evictable(&mut self) -> Result<()> {
        if self.evictor.is_some() {
            self.devices.outlast()?;
        }
        if self.observes() {
            self.devices.make_mass()?;
        }
        Ok(())
    }
}
