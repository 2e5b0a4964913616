//! Copies files to a device: only the ones that differ, checked there before they replace the old ones.

use super::Device;
use super::shell::{capture, quote};
use crate::error::{AtPath, Error, Result};
use crate::fetch::hash_file;
use crate::size::megabytes;
use std::path::{Path, PathBuf};

/// A local file, and its name in the directory on the device.
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

/// Installs files in the directory `dir` of a device; returns the number of files that differed. If it is interrupted
/// the files there stay intact: each is pushed under another name and checked, and one script renames all of them at
/// the end, even if the connection breaks.
pub fn install(device: &dyn Device, dir: &str, items: &[Item]) -> Result<usize> {
    if items.is_empty() {
        return Ok(0);
    }
    let known = items.iter().map(hash_item).collect::<Result<Vec<_>>>()?;
    let names: Vec<&str> = items.iter().map(|i| i.name.as_str()).collect();
    // Removes the remains of an interrupted installation, then prints the hashes.
    let script = format!("mkdir -p {0} && cd {0} && rm -f ./*.new && {1}", quote(dir), hash_script(&names));
    let there = parse_hashes(&capture(device, &script)?.ok(device)?);
    let differs =
        |k: &&HashedItem<'_>| there.iter().all(|(name, hash)| *name != k.item.name || *hash != k.hash);
    let different: Vec<&HashedItem<'_>> = known.iter().filter(differs).collect();
    if different.is_empty() {
        return Ok(0);
    }
    check_space(device, dir, different.iter().map(|k| k.bytes).sum())?;
    let pushed = different.iter().try_for_each(|k| push_new(device, dir, k));
    if let Err(e) = pushed.and_then(|()| replace_old(device, dir, &different)) {
        // Frees the space; if the device is gone, the next installation does.
        let _ = capture(device, &format!("cd {} && rm -f ./*.new", quote(dir)));
        return Err(e);
    }
    Ok(different.len())
}

fn hash_item(item: &Item) -> Result<HashedItem<'_>> {
    let bytes = std::fs::metadata(&item.from).at(&item.from)?.len();
    Ok(HashedItem { item, bytes, hash: hash_file(&item.from)? })
}

/// A script that prints the hashes of the files that exist.
fn hash_script(names: &[&str]) -> String {
    let names: Vec<String> = names.iter().map(|n| quote(n)).collect();
    format!("for f in {}; do if [ -f \"$f\" ]; then sha256sum \"$f\" || exit 1; fi; done", names.join(" "))
}

/// `(name, hash)` of each valid line of sha256sum.
fn parse_hashes(text: &str) -> Vec<(String, String)> {
    let pair = |line: &str| {
        let (hash, name) = line.trim_end().split_once(' ')?;
        let whole = hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit());
        whole.then(|| (name.trim_start_matches([' ', '*']).to_string(), hash.to_ascii_lowercase()))
    };
    text.lines().filter_map(pair).collect()
}

/// Refuses files that do not fit into the free space, less a reserve for the system.
fn check_space(device: &dyn Device, dir: &str, need: u64) -> Result<()> {
    const SPARE: u64 = 16 << 20;
    let answer = capture(device, &format!("df -k {}", quote(dir)))?.ok(device)?;
    match parse_free_bytes(&answer) {
        Some(free) if free < need + SPARE => Err(Error::Device(format!(
            "{}: {dir} has {} free, {} are needed; delete something there (`rm -r {dir}` removes this model)",
            device.name(),
            megabytes(free),
            megabytes(need + SPARE)
        ))),
        // An unknown format of `df` is no error: a push that does not fit fails cleanly.
        _ => Ok(()),
    }
}

/// The free bytes in the output of `df -k`, which puts the numbers on a new line after a long device name.
fn parse_free_bytes(text: &str) -> Option<u64> {
    let (_, rows) = text.split_once('\n')?;
    let words: Vec<&str> = rows.split_whitespace().collect();
    let percent = words.iter().position(|w| w.ends_with('%') && w.len() > 1)?;
    words.get(percent.checked_sub(1)?)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Pushes a file under the name `NAME.new`.
fn push_new(device: &dyn Device, dir: &str, file: &HashedItem<'_>) -> Result<()> {
    let name = &file.item.name;
    let size = if file.bytes < 100_000 { format!("{} bytes", file.bytes) } else { megabytes(file.bytes) };
    eprintln!("{}: pushing {name}, {size}", device.name());
    device.push(&file.item.from, &format!("{dir}/{name}.new"))
}

/// Checks the new files there and renames them over the old ones.
fn replace_old(device: &dyn Device, dir: &str, files: &[&HashedItem<'_>]) -> Result<()> {
    let new: Vec<String> = files.iter().map(|k| format!("{}.new", k.item.name)).collect();
    let names: Vec<&str> = new.iter().map(String::as_str).collect();
    let script = format!("cd {} && {}", quote(dir), hash_script(&names));
    let there = parse_hashes(&capture(device, &script)?.ok(device)?);
    for (name, file) in names.iter().zip(files) {
        if there.iter().all(|(n, hash)| n != name || *hash != file.hash) {
            return Err(Error::Device(format!(
                "{}: {dir}/{name} arrived with other content; check cable and storage, then try again",
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

/// The named files of a directory that exist.
pub fn find_existing(dir: &Path, names: &[&str]) -> Vec<Item> {
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
    fn only_files_that_differ_are_replaced_and_remains_are_removed() {
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
