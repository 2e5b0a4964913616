//! Public symbols of Android's C library that a program may import: the ones that Rust's standard library and the
//! crates of this project use, and related ones. Each was looked up in AOSP's `libc.map.txt`, `libm.map.txt` and
//! `libdl.map.txt`; all exist from API level 24 on, except [`LATER`].

use crate::targets::ANDROID_API;

/// A library of bionic and its symbols that are known here.
pub struct Library {
    pub name: &'static str,
    functions: &'static str,
    variables: &'static str,
}

pub const LIBRARIES: &[Library] = &[
    Library {
        name: "libc.so",
        functions: include_str!("bionic/libc.txt"),
        variables: "environ stderr stdin stdout",
    },
    Library { name: "libm.so", functions: include_str!("bionic/libm.txt"), variables: "signgam" },
    Library { name: "libdl.so", functions: include_str!("bionic/libdl.txt"), variables: "" },
];

/// Functions of libc newer than API level 24, with their level. A program may import them weakly, that is, run without
/// them.
pub const LATER: &[(&str, u32)] = &[
    ("aligned_alloc", 28),
    ("copy_file_range", 34),
    ("getentropy", 28),
    ("getrandom", 28),
    ("glob", 28),
    ("iconv", 28),
    ("memfd_create", 30),
    ("posix_spawn", 28),
    ("pthread_getname_np", 26),
    ("statx", 30),
    ("syncfs", 28),
];

impl Library {
    pub fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.functions.split_whitespace()
    }

    pub fn variables(&self) -> impl Iterator<Item = &'static str> {
        self.variables.split_whitespace()
    }
}

/// The API level in which a public symbol appeared; 24 stands for that level and all before.
pub fn find_level(symbol: &str) -> Option<u32> {
    let later = LATER.iter().find(|(name, _)| *name == symbol).map(|(_, level)| *level);
    let early = || LIBRARIES.iter().any(|l| l.functions().chain(l.variables()).any(|name| name == symbol));
    later.or_else(|| early().then_some(ANDROID_API))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_symbol_is_listed_twice_and_levels_are_known() {
        let mut seen = HashSet::new();
        let early = LIBRARIES.iter().flat_map(|l| l.functions().chain(l.variables()));
        for name in early.chain(LATER.iter().map(|(name, _)| *name)) {
            assert!(seen.insert(name), "{name}");
            assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{name}");
        }
        assert!(LATER.iter().all(|(_, level)| *level > ANDROID_API));
        let levels =
            ["malloc", "environ", "tanhf", "dlsym", "getrandom", "__errno_location", ""].map(find_level);
        assert_eq!(levels, [Some(24), Some(24), Some(24), Some(24), Some(28), None, None]);
    }
}
