//! What a loader looks at in a 64-bit little-endian ELF file. The file may be anything: nothing here panics on it.

pub mod check;
mod packed;

use object::elf::{
    DT_ANDROID_RELA, DT_ANDROID_RELASZ, DT_JMPREL, DT_NEEDED, DT_NULL, DT_PLTRELSZ, DT_RELA, DT_RELASZ,
    DT_STRSZ, DT_STRTAB, DynamicTag, FileHeader64, FileType, Machine, PT_LOAD, ProgramFlags, ProgramHeader64,
    ProgramType, Rela64, SHT_DYNSYM, SHT_SYMTAB, STB_WEAK,
};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, SectionHeader, SectionTable, Sym};
use object::{LittleEndian, StringTable, pod};

/// The byte order of every file read here.
const LE: LittleEndian = LittleEndian;
/// Address and size of each table of relocations with addends.
const RELA_TABLES: [(DynamicTag, DynamicTag); 2] = [(DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)];

/// What a loader would know of a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Elf {
    pub kind: FileType,
    pub machine: Machine,
    pub segments: Vec<Segment>,
    /// The program that loads this one.
    pub interpreter: Option<String>,
    /// Tags and values of the dynamic section, in order, without the end mark.
    pub dynamic: Vec<(DynamicTag, u64)>,
    /// Libraries to load.
    pub needed: Vec<String>,
    /// Symbols that the libraries must have.
    pub imports: Vec<Import>,
    /// Addresses that the loader changes.
    pub relocated: Vec<u64>,
    /// Holds the linker's own symbol table, which a stripped file does not.
    pub has_symbols: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Segment {
    pub kind: ProgramType,
    pub flags: ProgramFlags,
    /// Where in the file it begins.
    offset: u64,
    pub address: u64,
    pub memory_size: u64,
    pub align: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Import {
    pub name: String,
    /// May be missing.
    pub weak: bool,
}

type Parsed<T> = Result<T, Box<dyn std::error::Error>>;

impl Elf {
    /// Reads a whole file. The error says what is wrong with it.
    pub fn parse(file: &[u8]) -> Parsed<Elf> {
        let header = FileHeader64::parse(file)?;
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
                elf.read_dynamic(Loaded { file, segments })?;
            }
            elf.segments.push(Segment::of(segment));
        }
        elf.read_sections(
            SectionTable::new(header.section_headers(LE, file)?, StringTable::default()),
            file,
        )?;
        Ok(elf)
    }

    /// The first segment of a kind.
    pub fn segment(&self, kind: ProgramType) -> Option<&Segment> {
        self.segments.iter().find(|s| s.kind == kind)
    }

    /// The first value of a tag of the dynamic section.
    pub fn tag(&self, tag: DynamicTag) -> Option<u64> {
        self.dynamic.iter().find(|(t, _)| *t == tag).map(|(_, value)| *value)
    }

    fn read_dynamic(&mut self, loaded: Loaded<'_>) -> Parsed<()> {
        let table = |address, size| match (self.tag(address), self.tag(size)) {
            (Some(address), Some(size)) => loaded.bytes(address, size).map(Some),
            _ => Ok(None),
        };
        let names = table(DT_STRTAB, DT_STRSZ)?.ok_or("the dynamic section names no string table")?;
        let names = StringTable::new(names, 0, names.len() as u64);
        let (mut needed, mut relocated) = (Vec::new(), Vec::new());
        for (_, at) in self.dynamic.iter().filter(|(tag, _)| *tag == DT_NEEDED) {
            let name = u32::try_from(*at).ok().and_then(|at| names.get(at).ok());
            needed.push(text(name.ok_or_else(|| format!("a library's name at {at:#x} has no end"))?));
        }
        for (address, size) in RELA_TABLES {
            let bytes = table(address, size)?.unwrap_or_default();
            let entries = pod::slice_from_all_bytes::<Rela64<LittleEndian>>(bytes);
            let entries = entries.map_err(|()| "a table of relocations has part of an entry")?;
            relocated.extend(entries.iter().map(|entry| entry.r_offset.get(LE)));
        }
        if let Some(bytes) = table(DT_ANDROID_RELA, DT_ANDROID_RELASZ)? {
            relocated.extend(packed::addresses(bytes)?);
        }
        (self.needed, self.relocated) = (needed, relocated);
        Ok(())
    }

    fn read_sections(&mut self, sections: Sections<'_>, file: &[u8]) -> Parsed<()> {
        self.has_symbols = sections.iter().any(|s| s.sh_type(LE) == SHT_SYMTAB);
        let symbols = sections.symbols(LE, file, SHT_DYNSYM)?;
        // The first entry is empty by definition.
        for symbol in symbols.iter().skip(1).filter(|symbol| symbol.is_undefined(LE)) {
            let name = text(symbol.name(LE, symbols.strings())?);
            self.imports.push(Import { name, weak: symbol.st_bind() == STB_WEAK });
        }
        Ok(())
    }
}

impl Segment {
    fn of(header: &ProgramHeader64<LittleEndian>) -> Segment {
        Segment {
            kind: header.p_type(LE),
            flags: header.p_flags(LE),
            offset: header.p_offset(LE),
            address: header.p_vaddr(LE),
            memory_size: header.p_memsz(LE),
            align: header.p_align(LE),
        }
    }
}

type Sections<'a> = SectionTable<'a, FileHeader64<LittleEndian>>;

/// The file as its segments put it into memory.
#[derive(Clone, Copy)]
struct Loaded<'a> {
    file: &'a [u8],
    segments: &'a [ProgramHeader64<LittleEndian>],
}

impl<'a> Loaded<'a> {
    fn bytes(self, address: u64, size: u64) -> Parsed<&'a [u8]> {
        let mut loaded = self.segments.iter().filter(|s| s.p_type(LE) == PT_LOAD);
        let found = loaded.find_map(|s| s.data_range(LE, self.file, address, size).ok()?);
        found.ok_or_else(|| format!("{size} bytes at address {address:#x} lie in no loaded segment").into())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use object::elf::{EM_AARCH64, ET_DYN, PF_X, PT_DYNAMIC, PT_INTERP, SHT_STRTAB};

    /// A small program: one segment that holds everything, a library, a symbol, a relocation.
    fn program() -> Vec<u8> {
        let mut file = vec![0u8; 0x400];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"\x7fELF\x02\x01\x01");
        put(16, &[3, 0, 183, 0]);
        put(32, &64u64.to_le_bytes());
        put(40, &0x300u64.to_le_bytes());
        put(54, &[56, 0, 3, 0, 64, 0, 3, 0]);
        let segments = [(PT_LOAD, 0u64, 0x400u64), (PT_INTERP, 0x180, 6), (PT_DYNAMIC, 0x200, 0x60)];
        for (i, (kind, at, size)) in segments.into_iter().enumerate() {
            put(64 + i * 56, &kind.0.to_le_bytes());
            for (field, value) in [(8, at), (16, 0x1000 + at), (32, size), (40, size), (48, 0x4000)] {
                put(64 + i * 56 + field, &value.to_le_bytes());
            }
        }
        put(0x180, b"/linker"[..5].as_ref());
        put(0x190, b"\0libc.so\0malloc\0");
        let dynamic =
            [(DT_NEEDED, 1u64), (DT_STRTAB, 0x1190), (DT_STRSZ, 16), (DT_RELA, 0x1280), (DT_RELASZ, 24)];
        for (i, (tag, value)) in dynamic.into_iter().enumerate() {
            put(0x200 + i * 16, &tag.0.to_le_bytes());
            put(0x208 + i * 16, &value.to_le_bytes());
        }
        put(0x280, &0x1234u64.to_le_bytes());
        put(0x2a0 + 24, &9u32.to_le_bytes());
        put(0x2a0 + 28, &[0x22]);
        for (i, (kind, at, size)) in
            [(SHT_DYNSYM, 0x2a0u64, 48u64), (SHT_STRTAB, 0x190, 16)].into_iter().enumerate()
        {
            let header = 0x340 + i * 64;
            put(header + 4, &kind.0.to_le_bytes());
            put(header + 24, &at.to_le_bytes());
            put(header + 32, &size.to_le_bytes());
            put(header + 40, &2u32.to_le_bytes());
        }
        file
    }

    #[test]
    fn a_program_is_read() {
        let elf = Elf::parse(&program()).unwrap();
        assert_eq!((elf.kind, elf.machine, elf.segments.len()), (ET_DYN, EM_AARCH64, 3));
        assert_eq!(elf.interpreter.as_deref(), Some("/link"));
        assert_eq!(elf.needed, ["libc.so"]);
        assert_eq!(elf.imports, [Import { name: "malloc".into(), weak: true }]);
        assert_eq!(elf.relocated, [0x1234]);
        assert!(!elf.has_symbols);
    }

    #[test]
    fn other_files_are_refused() {
        for file in [&b""[..], b"\x7fEL", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF\x01\x01\x01"] {
            assert!(Elf::parse(file).is_err(), "{file:?}");
        }
    }

    #[test]
    fn a_file_cut_anywhere_is_refused() {
        let file = program();
        for len in 0..file.len() {
            assert!(Elf::parse(&file[..len]).is_err(), "{len} bytes");
        }
    }

    /// Whatever the bytes: an answer, no panic and no endless memory.
    #[test]
    fn damaged_files_are_survived() {
        let file = program();
        for at in 0..file.len() {
            for value in [0, 1, 0x7f, 0xff] {
                for width in [1, 2, 4, 8] {
                    let mut bad = file.clone();
                    bad.iter_mut().skip(at).take(width).for_each(|b| *b = value);
                    let _ = Elf::parse(&bad);
                }
            }
        }
    }

    #[test]
    fn the_first_of_the_damage_is_named() {
        let mut bad = program();
        bad[0x208] = 200;
        assert!(Elf::parse(&bad).unwrap_err().to_string().contains("has no end"));
        let mut bad = program();
        bad[0x218..0x220].fill(0xff);
        assert!(Elf::parse(&bad).unwrap_err().to_string().contains("in no loaded segment"));
        let mut bad = program();
        bad[54] = 8;
        assert!(Elf::parse(&bad).unwrap_err().to_string().contains("header entry size"));
    }

    #[test]
    fn this_very_program_is_read() {
        if cfg!(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")) {
            let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
            let elf = Elf::parse(&file).unwrap();
            assert!(elf.segments.iter().any(|s| s.kind == PT_LOAD && s.flags.contains(PF_X)));
        }
    }
}
