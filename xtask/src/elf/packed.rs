//! Android's packed relocations: addresses as differences, in groups that say once what their members share.
//!
//! The format is that of bionic's loader (`linker/linker_reloc_iterators.h`), which reads it from API level 23 on:
//! `APS2`, then signed LEB128 numbers.

const GROUPED_BY_INFO: i64 = 1;
const GROUPED_BY_OFFSET: i64 = 2;
const GROUPED_BY_ADDEND: i64 = 4;
const HAS_ADDEND: i64 = 8;

/// More than any program has; a damaged count must not take all memory.
const MOST: i64 = 1 << 24;

/// The addresses that a table relocates.
pub fn addresses(table: &[u8]) -> Result<Vec<u64>, String> {
    let mut rest = table.strip_prefix(b"APS2").ok_or("packed relocations do not begin with APS2")?;
    let mut next = || number(&mut rest).ok_or("packed relocations end early");
    let count = next()?;
    let mut address = next()?;
    if !(0..=MOST).contains(&count) {
        return Err(format!("{count} packed relocations"));
    }
    let mut found = Vec::new();
    while (found.len() as i64) < count {
        let (members, flags) = (next()?, next()?);
        if !(1..=count - found.len() as i64).contains(&members) {
            return Err(format!("a group of {members} packed relocations"));
        }
        let has = |flag: i64| flags & flag != 0;
        let step = if has(GROUPED_BY_OFFSET) { Some(next()?) } else { None };
        // The kind of relocation and what is added to the address do not matter here.
        let shared =
            usize::from(has(GROUPED_BY_INFO)) + usize::from(has(HAS_ADDEND) && has(GROUPED_BY_ADDEND));
        let own =
            usize::from(!has(GROUPED_BY_INFO)) + usize::from(has(HAS_ADDEND) && !has(GROUPED_BY_ADDEND));
        for _ in 0..shared {
            next()?;
        }
        for _ in 0..members {
            address = address.wrapping_add(match step {
                Some(step) => step,
                None => next()?,
            });
            for _ in 0..own {
                next()?;
            }
            found.push(address as u64);
        }
    }
    Ok(found)
}

/// Takes one signed LEB128 number off the front.
fn number(bytes: &mut &[u8]) -> Option<i64> {
    let (mut value, mut shift) = (0i64, 0);
    loop {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        if shift < 64 {
            value |= i64::from(byte & 0x7f) << shift;
        }
        shift += 7;
        if byte & 0x80 == 0 {
            let negative = byte & 0x40 != 0 && shift < 64;
            return Some(if negative { value | (-1 << shift) } else { value });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(numbers: &[i64]) -> Vec<u8> {
        let mut bytes = b"APS2".to_vec();
        for &n in numbers {
            let mut n = n;
            loop {
                let byte = (n & 0x7f) as u8;
                n >>= 7;
                let last = (n == 0 && byte & 0x40 == 0) || (n == -1 && byte & 0x40 != 0);
                bytes.push(if last { byte } else { byte | 0x80 });
                if last {
                    break;
                }
            }
        }
        bytes
    }

    #[test]
    fn numbers_come_back() {
        for n in [0, 1, -1, 63, 64, -64, -65, 8191, 0x1403, i64::MAX, i64::MIN] {
            let bytes = table(&[n]);
            assert_eq!(number(&mut &bytes[4..]), Some(n));
        }
        assert_eq!(number(&mut &[0x80u8, 0x80][..]), None);
    }

    #[test]
    fn groups_are_unpacked() {
        // Three in a row of one kind, each with its addend; then two apart with nothing in common.
        let numbers = [5, 0x1000, 3, 1 | 2 | 8, 8, 0x403, 11, 12, 13, 2, 8, 100, 0x403, -1, -50, 0x101, 7];
        let all = table(&numbers);
        assert_eq!(addresses(&all), Ok(vec![0x1008, 0x1010, 0x1018, 0x107c, 0x104a]));
        for len in 0..all.len() {
            assert!(addresses(&all[..len]).is_err(), "{len} bytes");
        }
        assert_eq!(addresses(&table(&[0, 0])), Ok(vec![]));
        for bad in [&[-1, 0][..], &[1 << 40, 0], &[2, 0, 3, 2, 8], &[2, 0, 0, 2, 8]] {
            assert!(addresses(&table(bad)).is_err(), "{bad:?}");
        }
    }
}
