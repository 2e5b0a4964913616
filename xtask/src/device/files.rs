//! Brings files to a device: only those that differ, checked there before they replace the old ones.

use super::Device;
use super::shell::{capture, quote};
use crate::error::{Error, Result};
use crate::size::megabytes;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::path::{Path, PathBuf};

/// A file here and its name in the directory there.
#[derive(Debug, Clone)]
pub struct Item {
    pub from: PathBuf,
    pub name: String,
}

impl Item {
    pub fn new(from: impl Into<PathBuf>, name: &str) -> Item {
        Item { from: from.into(), name: name.into() }
    }
}

/// An item with its size and hash.
struct HashedItem<'a> {
    item: &'a Item,
    bytes: u64,
    hash: String,
}

/// Makes the directory `dir` there hold these files. Whatever stops it, the files there are whole: each
/// is pushed under another name and checked, and only when all are there they are renamed, in one script
/// that goes on without us. Returns how many differed.
pub fn install(device: &dyn Device, dir: &str, items: &[Item]) -> Result<usize> {
    if items.is_empty() {
        return Ok(0);
    }
    let known = items.iter().map(hash_item).collect::<Result<Vec<_>>>()?;
    let names: Vec<&str> = items.iter().map(|i| i.name.as_str()).collect();
    // Remains of an installation that was stopped; then what is there.
    let script = format!("mkdir -p {0} && cd {0} && rm -f ./*.new && {1}", quote(dir), hashes_of(&names));
    let there = parse_hashes(&capture(device, &script)?.ok(device)?);
    let differs =
        |k: &&HashedItem<'_>| there.iter().all(|(name, hash)| *name != k.item.name || *hash != k.hash);
    let different: Vec<&HashedItem<'_>> = known.iter().filter(differs).collect();
    if different.is_empty() {
        return Ok(0);
    }
    check_space(device, dir, different.iter().map(|k| k.bytes).sum())?;
    let pushed = different.iter().try_for_each(|k| push(device, dir, k));
    if let Err(e) = pushed.and_then(|()| swap(device, dir, &different)) {
        // What was pushed is of no use and takes space; where the device is gone, the next time clears it.
        let _ = capture(device, &format!("cd {} && rm -f ./*.new", quote(dir)));
        return Err(e);
    }
    Ok(different.len())
}

fn hash_item(item: &Item) -> Result<HashedItem<'_>> {
    let read = || -> std::io::Result<(u64, String)> {
        let (mut file, mut hash, mut bytes) = (std::fs::File::open(&item.from)?, Sha256::new(), 0);
        let mut piece = vec![0; 1 << 20];
        loop {
            match file.read(&mut piece)? {
                0 => break,
                n => {
                    hash.update(&piece[..n]);
                    bytes += n as u64;
                }
            }
        }
        Ok((bytes, hash.finalize().iter().map(|b| format!("{b:02x}")).collect()))
    };
    let (bytes, hash) = read().map_err(|e| Error::at(&item.from, e))?;
    Ok(HashedItem { item, bytes, hash })
}

/// A script that prints the hashes of those files that exist.
fn hashes_of(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|n| quote(n)).collect();
    format!("for f in {}; do if [ -f \"$f\" ]; then sha256sum \"$f\" || exit 1; fi; done", names.join(" "))
}

/// `(name, hash)` of the lines of sha256sum that are such.
fn parse_hashes(text: &str) -> Vec<(String, String)> {
    let pair = |line: &str| {
        let (hash, name) = line.trim_end().split_once(' ')?;
        let whole = hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit());
        whole.then(|| (name.trim_start_matches([' ', '*']).to_string(), hash.to_ascii_lowercase()))
    };
    text.lines().filter_map(pair).collect()
}

/// Refuses what does not fit, with a little left over for the system.
fn check_space(device: &dyn Device, dir: &str, need: u64) -> Result<()> {
    const SPARE: u64 = 16 << 20;
    let answer = capture(device, &format!("df -k {}", quote(dir)))?.ok(device)?;
    match parse_free_bytes(&answer) {
        Some(free) if free < need + SPARE => Err(Error::Device(format!(
            "{}: {dir} has {} free, {} are needed; delete something there (`rm -r {dir}` drops this model)",
            device.name(),
            megabytes(free),
            megabytes(need + SPARE)
        ))),
        // A `df` that nobody can read must not stand in the way: a push that does not fit fails cleanly.
        _ => Ok(()),
    }
}

/// The free bytes in the output of `df -k`. Long device names push the numbers to a line of their own.
fn parse_free_bytes(text: &str) -> Option<u64> {
    let (_, rows) = text.split_once('\n')?;
    let words: Vec<&str> = rows.split_whitespace().collect();
    let percent = words.iter().position(|w| w.ends_with('%') && w.len() > 1)?;
    words.get(percent.checked_sub(1)?)?.parse::<u64>().ok()?.checked_mul(1024)
}

fn push(device: &dyn Device, dir: &str, file: &HashedItem<'_>) -> Result<()> {
    let name = &file.item.name;
    eprintln!("{}: pushing {name}, {}", device.name(), size(file.bytes));
    device.push(&file.item.from, &format!("{dir}/{name}.new"))
}

/// Bytes as a person reads them.
fn size(bytes: u64) -> String {
    if bytes < 100_000 { format!("{bytes} bytes") } else { megabytes(bytes) }
}

/// Checks the new files there and puts them in place of the old ones.
fn swap(device: &dyn Device, dir: &str, files: &[&HashedItem<'_>]) -> Result<()> {
    let new: Vec<String> = files.iter().map(|k| format!("{}.new", k.item.name)).collect();
    let names: Vec<&str> = new.iter().map(String::as_str).collect();
    let script = format!("cd {} && {}", quote(dir), hashes_of(&names));
    let there = parse_hashes(&capture(device, &script)?.ok(device)?);
    for (name, file) in names.iter().zip(files) {
        if there.iter().all(|(n, hash)| n != name || *hash != file.hash) {
            return Err(Error::Device(format!(
                "{}: {dir}/{name} arrived with another content; the cable, or full or failing storage: do it again",
                device.name()
            )));
        }
    }
    let moves = files.iter().map(|k| {
        let (old, new) = (quote(&k.item.name), quote(&format!("{}.new", k.item.name)));
        format!("chmod 755 {new} && mv -f {new} {old}")
    });
    let moves = moves.collect::<Vec<_>>().join(" &&\n");
    capture(device, &format!("trap '' HUP INT TERM PIPE\ncd {} && {moves}", quote(dir)))?.ok(device)?;
    Ok(())
}

/// The files of a directory that exist, of those named.
pub fn existing(dir: &Path, names: &[&str]) -> Vec<Item> {
    names.iter().filter(|n| dir.join(n).is_file()).map(|n| Item::new(dir.join(n), n)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::local::Local;
    use super::*;

    #[test]
    fn hashes_and_free_space_are_read_and_nonsense_is_not() {
        let hash = "AB".repeat(32);
        let text =
            format!("{hash}  model\n{hash} *b c\nshort  x\n{hash}\nsha256sum: y: No such file\n\u{1b}[2J\n");
        let lower = hash.to_lowercase();
        assert_eq!(parse_hashes(&text), [("model".into(), lower.clone()), ("b c".into(), lower)]);
        let toybox = "Filesystem     1K-blocks     Used Available Use% Mounted on\n/dev/block/dm-9 113116140 58 5600 52% /data\n";
        assert_eq!(parse_free_bytes(toybox), Some(5600 * 1024));
        let wrapped = "Filesystem           1K-blocks\n/dev/block/bootdevice/by-name/userdata\n   100   40   60  40% /data\n";
        assert_eq!(parse_free_bytes(wrapped), Some(60 * 1024));
        for odd in ["", "x", "a\nb c d", "h\n% %", "h\n 99999999999999999999 5%", "h\nx 5%"] {
            assert_eq!(parse_free_bytes(odd), None, "{odd:?}");
        }
    }

    #[test]
    fn only_what_differs_is_replaced_and_remains_are_cleared() {
        let root = std::env::temp_dir().join(format!("xtask-files 'x' {}", std::process::id()));
        let (here, there) = (root.join("here"), root.join("there"));
        std::fs::create_dir_all(&here).unwrap();
        std::fs::create_dir_all(&there).unwrap();
        let device = Local::open();
        let items: Vec<Item> = ["a b", "$(c)'"].map(|n| Item::new(here.join(n), n)).into();
        items.iter().for_each(|i| std::fs::write(&i.from, &i.name).unwrap());
        std::fs::write(there.join("old.new"), "half a file").unwrap();
        let dir = there.to_str().unwrap();
        assert_eq!(install(&device, dir, &items).unwrap(), 2);
        assert_eq!(install(&device, dir, &items).unwrap(), 0);
        std::fs::write(&items[0].from, "changed").unwrap();
        assert_eq!(install(&device, dir, &items).unwrap(), 1);
        assert_eq!(std::fs::read(there.join("a b")).unwrap(), b"changed");
        assert_eq!(std::fs::read_dir(&there).unwrap().count(), 2);
        let missing = [Item::new(here.join("none"), "a b")];
        assert!(install(&device, dir, &missing).unwrap_err().to_string().contains("none"));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
