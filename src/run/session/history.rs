//! Going back to earlier tokens, and computing tokens again where their slots or their device are lost.

use super::devices::Refuge;
use super::evict::Evictor;
use super::{Cut, Session};
use crate::model::device::Logits;
use files::{Error, Result};

impl Session {
    /// Leaves a lost device for the CPU. Rows that the CPU's cache lacks are computed again, to the same bits.
    ///
    /// # Errors
    ///
    /// `lost`, where there is nowhere to go. `Interrupted`: the tokens that are not computed again are no longer the
    /// sequence's.
    pub(super) fn flee(&mut self, lost: Error) -> Result<()> {
        let (slots, all) = (self.devices.len(), self.tokens.len());
        let (observed, since) = (self.devices.observed(), self.evictor.as_ref().and_then(Evictor::since));
        let Some(refuge) = self.devices.flee(&lost)? else { return Err(lost) };
        self.make_evictable()?;
        let cut = self.cuts.last().copied().unwrap_or(Cut { tokens: 0, kept: 0 });
        match refuge {
            Refuge::Here => {
                self.devices.observe(observed);
                return Ok(());
            }
            // The rows that it lacks are those of the last tokens, computed after the last eviction.
            Refuge::Kept(there)
                if there >= cut.kept && !self.observes() && self.devices.reaches(all - (slots - there)) =>
            {
                let rest = self.tokens.split_off(all - (slots - there));
                self.append_all(&rest)?;
            }
            _ => self.replay(all)?,
        }
        // The pass that was lost may have been the first that counted.
        if let (Some(first), Some(evictor)) = (since.filter(|&s| s >= all), &mut self.evictor) {
            evictor.observe_since(first);
            self.devices.zero_mass()?;
        }
        self.devices.observe(observed);
        Ok(())
    }

    /// Appends tokens for which there is room: in a smaller cache than the sequence had before, there may be none.
    fn append_all(&mut self, tokens: &[u32]) -> Result<()> {
        self.check_room(tokens.len())?;
        tokens
            .chunks(self.devices.max_tokens())
            .try_for_each(|chunk| self.append(chunk, self.staged.known, Logits::None))
    }

    /// Computes the first `len` tokens again from the start, with the evictions among them.
    fn replay(&mut self, len: usize) -> Result<()> {
        let (tokens, cuts) = (std::mem::take(&mut self.tokens), std::mem::take(&mut self.cuts));
        let since = self.evictor.as_ref().and_then(Evictor::since);
        self.clear();
        for cut in cuts.iter().filter(|c| c.tokens <= len) {
            while self.tokens.len() < cut.tokens {
                let at = self.tokens.len();
                let n = self.devices.max_tokens().min(cut.tokens - at);
                self.check_room(n)?;
                self.observe(n, cut.tokens - at)?;
                self.append(&tokens[at..at + n], self.staged.known, Logits::None)?;
            }
            self.cut(cut.kept)?;
        }
        // After the last one, what was being observed already is again.
        let since = since.filter(|&s| s < len).unwrap_or(len).max(self.tokens.len());
        self.devices.observe(0);
        self.append_all(&tokens[self.tokens.len()..since])?;
        if since < len {
            self.observe(len - since, len - since)?;
            self.devices.observe(usize::MAX);
            self.append_all(&tokens[since..len])?;
        }
        Ok(())
    }

    /// Keeps the first `len` tokens. Where their slots were evicted, or local layers have gone on too far to come back
    /// to them, they are computed again.
    ///
    /// # Errors
    ///
    /// `Usage` beyond the end; what computing returns.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        let all = self.tokens.len();
        if len > all {
            return Err(Error::Usage(format!("cannot rewind to token {len} of {all}")));
        }
        self.discard_drafts();
        if self.cheap(len) < len {
            return self.replay(len);
        }
        self.drop_to(len);
        Ok(())
    }

    /// The largest number of first tokens, at most `len`, that can be kept without computing any.
    pub(super) fn cheap(&self, len: usize) -> usize {
        let kept = if len > self.dense || self.cuts.is_empty() { len } else { len.min(self.prefix) };
        if self.devices.reaches(kept) { kept } else { 0 }
    }

    /// Keeps the first `len` tokens, for which [`Session::cheap`] says that it can be done.
    fn drop_to(&mut self, len: usize) {
        let slots = match len > self.dense || self.cuts.is_empty() {
            true => self.devices.len() - (self.tokens.len() - len),
            false => {
                self.cuts.clear();
                self.dense = 0;
                len
            }
        };
        self.devices.set_len(slots, len);
        if let Some(evictor) = &mut self.evictor {
            evictor.truncate(slots);
        }
        self.tokens.truncate(len);
        for cut in self.cuts.iter_mut().filter(|c| c.tokens > len) {
            *cut = Cut { tokens: len, kept: cut.kept.min(slots) };
        }
    }

    /// Makes the sequence begin as `prompt` does: keeps the longest common prefix, or what is left of it after evictions,
    /// but never the prompt's last token, whose logits are wanted. How many tokens it has then.
    pub fn reuse(&mut self, prompt: &[u32]) -> Result<usize> {
        self.discard_drafts();
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.cheap(common.min(prompt.len().saturating_sub(1)));
        self.drop_to(kept);
        Ok(kept)
    }
}
