//! The parts of a 64-bit little-endian ELF file that a loader reads. No input panics.

mod check;

pub use check::{find_library_problems, find_problems};

use object::elf::{
    DT_NEEDED, DT_NULL, DT_STRSZ, DT_STRTAB, DynamicTag, FileHeader64, FileType, Machine, PT_LOAD,
    ProgramFlags, ProgramHeader64, ProgramType, SHT_DYNSYM, SHT_SYMTAB, STB_WEAK,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader, Sym};
use object::{LittleEndian, StringTable};

/// The byte order of every file read here.
const LE: LittleEndian = LittleEndian;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Elf {
    pub kind: FileType,
    pub machine: Machine,
    pub segments: Vec<Segment>,
    /// The path of the dynamic linker.
    pub interpreter: Option<String>,
    /// Tags and values of the dynamic section, in order, without the end mark.
    pub dynamic: Vec<(DynamicTag, u64)>,
    /// Names of the libraries to load.
    pub needed: Vec<String>,
    /// Symbols that come from the libraries.
    pub imports: Vec<Import>,
    /// Symbols for others.
    pub exports: Vec<String>,
    /// Has the linker's symbol table, which stripping removes.
    pub has_symbols: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    pub kind: ProgramType,
    pub flags: ProgramFlags,
    /// Position in the file, in bytes.
    offset: u64,
    pub address: u64,
    pub align: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Import {
    pub name: String,
    /// Weak: may be missing.
    pub weak: bool,
}

type Parsed<T> = Result<T, Box<dyn std::error::Error>>;

impl Elf {
    /// Reads the bytes of a file.
    pub fn parse(file: &[u8]) -> Parsed<Elf> {
        let header = FileHeader64::<LittleEndian>::parse(file)?;
        header.endian()?;
        let segments = header.program_headers(LE, file)?;
        let mut elf = Elf { kind: header.e_type(LE), machine: header.e_machine(LE), ..Elf::default() };
        for segment in segments {
            if segment.p_type(LE) == PT_LOAD {
                segment.data(LE, file).map_err(|()| "cut short: a loaded segment is not in the file")?;
            }
            if let Some(path) = segment.interpreter(LE, file)? {
                elf.interpreter.get_or_insert(text(path));
            }
            if let Some(entries) = segment.dynamic(LE, file)? {
                let entries = entries.iter().map(|e| (e.tag(LE), e.val(LE)));
                elf.dynamic = entries.take_while(|(tag, _)| *tag != DT_NULL).collect();
            }
            elf.segments.push(Segment {
                kind: segment.p_type(LE),
                flags: segment.p_flags(LE),
                offset: segment.p_offset(LE),
                address: segment.p_vaddr(LE),
                align: segment.p_align(LE),
            });
        }
        elf.read_needed(file, segments)?;
        let sections = header.sections(LE, file)?;
        elf.has_symbols = sections.iter().any(|s| s.sh_type(LE) == SHT_SYMTAB);
        let symbols = sections.symbols(LE, file, SHT_DYNSYM)?;
        // The first entry is empty by definition.
        for symbol in symbols.iter().skip(1) {
            let name = text(symbol.name(LE, symbols.strings())?);
            if symbol.is_undefined(LE) {
                elf.imports.push(Import { name, weak: symbol.st_bind() == STB_WEAK });
            } else {
                elf.exports.push(name);
            }
        }
        Ok(elf)
    }

    /// Reads the names of libraries from the string table whose address is in the dynamic section.
    fn read_needed(&mut self, file: &[u8], segments: &[ProgramHeader64<LittleEndian>]) -> Parsed<()> {
        let needed = self.dynamic.iter().filter(|(tag, _)| *tag == DT_NEEDED).map(|(_, at)| *at);
        let needed: Vec<u64> = needed.collect();
        if needed.is_empty() {
            return Ok(());
        }
        let place = self.tag(DT_STRTAB).zip(self.tag(DT_STRSZ));
        let (address, size) = place.ok_or("the dynamic section names no string table")?;
        let mut loaded = segments.iter().filter(|s| s.p_type(LE) == PT_LOAD);
        let names = loaded.find_map(|s| s.data_range(LE, file, address, size).ok()?);
        let names = names.ok_or("the string table lies in no loaded segment")?;
        let names = StringTable::new(names, 0, names.len() as u64);
        for at in needed {
            let name = u32::try_from(at).ok().and_then(|at| names.get(at).ok());
            self.needed.push(text(name.ok_or_else(|| format!("a library's name at {at:#x} has no end"))?));
        }
        Ok(())
    }

    /// The first segment of a kind.
    pub fn segment(&self, kind: ProgramType) -> Option<&Segment> {
        self.segments.iter().find(|s| s.kind == kind)
    }

    /// The first value of a tag of the dynamic section.
    pub fn tag(&self, tag: DynamicTag) -> Option<u64> {
        self.dynamic.iter().find(|(t, _)| *t == tag).map(|(_, value)| *value)
    }

    /// A line about the loader, the libraries and the alignment of a program.
    pub fn describe_linking(&self) -> String {
        let loader = match &self.interpreter {
            Some(loader) => format!("loaded by {loader}"),
            None => "static".into(),
        };
        let needs = match self.needed.as_slice() {
            [] => "needs no library".into(),
            names => format!("needs {} ({} symbols)", names.join(" "), self.imports.len()),
        };
        let align = self.segments.iter().filter(|s| s.kind == PT_LOAD).map(|s| s.align).min().unwrap_or(0);
        format!("  {loader}; {needs}; segments aligned to {} KiB", align >> 10)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::elf::PF_X;

    #[test]
    fn this_very_program_is_read_and_others_are_refused() {
        for file in [&b""[..], b"\x7fEL", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x01\x01\x01"] {
            assert!(Elf::parse(file).is_err(), "{file:?}");
        }
        if cfg!(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")) {
            let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
            let elf = Elf::parse(&file).unwrap();
            assert!(elf.segments.iter().any(|s| s.kind == PT_LOAD && s.flags.contains(PF_X)));
            assert!(elf.needed.iter().any(|name| name == "libc.so.6"), "{:?}", elf.needed);
            assert!(elf.imports.iter().any(|import| import.name == "malloc"));
            for length in (0..file.len()).step_by(file.len() / 100) {
                assert!(Elf::parse(&file[..length]).is_err(), "{length} bytes");
            }
            // Whatever the bytes: an answer, no panic and no endless memory.
            for at in 0..0x400 {
                let mut bad = file.clone();
                bad[at] ^= 0xff;
                let _ = Elf::parse(&bad);
            }
        }
    }
}
