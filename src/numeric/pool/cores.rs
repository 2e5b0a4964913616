//! Pins threads to cores. New threads inherit the cores of the thread that starts them.

use crate::topology;

/// Pins the calling thread, and threads that it starts later, to some of the cores that it may use.
///
/// # Errors
///
/// None of the cores exists, or the system does not allow it.
pub fn pin_to_cores(cores: &[usize]) -> std::io::Result<()> {
    // SAFETY: a `cpu_set_t` is a plain bit set, empty when zeroed; numbers past its end are left out; the call
    // reads only the set.
    let refused = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &core in cores.iter().filter(|&&core| core < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(core, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if refused == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Runs `body`, and the threads that it starts, on the big cores, if the calling thread may use those and others.
pub fn run_on_big_cores<T>(body: impl FnOnce() -> T) -> T {
    on_cores(&topology::big_cores(), body)
}

fn on_cores<T>(cores: &[usize], body: impl FnOnce() -> T) -> T {
    let before = own_cores();
    let some: Vec<usize> = before.iter().copied().filter(|core| cores.contains(core)).collect();
    let moved = !some.is_empty() && some.len() < before.len() && pin_to_cores(&some).is_ok();
    let done = body();
    if moved {
        // Results do not depend on it, so an error is ignored.
        let _ = pin_to_cores(&before);
    }
    done
}

/// Cores that the calling thread may use; empty if the system does not tell.
fn own_cores() -> Vec<usize> {
    // SAFETY: a `cpu_set_t` is a plain bit set, empty when zeroed; the call writes only the set, and only numbers below
    // its size are looked up.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => (0..libc::CPU_SETSIZE as usize).filter(|&core| libc::CPU_ISSET(core, &set)).collect(),
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_started_meanwhile_inherits_the_cores() {
        let all = own_cores();
        let Some((&last, [_, ..])) = all.split_last() else {
            return; // there is nothing to choose
        };
        let there =
            on_cores(&[last], || std::thread::Builder::new().spawn(own_cores).unwrap().join().unwrap());
        assert_eq!(there, [last]);
        assert_eq!(own_cores(), all, "as before");
        // None of them may be used.
        assert_eq!(on_cores(&[all[all.len() - 1] + 1], own_cores), all);
    }
}
