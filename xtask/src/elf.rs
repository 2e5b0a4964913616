//! A reader of 64-bit little-endian ELF files: what a loader looks at. Every access is checked, since the
//! file may be anything.

pub mod check;
mod packed;

/// `e_type` of position independent programs and libraries.
pub const ET_DYN: u16 = 3;
pub const EM_X86_64: u16 = 62;
pub const EM_AARCH64: u16 = 183;

pub const PT_LOAD: u32 = 1;
pub const PT_INTERP: u32 = 3;
pub const PT_TLS: u32 = 7;
pub const PT_GNU_STACK: u32 = 0x6474_e551;
const PT_DYNAMIC: u32 = 2;
pub const PF_X: u32 = 1;
pub const PF_W: u32 = 2;

pub const DT_TEXTREL: u64 = 22;
pub const DT_RPATH: u64 = 15;
pub const DT_RUNPATH: u64 = 29;
pub const DT_FLAGS: u64 = 30;
pub const DT_RELR: u64 = 36;
pub const DT_FLAGS_1: u64 = 0x6fff_fffb;
pub const DF_TEXTREL: u64 = 4;
pub const DF_1_PIE: u64 = 0x0800_0000;
const DT_NEEDED: u64 = 1;
const DT_STRTAB: u64 = 5;
const DT_STRSZ: u64 = 10;
/// Address and size of each table of relocations with addends.
const RELA_TABLES: [(u64, u64); 2] = [(7, 8), (23, 2)];

const SHT_SYMTAB: u32 = 2;
const SHT_DYNSYM: u32 = 11;

/// What a loader would know of a program.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Elf {
    /// `e_type`.
    pub kind: u16,
    pub machine: u16,
    pub segments: Vec<Segment>,
    /// The program that loads this one.
    pub interpreter: Option<String>,
    /// Tags and values of the dynamic section, in order, without the end mark.
    pub dynamic: Vec<(u64, u64)>,
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
    pub kind: u32,
    pub flags: u32,
    offset: u64,
    pub address: u64,
    file_size: u64,
    pub memory_size: u64,
    pub align: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Import {
    pub name: String,
    /// May be missing.
    pub weak: bool,
}

type Parsed<T> = Result<T, String>;

impl Elf {
    /// Reads a whole file. The error says what is wrong with it.
    pub fn parse(file: &[u8]) -> Parsed<Elf> {
        if file.get(..4) != Some(b"\x7fELF") {
            return Err("not an ELF file".into());
        }
        if file.get(4..7) != Some(&[2, 1, 1]) {
            return Err("not a 64-bit little-endian ELF file of version 1".into());
        }
        let f = Bytes(file);
        let mut elf = Elf { kind: f.u16(16)?, machine: f.u16(18)?, ..Elf::default() };
        for header in f.table(f.u64(32)?, f.u16(54)?.into(), f.u16(56)?.into(), 56)? {
            let segment = segment(header)?;
            if segment.kind == PT_LOAD {
                f.part(segment.offset, segment.file_size)?;
            }
            elf.segments.push(segment);
        }
        if let Some(s) = elf.segment(PT_INTERP) {
            let path = f.part(s.offset, s.file_size)?;
            elf.interpreter = Some(path.string(0)?);
        }
        if let Some(s) = elf.segment(PT_DYNAMIC) {
            let entries = f.part(s.offset, s.file_size)?;
            elf.dynamic = dynamic(entries)?;
            elf.read_dynamic(f)?;
        }
        elf.read_sections(f)?;
        Ok(elf)
    }

    /// The first segment of a kind.
    pub fn segment(&self, kind: u32) -> Option<&Segment> {
        self.segments.iter().find(|s| s.kind == kind)
    }

    /// The first value of a tag of the dynamic section.
    pub fn tag(&self, tag: u64) -> Option<u64> {
        self.dynamic.iter().find(|(t, _)| *t == tag).map(|(_, value)| *value)
    }

    fn read_dynamic(&mut self, f: Bytes<'_>) -> Parsed<()> {
        let names = match (self.tag(DT_STRTAB), self.tag(DT_STRSZ)) {
            (Some(address), Some(size)) => f.part(self.file_offset(address)?, size)?,
            _ => return Err("the dynamic section names no string table".into()),
        };
        for (_, at) in self.dynamic.iter().filter(|(tag, _)| *tag == DT_NEEDED) {
            self.needed.push(names.string(*at)?);
        }
        for (table, size) in RELA_TABLES {
            let (Some(address), Some(size)) = (self.tag(table), self.tag(size)) else { continue };
            for entry in f.table(self.file_offset(address)?, 24, size / 24, 24)? {
                self.relocated.push(entry.u64(0)?);
            }
        }
        if let (Some(address), Some(size)) = (self.tag(packed::TABLE.0), self.tag(packed::TABLE.1)) {
            let table = f.part(self.file_offset(address)?, size)?;
            self.relocated.extend(packed::addresses(table.0)?);
        }
        Ok(())
    }

    fn read_sections(&mut self, f: Bytes<'_>) -> Parsed<()> {
        let sections: Vec<Bytes<'_>> =
            f.table(f.u64(40)?, f.u16(58)?.into(), f.u16(60)?.into(), 64)?.collect();
        for section in &sections {
            match section.u32(4)? {
                SHT_SYMTAB => self.has_symbols = true,
                SHT_DYNSYM => {
                    let names = sections.get(section.u32(40)? as usize);
                    let names = names.ok_or("the dynamic symbols have no string table")?;
                    let names = f.part(names.u64(24)?, names.u64(32)?)?;
                    self.read_symbols(f.part(section.u64(24)?, section.u64(32)?)?, names)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_symbols(&mut self, symbols: Bytes<'_>, names: Bytes<'_>) -> Parsed<()> {
        // The first entry is empty by definition.
        for entry in symbols.table(0, 24, symbols.0.len() as u64 / 24, 24)?.skip(1) {
            let defined = entry.u16(6)? != 0;
            if !defined {
                let weak = entry.u16(4)? as u8 >> 4 == 2;
                self.imports.push(Import { name: names.string(entry.u32(0)?.into())?, weak });
            }
        }
        Ok(())
    }

    /// Where in the file the byte of an address is.
    fn file_offset(&self, address: u64) -> Parsed<u64> {
        let loaded = self.segments.iter().filter(|s| s.kind == PT_LOAD);
        let within = |s: &&Segment| address.checked_sub(s.address).is_some_and(|d| d < s.file_size);
        let found = loaded.into_iter().find(within).and_then(|s| s.offset.checked_add(address - s.address));
        found.ok_or_else(|| format!("address {address:#x} lies in no loaded segment"))
    }
}

fn segment(h: Bytes<'_>) -> Parsed<Segment> {
    Ok(Segment {
        kind: h.u32(0)?,
        flags: h.u32(4)?,
        offset: h.u64(8)?,
        address: h.u64(16)?,
        file_size: h.u64(32)?,
        memory_size: h.u64(40)?,
        align: h.u64(48)?,
    })
}

/// The entries up to the end mark.
fn dynamic(bytes: Bytes<'_>) -> Parsed<Vec<(u64, u64)>> {
    let mut entries = Vec::new();
    for entry in bytes.table(0, 16, bytes.0.len() as u64 / 16, 16)? {
        match entry.u64(0)? {
            0 => break,
            tag => entries.push((tag, entry.u64(8)?)),
        }
    }
    Ok(entries)
}

#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn part(self, at: u64, len: u64) -> Parsed<Bytes<'a>> {
        let range =
            usize::try_from(at).ok().zip(at.checked_add(len).and_then(|end| usize::try_from(end).ok()));
        let part = range.and_then(|(start, end)| self.0.get(start..end));
        part.map(Bytes).ok_or_else(|| format!("cut short: {len} bytes at {at:#x} are not in the file"))
    }

    /// `count` entries `size` bytes apart, of which at least `least` are needed.
    fn table(self, at: u64, size: u64, count: u64, least: u64) -> Parsed<impl Iterator<Item = Bytes<'a>>> {
        if count > 0 && size < least {
            return Err(format!("table entries of {size} bytes at {at:#x}; {least} are needed"));
        }
        let total = size.checked_mul(count).ok_or("a table larger than any file")?;
        let all = self.part(at, total)?.0;
        Ok(all.chunks_exact(size.max(1) as usize).map(Bytes))
    }

    fn array<const N: usize>(self, at: u64) -> Parsed<[u8; N]> {
        Ok(self.part(at, N as u64)?.0.try_into().expect("the part has the asked length"))
    }

    fn u16(self, at: u64) -> Parsed<u16> {
        Ok(u16::from_le_bytes(self.array(at)?))
    }

    fn u32(self, at: u64) -> Parsed<u32> {
        Ok(u32::from_le_bytes(self.array(at)?))
    }

    fn u64(self, at: u64) -> Parsed<u64> {
        Ok(u64::from_le_bytes(self.array(at)?))
    }

    /// The text from `at` to the next zero byte.
    fn string(self, at: u64) -> Parsed<String> {
        let tail = usize::try_from(at).ok().and_then(|at| self.0.get(at..));
        let text = tail.and_then(|t| t.split(|&b| b == 0).next().filter(|text| text.len() < t.len()));
        let text = text.ok_or_else(|| format!("a name at {at:#x} has no end"))?;
        Ok(String::from_utf8_lossy(text).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            put(64 + i * 56, &kind.to_le_bytes());
            for (field, value) in [(8, at), (16, 0x1000 + at), (32, size), (40, size), (48, 0x4000)] {
                put(64 + i * 56 + field, &value.to_le_bytes());
            }
        }
        put(0x180, b"/linker"[..5].as_ref());
        put(0x190, b"\0libc.so\0malloc\0");
        let dynamic = [(DT_NEEDED, 1u64), (DT_STRTAB, 0x1190), (DT_STRSZ, 16), (7, 0x1280), (8, 24)];
        for (i, (tag, value)) in dynamic.into_iter().enumerate() {
            put(0x200 + i * 16, &tag.to_le_bytes());
            put(0x208 + i * 16, &value.to_le_bytes());
        }
        put(0x280, &0x1234u64.to_le_bytes());
        put(0x2a0 + 24, &9u32.to_le_bytes());
        put(0x2a0 + 28, &[0x22]);
        for (i, (kind, at, size)) in [(SHT_DYNSYM, 0x2a0u64, 48u64), (3, 0x190, 16)].into_iter().enumerate() {
            let header = 0x340 + i * 64;
            put(header + 4, &kind.to_le_bytes());
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
        assert!(Elf::parse(&bad).unwrap_err().contains("has no end"));
        let mut bad = program();
        bad[0x218..0x220].fill(0xff);
        assert!(Elf::parse(&bad).unwrap_err().contains("in no loaded segment"));
        let mut bad = program();
        bad[54] = 8;
        assert!(Elf::parse(&bad).unwrap_err().contains("56 are needed"));
    }

    #[test]
    fn this_very_program_is_read() {
        if cfg!(all(target_os = "linux", target_pointer_width = "64", target_endian = "little")) {
            let file = std::fs::read(std::env::current_exe().unwrap()).unwrap();
            let elf = Elf::parse(&file).unwrap();
            assert!(elf.segments.iter().any(|s| s.kind == PT_LOAD && s.flags & PF_X != 0));
        }
    }
}
