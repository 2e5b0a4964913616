//! The conditions that a program must meet so that every machine of its target loads it.

use super::Elf;
use crate::android::bionic;
use crate::targets::{ANDROID_API, ANDROID_LOADER, ANDROID_PAGE, is_android, is_static};
use object::elf::{
    DF_1_PIE, DF_TEXTREL, DT_FLAGS, DT_FLAGS_1, DT_RELR, DT_RPATH, DT_RUNPATH, DT_TEXTREL, EM_AARCH64,
    EM_X86_64, ET_DYN, PF_W, PF_X, PT_GNU_STACK, PT_LOAD, PT_TLS,
};

/// Problems of a program for `target`, each the end of a sentence that begins with "it".
pub fn find_problems(target: &str, elf: &Elf) -> Vec<String> {
    let mut found = find_library_problems(target, elf);
    if is_android(target) {
        check_start_by_bionic(elf, &mut found);
    }
    found
}

/// Problems of a shared library, as of [`find_problems`].
pub fn find_library_problems(target: &str, elf: &Elf) -> Vec<String> {
    let mut found = Vec::new();
    let machine = if target.starts_with("aarch64") { EM_AARCH64 } else { EM_X86_64 };
    if elf.machine != machine {
        found.push(format!("is for machine {}, not {machine}", elf.machine));
    }
    if elf.has_symbols {
        found.push("is not stripped".into());
    }
    check_memory(elf, &mut found);
    if is_android(target) {
        check_loading_by_bionic(elf, &mut found);
        check_symbols_of_bionic(elf, &mut found);
    }
    if is_static(target) {
        if let Some(loader) = &elf.interpreter {
            found.push(format!("needs {loader} to load it, so it is not static"));
        }
        if !elf.needed.is_empty() {
            found.push(format!("needs {}, so it is not static", elf.needed.join(", ")));
        }
        // Weak imports of a static program count as missing.
        let strong = elf.imports.iter().filter(|i| !i.weak).map(|i| format!("has no {}", i.name));
        found.extend(strong);
    }
    found
}

/// Checks that no memory is both writable and executable, and that the loader patches no read-only memory.
fn check_memory(elf: &Elf, found: &mut Vec<String>) {
    let loaded = || elf.segments.iter().filter(|s| s.kind == PT_LOAD);
    if loaded().next().is_none() {
        found.push("has nothing to load".into());
    }
    if loaded().any(|s| s.flags.contains(PF_W | PF_X)) {
        found.push("has memory that is both writable and executable".into());
    }
    if elf.segment(PT_GNU_STACK).is_none_or(|s| s.flags.contains(PF_X)) {
        found.push("has an executable stack".into());
    }
    if elf.tag(DT_TEXTREL).is_some() || elf.tag(DT_FLAGS).is_some_and(|flags| flags & DF_TEXTREL.0 != 0) {
        found.push("has text relocations".into());
    }
}

/// Checks that bionic starts a program.
fn check_start_by_bionic(elf: &Elf, found: &mut Vec<String>) {
    if elf.kind != ET_DYN || elf.tag(DT_FLAGS_1).unwrap_or(0) & DF_1_PIE.0 == 0 {
        found.push("is not a position independent program".into());
    }
    if elf.interpreter.as_deref() != Some(ANDROID_LOADER) {
        let loader = elf.interpreter.as_deref().unwrap_or("nothing");
        found.push(format!("is loaded by {loader}, not by {ANDROID_LOADER}"));
    }
}

fn check_loading_by_bionic(elf: &Elf, found: &mut Vec<String>) {
    for segment in elf.segments.iter().filter(|s| s.kind == PT_LOAD) {
        let page = ANDROID_PAGE;
        if segment.align < page || !segment.align.is_power_of_two() {
            found.push(format!(
                "has a segment at {:#x} aligned to {}, which phones with pages of {page} bytes refuse",
                segment.address, segment.align
            ));
        } else if segment.address.wrapping_sub(segment.offset) % segment.align != 0 {
            found.push(format!("has a segment at {:#x} that no page of the file fits", segment.address));
        }
    }
    if elf.segment(PT_TLS).is_some() {
        found.push("has thread local storage, which Android supports from API level 29 on".into());
    }
    if elf.tag(DT_RELR).is_some() {
        found.push("has packed relocations, which Android supports from API level 28 on".into());
    }
    if elf.tag(DT_RPATH).is_some() || elf.tag(DT_RUNPATH).is_some() {
        found.push("has library search paths of this machine".into());
    }
}

/// Checks that a program needs only bionic's public symbols, and newer ones than the API level only weakly.
fn check_symbols_of_bionic(elf: &Elf, found: &mut Vec<String>) {
    let known = || bionic::LIBRARIES.iter().map(|l| l.name);
    for library in elf.needed.iter().filter(|n| known().all(|k| k != n.as_str())) {
        found.push(format!(
            "needs {library}; only {} are on every phone",
            known().collect::<Vec<_>>().join(" ")
        ));
    }
    if !elf.needed.iter().any(|n| n == "libc.so") {
        found.push("does not need libc.so".into());
    }
    for import in &elf.imports {
        match bionic::find_level(&import.name) {
            None => found.push(format!(
                "imports {}, which xtask/src/android/bionic does not list; add it there if bionic has it",
                import.name
            )),
            Some(level) if level > ANDROID_API && !import.weak => found.push(format!(
                "imports {}, which Android has from API level {level} on; {} is the oldest supported",
                import.name, ANDROID_API
            )),
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Import, Segment};
    use super::*;
    use crate::targets::ANDROID;
    use object::elf::{FileType, PF_R, ProgramFlags};

    fn load(address: u64, flags: ProgramFlags) -> Segment {
        Segment { kind: PT_LOAD, flags, offset: address, address, align: 0x4000 }
    }

    fn good() -> Elf {
        let import = |name: &str, weak| Import { name: name.into(), weak };
        Elf {
            kind: ET_DYN,
            machine: EM_AARCH64,
            segments: vec![
                load(0, PF_R),
                load(0x4000, PF_R | PF_X),
                load(0x8000, PF_R | PF_W),
                Segment { kind: PT_GNU_STACK, flags: PF_R | PF_W, ..load(0, PF_R) },
            ],
            interpreter: Some("/system/bin/linker64".into()),
            dynamic: vec![(DT_FLAGS_1, DF_1_PIE.0)],
            needed: vec!["libdl.so".into(), "libc.so".into()],
            imports: vec![import("malloc", false), import("getrandom", true)],
            exports: vec![],
            has_symbols: false,
        }
    }

    #[test]
    fn a_program_that_its_machine_would_refuse_is_found() {
        assert_eq!(find_problems(ANDROID, &good()), [""; 0]);
        let import = |name: &str| Import { name: name.into(), weak: false };
        let tls = Segment { kind: PT_TLS, ..load(0, PF_R) };
        type Change<'a> = &'a dyn Fn(&mut Elf);
        let cases: [(Change<'_>, &str); 18] = [
            (&|e| e.machine = EM_X86_64, "machine 62"),
            (&|e| e.kind = FileType(2), "position independent"),
            (&|e| e.dynamic.clear(), "position independent"),
            (&|e| e.interpreter = None, "loaded by nothing"),
            (&|e| e.segments[0].align = 0x1000, "aligned to 4096"),
            (&|e| e.segments[0].align = 0x5000, "aligned to 20480"),
            (&|e| e.segments[1].offset += 0x1000, "no page of the file fits"),
            (&|e| e.segments.push(tls.clone()), "thread local"),
            (&|e| e.dynamic.push((DT_RELR, 0)), "packed relocations"),
            (&|e| e.dynamic.push((DT_RUNPATH, 1)), "search paths"),
            (&|e| e.has_symbols = true, "not stripped"),
            (&|e| e.segments[2].flags |= PF_X, "writable and executable"),
            (&|e| e.segments.truncate(3), "stack"),
            (&|e| e.dynamic.push((DT_TEXTREL, 0)), "text relocations"),
            (&|e| e.imports.push(import("__errno_location")), "does not list"),
            (&|e| e.imports.push(import("getrandom")), "API level 28"),
            (&|e| e.needed.push("libOpenCL.so".into()), "libOpenCL.so"),
            (&|e| e.needed.truncate(1), "does not need libc.so"),
        ];
        for (change, words) in cases {
            let mut elf = good();
            change(&mut elf);
            let found = find_problems(ANDROID, &elf);
            assert!(found.len() == 1 && found[0].contains(words), "{words}: {found:?}");
        }
        let mut elf = Elf { interpreter: None, needed: vec![], ..good() };
        elf.imports[0].weak = true;
        assert_eq!(find_problems("aarch64-unknown-linux-musl", &elf), [""; 0]);
        assert_eq!(find_problems("aarch64-unknown-linux-musl", &good()).len(), 3);
    }
}
