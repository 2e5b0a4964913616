//! A Python wheel: `xtask/python/__init__.py` with the library, which has the model inside.

use super::library::{SHARED, bundle_shared};
use super::model_name;
use super::zip::Zip;
use crate::command;
use crate::error::{AtPath, Error, Result};
use crate::targets::TARGETS;
use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};
use sha2::{Digest, Sha256};
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest C library that tags of wheels name in this form.
const OLDEST_GLIBC: u32 = 17;
const ABOUT: &str = "One language model as a library: text, conversations and tokens";

/// Writes the wheel of a built library's folder for a target, and returns its path.
pub fn write_wheel(model: &Path, dir: &Path, target: &str) -> Result<PathBuf> {
    bundle_shared(model, dir)?;
    pack_wheel(model, &dir.join("bundle").join(SHARED), target, dir)
}

/// Writes the wheel of a library with a model inside into a folder.
pub fn pack_wheel(model: &Path, library: &Path, target: &str, out: &Path) -> Result<PathBuf> {
    let machine = target.split('-').next().unwrap_or_default();
    if !TARGETS.contains(&target) || !target.ends_with("-linux-gnu") {
        return Err(Error::Usage(format!(
            "a wheel is for x86_64- or aarch64-unknown-linux-gnu, not {target}"
        )));
    }
    let content = fs::read(library).at(library)?;
    let glibc = newest_glibc(&content).at(library)?.max(OLDEST_GLIBC);
    let tag = format!("py3-none-manylinux_2_{glibc}_{machine}");
    let (name, version) = (package_name(model), env!("CARGO_PKG_VERSION"));
    let info = format!("{name}-{version}.dist-info");
    let module = fs::read(command::root().join("xtask/python/__init__.py")).at(Path::new("xtask/python"))?;
    let module = String::from_utf8_lossy(&module).replace("antigravity_story", &name);
    let metadata = format!(
        "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {ABOUT}\nRequires-Python: >=3.9\n\
         License: MIT OR Apache-2.0\n"
    );
    let wheel = format!("Wheel-Version: 1.0\nGenerator: cargo xtask\nRoot-Is-Purelib: false\nTag: {tag}\n");
    let files = [
        (format!("{name}/__init__.py"), module.as_bytes()),
        (format!("{name}/py.typed"), b"".as_slice()),
        (format!("{name}/{SHARED}"), &content),
        (format!("{info}/METADATA"), metadata.as_bytes()),
        (format!("{info}/WHEEL"), wheel.as_bytes()),
    ];
    let (mut zip, mut record) = (Zip::default(), String::new());
    for (name, content) in &files {
        zip.add_file(name, content)?;
        record += &format!("{name},sha256={},{}\n", encode_base64(&Sha256::digest(content)), content.len());
    }
    record += &format!("{info}/RECORD,,\n");
    zip.add_file(&format!("{info}/RECORD"), record.as_bytes())?;
    let path = out.join(format!("{name}-{version}-{tag}.whl"));
    fs::write(&path, zip.finish()).at(&path)?;
    Ok(path)
}

/// The name of a model's package: letters, digits and underscores.
pub fn package_name(model: &Path) -> String {
    let name = model_name(model).to_lowercase();
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    format!("antigravity_{}", words.collect::<Vec<_>>().join("_"))
}

/// The newest version 2.N of the C library whose symbols a shared object names.
fn newest_glibc(file: &[u8]) -> std::result::Result<u32, object::read::Error> {
    let header = FileHeader64::<LittleEndian>::parse(file)?;
    let sections = header.sections(LittleEndian, file)?;
    let Some((_, names)) = sections.section_by_name(LittleEndian, b".dynstr") else { return Ok(0) };
    let names =
        names.data(LittleEndian, file)?.split(|&b| b == 0).filter_map(|name| std::str::from_utf8(name).ok());
    let versions = names.filter_map(|name| name.strip_prefix("GLIBC_2.")?.split('.').next()?.parse().ok());
    Ok(versions.max().unwrap_or(0))
}

/// Base64 with the alphabet of URLs and without padding, as in `RECORD`.
fn encode_base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let group = |part: &[u8]| {
        let bits = part.iter().fold(0u32, |all, &b| all << 8 | u32::from(b)) << (8 * (3 - part.len()));
        (0..=part.len()).map(|i| ALPHABET[(bits >> (18 - 6 * i) & 63) as usize] as char).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_hashes_are_as_pip_wants_them() {
        assert_eq!(package_name(Path::new("/x/Qwen2.5--0.5B.gguf")), "antigravity_qwen2_5_0_5b");
        // RFC 4648, section 10, with other padding.
        let cases = [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")];
        for (text, encoded) in cases {
            assert_eq!(encode_base64(text.as_bytes()), encoded);
        }
        assert_eq!(encode_base64(&[0xfb, 0xff]), "-_8");
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!((17..100).contains(&newest_glibc(&own).unwrap()));
    }
}
