//! A trace of passes: the time of every step and a digest of the residual after every layer.

use files::atomic_file::AtomicFile;
use files::{Error, Result};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Maximum number of spans for which every step is written: about 5 MB.
const SPANS: usize = 50_000;
/// First step of a pass, and last step of one that computes logits.
const FIRST_STEP: &str = "embed";
const LAST_STEP: &str = "head";

/// One step of one forward pass.
#[derive(Debug, Clone, Copy)]
struct Span {
    step: &'static str,
    layer: usize,
    tokens: usize,
    start_ns: u64,
    end_ns: u64,
}

/// Digest of the last token's residual after one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHash {
    /// RoPE position of the token.
    pub pos: usize,
    /// Layer, counted from 0.
    pub layer: usize,
    /// FNV-1a over the bits of the row.
    pub digest: u64,
}

/// Spans and digests, collected while a device computes.
#[derive(Debug)]
pub struct Trace {
    origin: Instant,
    /// [`Trace::origin`] on the clock of `/proc/uptime`, in seconds since boot with two decimals, which other processes
    /// on this machine can read too.
    uptime: Option<f64>,
    spans: Vec<Span>,
    /// Marks: nanoseconds, name.
    marks: Vec<(u64, String)>,
    /// Digests in the order in which they were computed.
    pub hashes: Vec<LayerHash>,
}

impl Default for Trace {
    fn default() -> Self {
        let text = std::fs::read_to_string("/proc/uptime").ok();
        let uptime = text.and_then(|t| t.split_whitespace().next()?.parse().ok());
        Self { origin: Instant::now(), uptime, spans: Vec::new(), marks: Vec::new(), hashes: Vec::new() }
    }
}

impl Trace {
    /// Nanoseconds since the trace was made.
    fn elapsed_ns(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// Records a step that began at `start`. Returns its end, where the next one begins.
    fn record_step(&mut self, step: &'static str, layer: usize, tokens: usize, start: u64) -> u64 {
        let end = self.elapsed_ns();
        self.spans.push(Span { step, layer, tokens, start_ns: start, end_ns: end });
        end
    }

    /// Adds a mark at this moment. `cargo xtask profile` shows marks that begin with `switch`, `evict` or `stop`.
    pub fn add_mark(&mut self, name: &str) {
        let now = self.elapsed_ns();
        self.marks.push((now, name.into()));
    }

    /// Time per step over the whole run, in the order first seen: name, nanoseconds, calls.
    pub fn step_totals(&self) -> Vec<(&'static str, u64, u64)> {
        let mut totals: Vec<(&'static str, u64, u64)> = Vec::new();
        for s in &self.spans {
            match totals.iter_mut().find(|t| t.0 == s.step) {
                Some(t) => {
                    t.1 += s.end_ns - s.start_ns;
                    t.2 += 1;
                }
                None => totals.push((s.step, s.end_ns - s.start_ns, 1)),
            }
        }
        totals
    }

    /// Spans to write. If there are more than [`SPANS`], evenly chosen passes keep all their steps, and each other pass
    /// that computed logits becomes one span `pass`.
    fn spans_to_write(&self) -> Vec<Span> {
        let passes = self.spans.chunk_by(|_, next| next.step != FIRST_STEP);
        let stride = self.spans.len().div_ceil(SPANS).max(1);
        let choose = |(i, pass): (usize, &[Span])| {
            let last = pass[pass.len() - 1];
            if last.step != LAST_STEP || i % stride == 0 {
                return pass.to_vec();
            }
            vec![Span { step: "pass", end_ns: last.end_ns, ..pass[0] }]
        };
        passes.enumerate().flat_map(choose).collect()
    }

    /// Writes the Chrome trace event format, which Perfetto and `chrome://tracing` load. `uptime_s` in `otherData` is
    /// the machine's uptime at timestamp 0.
    pub fn write_chrome(&self, path: &Path) -> Result<()> {
        let write = || -> std::io::Result<()> {
            let file = AtomicFile::create(path)?;
            let mut f = std::io::BufWriter::new(&file.file);
            write!(f, "{{\"displayTimeUnit\":\"ms\",")?;
            if let Some(uptime) = self.uptime.filter(|u| u.is_finite()) {
                write!(f, "\"otherData\":{{\"uptime_s\":{uptime}}},")?;
            }
            write!(f, "\"traceEvents\":[")?;
            let mut comma = "";
            for s in self.spans_to_write() {
                write!(
                    f,
                    "{comma}\n{{\"name\":\"{}\",\"ph\":\"X\",\"pid\":1,\"tid\":1,\"ts\":{:.3},\"dur\":{:.3},\
                     \"args\":{{\"layer\":{},\"tokens\":{}}}}}",
                    s.step,
                    s.start_ns as f64 / 1e3,
                    (s.end_ns - s.start_ns) as f64 / 1e3,
                    s.layer,
                    s.tokens
                )?;
                comma = ",";
            }
            for (ns, name) in &self.marks {
                let (name, ts) = (serde_json::Value::from(name.as_str()), *ns as f64 / 1e3);
                write!(
                    f,
                    "{comma}\n{{\"name\":{name},\"ph\":\"i\",\"s\":\"g\",\"pid\":1,\"tid\":1,\"ts\":{ts:.3}}}"
                )?;
                comma = ",";
            }
            writeln!(f, "\n]}}")?;
            f.flush()?;
            drop(f);
            file.commit()
        };
        write().map_err(|e| Error::io(path, format!("cannot write the trace: {e}")))
    }
}

/// Timer of one pass's steps; does nothing without a trace.
pub struct Steps<'a> {
    trace: Option<&'a mut Trace>,
    tokens: usize,
    start: u64,
}

impl<'a> Steps<'a> {
    /// Starts timing a pass of `tokens` tokens.
    pub fn start_pass(trace: Option<&'a mut Trace>, tokens: usize) -> Self {
        let start = trace.as_ref().map_or(0, |r| r.elapsed_ns());
        Self { trace, tokens, start }
    }

    /// True if there is a trace.
    pub fn is_traced(&self) -> bool {
        self.trace.is_some()
    }

    /// Ends a step and begins the next.
    pub fn end_step(&mut self, step: &'static str, layer: usize) {
        if let Some(r) = &mut self.trace {
            self.start = r.record_step(step, layer, self.tokens, self.start);
        }
    }

    /// Records the digest of the last token's residual after a layer.
    pub fn record_residual(&mut self, pos: usize, layer: usize, row: &[f32]) {
        if let Some(r) = &mut self.trace {
            r.hashes.push(LayerHash { pos, layer, digest: fnv1a_digest(row) });
            self.start = r.elapsed_ns();
        }
    }
}

/// FNV-1a over the bits of a row of floats.
pub fn fnv1a_digest(row: &[f32]) -> u64 {
    row.iter()
        .flat_map(|x| x.to_bits().to_le_bytes())
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_trace_is_written_in_less_detail() {
        let mut trace = Trace::default();
        let mut at = 0;
        let mut pass = |tokens: usize| {
            for step in [FIRST_STEP, "qkv", "attend", LAST_STEP] {
                trace.spans.push(Span { step, layer: 0, tokens, start_ns: at, end_ns: at + 10 });
                at += 10;
            }
        };
        pass(40);
        (0..SPANS).for_each(|_| pass(1));
        let written = trace.spans_to_write();
        assert!(written.len() < 2 * SPANS, "{}", written.len());
        assert_eq!(written[..4].iter().filter(|s| s.tokens == 40).count(), 4, "a prompt is written whole");
        let tokens = |s: &&Span| s.step == "pass" || s.step == LAST_STEP;
        assert_eq!(written.iter().filter(tokens).count(), 1 + SPANS, "no pass is lost");
        assert!(written.windows(2).all(|w| w[0].end_ns == w[1].start_ns), "nor any time");
        trace.spans.truncate(400);
        assert_eq!(trace.spans_to_write().len(), 400, "a short run is written whole");
    }
}
