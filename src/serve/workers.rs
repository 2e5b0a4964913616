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

/// Time that a task may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskLength {
    Short,
    Long,
}

impl TaskLength {
    /// Length of the work on so many bytes.
    pub fn of_bytes(bytes: usize) -> Self {
        if bytes <= SHORT { TaskLength::Short } else { TaskLength::Long }
    }
}

#[derive(Default)]
struct Lanes {
    /// By [`TaskLength`].
    tasks: [VecDeque<Task>; 2],
    closed: bool,
}

#[derive(Default)]
struct TaskQueue {
    lanes: Mutex<Lanes>,
    arrived: Condvar,
}

impl TaskQueue {
    fn lock_lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a task of one of these lengths, the first by preference; `None` at the end.
    fn next_task(&self, lengths: &[TaskLength]) -> Option<(Task, TaskLength)> {
        let mut lanes = self.lock_lanes();
        loop {
            for &length in lengths {
                if let Some(task) = lanes.tasks[length as usize].pop_front() {
                    return Some((task, length));
                }
            }
            if lanes.closed {
                return None;
            }
            lanes = self.arrived.wait(lanes).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Does tasks of these lengths in turn.
    fn run_tasks(&self, lengths: &[TaskLength]) {
        let mut lengths = lengths.to_vec();
        while let Some((task, length)) = self.next_task(&lengths) {
            task();
            lengths.sort_by_key(|&of| of == length);
        }
    }
}

/// The threads.
pub struct Workers(Arc<TaskQueue>);

impl Workers {
    /// Starts so many threads, at least two.
    pub fn start(threads: usize) -> Result<Self> {
        let workers = Self(Arc::default());
        for i in 0..threads.max(2) {
            let queue = Arc::clone(&workers.0);
            let lengths = [TaskLength::Short, TaskLength::Long];
            let run = move || queue.run_tasks(if i == 0 { &lengths[..1] } else { &lengths });
            let cannot = |e| Error::Other(format!("cannot start a thread that prepares prompts: {e}"));
            thread::Builder::new().name(format!("prompts {i}")).spawn(run).map_err(cannot)?;
        }
        Ok(workers)
    }

    /// Hands in a task. There are no more of them than connections.
    pub fn add_task(&self, length: TaskLength, task: Task) {
        self.0.lock_lanes().tasks[length as usize].push_back(task);
        // All of them, as the one that wakes may not take this length.
        self.0.arrived.notify_all();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.lock_lanes().closed = true;
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
            workers.add_task(TaskLength::Long, Box::new(wait));
        }
        for _ in 0..9 {
            let done = done.clone();
            let tell = move || done.send("short").expect("heard");
            workers.add_task(TaskLength::of_bytes(SHORT), Box::new(tell));
            assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok("short"));
        }
        drop(hold);
        assert!((0..9).all(|_| heard.recv_timeout(Duration::from_secs(60)) == Ok("long")));
    }
}
