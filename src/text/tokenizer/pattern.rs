//! Bounds on the regular expressions of a tokenizer file. The engine behind them backtracks where a
//! pattern looks around, so a pattern must not be able to make it explore many ways.

/// Published patterns have at most a few hundred characters.
const MAX_LENGTH: usize = 2048;
const MAX_NESTING: usize = 16;
const MAX_COUNT: u32 = 1000;

/// One open group.
#[derive(Clone, Copy, Default)]
struct Group {
    /// Looks ahead or behind.
    around: bool,
    /// Holds something repeated.
    repeats: bool,
}

/// Says why `pattern` is refused.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    if pattern.is_empty() || pattern.len() > MAX_LENGTH {
        return Err(format!("a pattern of {} bytes; supported: 1 to {MAX_LENGTH}", pattern.len()));
    }
    let bytes = pattern.as_bytes();
    let mut open: Vec<Group> = vec![Group::default()];
    // The group that has just been closed: what a repetition here applies to.
    let mut closed: Option<Group> = None;
    let mut i = 0;
    while i < bytes.len() {
        let atom = closed.take();
        match bytes[i] {
            b'\\' => {
                let next = bytes.get(i + 1).copied().unwrap_or(0);
                if next.is_ascii_digit() || matches!(next, b'k' | b'g' | b'G' | b'K') {
                    return Err(format!("`\\{}` at {i}; supported: no back references", next as char));
                }
                i += 2;
                continue;
            }
            b'[' => {
                i = class_end(bytes, i)?;
                continue;
            }
            b'(' => {
                if open.len() > MAX_NESTING {
                    return Err(format!("groups nested more than {MAX_NESTING} deep"));
                }
                let head = &pattern[i..];
                if head.starts_with("(?(") || head.starts_with("(?P=") {
                    return Err(format!("a conditional group at {i}"));
                }
                let around = ["(?=", "(?!", "(?<=", "(?<!"].iter().any(|p| head.starts_with(p));
                open.push(Group { around: around || open.last().is_some_and(|g| g.around), repeats: false });
                // The `?` after the bracket is no repetition.
                i += if head.starts_with("(?") { 2 } else { 1 };
                continue;
            }
            b')' => {
                let group = open.pop().filter(|_| !open.is_empty());
                let (Some(group), Some(outer)) = (group, open.last_mut()) else {
                    return Err(format!("an unmatched bracket at {i}"));
                };
                outer.repeats |= group.repeats;
                closed = Some(group);
            }
            b'*' | b'+' => repeat(&mut open, atom, i)?,
            b'{' => match count(&pattern[i..]) {
                // Not a count: the library takes it as it is.
                None => {}
                Some((highest, length)) => {
                    if highest.is_some_and(|n| n > MAX_COUNT) {
                        return Err(format!("a count at {i}; supported: up to {MAX_COUNT}"));
                    }
                    repeat(&mut open, atom, i)?;
                    i += length;
                    continue;
                }
            },
            _ => {}
        }
        i += 1;
    }
    Ok(())
}

/// A repetition at `at` of `atom` (of one character, if that is `None`).
fn repeat(open: &mut [Group], atom: Option<Group>, at: usize) -> Result<(), String> {
    if atom.is_some_and(|g| g.repeats) {
        return Err(format!("a repetition of a repetition at {at}"));
    }
    if let Some(group) = open.last_mut() {
        if group.around {
            return Err(format!("a repetition at {at} inside a look-around"));
        }
        group.repeats = true;
    }
    Ok(())
}

/// The index after the character class that starts at `start`.
fn class_end(bytes: &[u8], start: usize) -> Result<usize, String> {
    let mut depth = 0usize;
    let mut i = start;
    // A `]` that comes first is an ordinary character.
    let literal = |i: usize| if bytes.get(i) == Some(&b'^') { i + 1 } else { i };
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 1,
            b'[' => {
                depth += 1;
                if depth > MAX_NESTING {
                    return Err(format!("classes nested more than {MAX_NESTING} deep"));
                }
                let first = literal(i + 1);
                if bytes.get(first) == Some(&b']') {
                    i = first;
                }
            }
            b']' => {
                depth -= 1;
                if depth == 0 {
                    return Ok(i + 1);
                }
            }
            _ => {}
        }
        i += 1;
    }
    Err(format!("an open character class at {start}"))
}

/// The highest number of a count such as `{2,7}` (`None` inside: no end) and its length.
fn count(text: &str) -> Option<(Option<u32>, usize)> {
    let end = text.find('}')?;
    let inner = &text[1..end];
    if inner.is_empty() || !inner.bytes().all(|b| b.is_ascii_digit() || b == b',' || b == b' ') {
        return None;
    }
    let numbers = inner.split(',').map(str::trim).filter(|n| !n.is_empty());
    let highest = numbers.map(|n| n.parse().unwrap_or(u32::MAX)).max();
    Some((highest, end + 1))
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn published_patterns_pass() {
        for pattern in [
            // Llama 3, Qwen 2, GPT-2, GPT-4o, DeepSeek
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[!-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
            r"[a-z&&[^]aeiou]]",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn explosive_patterns_are_refused() {
        let nested = format!("{}a{}", "(".repeat(100), ")".repeat(100));
        let long = "a".repeat(3000);
        let classes = "[".repeat(100);
        for pattern in [
            "",
            "(a+)+$",
            "(a*)*",
            "((a+)b?)*",
            "(?:a|b+)+c",
            "(a{1,9}){9}",
            "a{1000000000}",
            "(a)\\1",
            "(?=a+)b",
            "(?<!a*)b",
            r"\k<x>",
            "(?(1)a|b)",
            "[abc",
            "a)",
            &nested,
            &long,
            &classes,
            "(?=(?:a+))",
            "a{99999999999999999999}",
        ] {
            assert!(check(pattern).is_err(), "{pattern}");
        }
    }
}
