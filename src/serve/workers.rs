//! Threads that prepare requests, so that none holds up the connections. What may take long never holds up the rest: one
//! thread takes only what is short, and the others take both in turn.

use files::{Error, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Requests of more bytes may take long.
pub const SHORT: usize = 64 << 10;

/// A piece of work.
pub type Task = Box<dyn FnOnce() + Send>;

/// How long a piece of work may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    Short,
    Long,
}

impl Length {
    /// Of a request of so many bytes.
    pub fn of(bytes: usize) -> Self {
        if bytes <= SHORT { Length::Short } else { Length::Long }
    }
}

#[derive(Default)]
struct Waiting {
    short: VecDeque<Task>,
    long: VecDeque<Task>,
    closed: bool,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Condvar,
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next task, by preference of a length; `None` at the end.
    fn next(&self, only_short: Option<Length>, first: Length) -> Option<(Task, Length)> {
        let mut waiting = self.lock();
        loop {
            let lengths = match (only_short, first) {
                (Some(only), _) => [only, only],
                (None, Length::Short) => [Length::Short, Length::Long],
                (None, Length::Long) => [Length::Long, Length::Short],
            };
            for length in lengths {
                let lane = match length {
                    Length::Short => &mut waiting.short,
                    Length::Long => &mut waiting.long,
                };
                if let Some(task) = lane.pop_front() {
                    return Some((task, length));
                }
            }
            if waiting.closed {
                return None;
            }
            waiting = self.arrived.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, only: Option<Length>) {
        let mut first = Length::Short;
        while let Some((task, length)) = self.next(only, first) {
            task();
            first = if length == Length::Short { Length::Long } else { Length::Short };
        }
    }
}

/// The threads.
pub struct Workers(Arc<Queue>);

impl Workers {
    /// Starts so many threads, at least two.
    pub fn start(threads: usize) -> Result<Self> {
        let workers = Self(Arc::default());
        for i in 0..threads.max(2) {
            let queue = Arc::clone(&workers.0);
            let work = move || queue.work((i == 0).then_some(Length::Short));
            let cannot = |e| Error::Other(format!("cannot start a thread that prepares prompts: {e}"));
            thread::Builder::new().name(format!("prompts {i}")).spawn(work).map_err(cannot)?;
        }
        Ok(workers)
    }

    /// Hands in a task. There are no more of them than connections.
    pub fn put(&self, length: Length, task: Task) {
        let mut waiting = self.0.lock();
        match length {
            Length::Short => waiting.short.push_back(task),
            Length::Long => waiting.long.push_back(task),
        }
        // All of them, as the one that wakes may not take this length.
        self.0.arrived.notify_all();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::time::Duration;

    #[test]
    fn long_tasks_do_not_hold_up_short_ones() {
        let workers = Workers::start(3).expect("threads");
        let (hold, held) = mpsc::channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (done, heard) = mpsc::channel();
        for _ in 0..9 {
            let (held, done) = (Arc::clone(&held), done.clone());
            let wait = move || {
                let _ = held.lock().map(|held| held.recv());
                done.send("long").expect("heard");
            };
            workers.put(Length::Long, Box::new(wait));
        }
        for _ in 0..9 {
            let done = done.clone();
            workers.put(Length::of(SHORT), Box::new(move || done.send("short").expect("heard")));
            assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok("short"));
        }
        drop(hold);
        assert!((0..9).all(|_| heard.recv_timeout(Duration::from_secs(60)) == Ok("long")));
    }
}
