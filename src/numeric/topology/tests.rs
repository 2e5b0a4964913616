//! Phones as their kernels describe them, in files of our own.

use super::*;
use std::path::PathBuf;

/// Capacity and highest clock in MHz that a kernel reports for one core; zero stands for a missing file.
type Told = (u64, u64);

/// A tree of kernel files that goes when the test ends.
struct Tree(PathBuf);

impl Tree {
    /// All cores of a phone, by capacity and highest clock in MHz, all allowed and switched on.
    fn new(name: &str, cores: &[Told]) -> Self {
        let root = std::env::temp_dir().join(format!("antigravity-cores-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        let tree = Self(root);
        for (number, &(capacity, clock)) in cores.iter().enumerate() {
            let base = format!("sys/devices/system/cpu/cpu{number}");
            if capacity > 0 {
                tree.write(&format!("{base}/cpu_capacity"), &format!("{capacity}\n"));
            }
            if clock > 0 {
                tree.write(&format!("{base}/cpufreq/cpuinfo_max_freq"), &format!("{clock}000\n"));
            }
        }
        let all = format!("0-{}", cores.len() - 1);
        tree.allow(&all);
        tree.write("sys/devices/system/cpu/online", &format!("{all}\n"));
        tree
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.0.join(file);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, text).expect("a file");
    }

    /// Writes the list of allowed cores that affinity and cpusets leave, as the kernel reports it in one file.
    fn allow(&self, list: &str) {
        let text = format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{list}\nMems_allowed:\t1\n");
        self.write("proc/self/status", &text);
    }

    /// Default threads, and where that many are placed; an empty list is anywhere.
    fn plan(&self) -> (usize, Vec<usize>) {
        let threads = count_big_cores(list_cores(&self.0)).expect("some cores");
        (threads, place_threads(list_cores(&self.0), threads).unwrap_or_default())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn without_capacity(cores: &[Told]) -> Vec<Told> {
    cores.iter().map(|&(_, clock)| (0, clock)).collect()
}

fn without_clock(cores: &[Told]) -> Vec<Told> {
    cores.iter().map(|&(capacity, _)| (capacity, 0)).collect()
}

/// Four small, three big and one largest core.
const PRIME: [Told; 8] =
    [(325, 1785), (325, 1785), (325, 1785), (325, 1785), (850, 2419), (850, 2419), (850, 2419), (1024, 2841)];
/// Six small and two big ones.
const TWO_BIG: [Told; 8] = [
    (414, 1804),
    (414, 1804),
    (414, 1804),
    (414, 1804),
    (414, 1804),
    (414, 1804),
    (1024, 2304),
    (1024, 2304),
];
/// Big ones first, as some number them.
const HALVES: [Told; 8] = [
    (1024, 2803),
    (1024, 2803),
    (1024, 2803),
    (1024, 2803),
    (380, 1766),
    (380, 1766),
    (380, 1766),
    (380, 1766),
];

#[test]
fn phones_use_their_big_cores_however_they_tell_them() {
    let cases = [
        ("prime", PRIME, vec![4, 5, 6, 7]),
        ("two-big", TWO_BIG, vec![6, 7]),
        ("halves", HALVES, vec![0, 1, 2, 3]),
    ];
    for (name, phone, big) in cases {
        for told in [phone.to_vec(), without_capacity(&phone), without_clock(&phone)] {
            assert_eq!(Tree::new(name, &told).plan(), (big.len(), big.clone()), "{name} {told:?}");
        }
    }
}

#[test]
fn equal_and_unknown_cores_are_all_big() {
    for told in [(0, 0), (1024, 2000), (0, 2000)] {
        assert_eq!(Tree::new("equal", &[told; 8]).plan(), (8, vec![]));
    }
    // One core without a capacity: clocks decide for all.
    let mut mixed = HALVES;
    mixed[0].0 = 0;
    assert_eq!(Tree::new("mixed", &mixed).plan(), (4, vec![0, 1, 2, 3]));
}

#[test]
fn only_cores_of_the_cpuset_are_used() {
    let tree = Tree::new("cpuset", &PRIME);
    // What Android leaves apps in the background: there is no big core then.
    tree.allow("0-3");
    assert_eq!(tree.plan(), (4, vec![]));
    tree.allow("0-5");
    assert_eq!(tree.plan(), (2, vec![4, 5]));
    tree.allow("2,7");
    assert_eq!(tree.plan(), (1, vec![7]));
}

#[test]
fn cores_that_are_switched_off_get_no_thread() {
    let tree = Tree::new("offline", &PRIME);
    tree.write("sys/devices/system/cpu/online", "0-4,6\n");
    assert_eq!(list_allowed(&tree.0), [0, 1, 2, 3, 4, 6]);
    assert_eq!(tree.plan(), (2, vec![4, 6]));
    tree.write("sys/devices/system/cpu/online", "0-3\n");
    assert_eq!(tree.plan(), (4, vec![]));
    // Without the file all that is allowed counts.
    fs::remove_file(tree.0.join("sys/devices/system/cpu/online")).expect("it was there");
    assert_eq!(tree.plan(), (4, vec![4, 5, 6, 7]));
}

#[test]
fn threads_beyond_the_big_cores_go_anywhere() {
    let tree = Tree::new("many", &PRIME);
    assert_eq!(place_threads(list_cores(&tree.0), 4), Some(vec![4, 5, 6, 7]));
    assert_eq!(place_threads(list_cores(&tree.0), 5), None);
}

#[test]
fn hyper_threads_of_a_core_count_once() {
    let tree = Tree::new("threads", &[(0, 3000); 4]);
    for core in 0..4 {
        let file = format!("sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
        tree.write(&file, if core % 2 == 0 { "0,2\n" } else { "1,3\n" });
    }
    assert_eq!(tree.plan(), (2, vec![]));
}

#[test]
fn a_system_that_tells_nothing_still_gets_a_thread() {
    let nowhere = Path::new("/no/such/tree");
    assert_eq!(list_allowed(nowhere), [0usize; 0]);
    assert_eq!(count_big_cores(list_cores(nowhere)), None);
    assert_eq!(place_threads(list_cores(nowhere), 4), None);
    assert!(default_threads() >= 1);
}

#[test]
fn lists_of_cores_are_parsed() {
    assert_eq!(parse_list("0-3,7"), [0, 1, 2, 3, 7]);
    assert_eq!(parse_list("5"), [5]);
    assert_eq!(parse_list(""), [0usize; 0]);
    assert_eq!(parse_list("x,2-1,0-99999999999"), [0usize; 0]);
}
