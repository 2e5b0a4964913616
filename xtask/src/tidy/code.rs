//! Lines of code of a Rust or OpenCL file. No lexer is needed: rustfmt indents the last line of an item like its first.

/// The numbered lines that are neither blank nor comments nor tests.
pub fn code_lines(text: &str) -> Vec<(usize, &str)> {
    let mut comment = false;
    let lines = text.lines().enumerate().filter(|(_, line)| {
        let line = line.trim();
        let skipped = comment || line.is_empty() || line.starts_with("//") || line.starts_with("/*");
        comment = (comment || line.starts_with("/*")) && !line.contains("*/");
        !skipped
    });
    let lines: Vec<(usize, &str)> = lines.map(|(i, line)| (i + 1, line)).collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(&(number, line)) = lines.get(at) {
        let is_test =
            ["#[cfg(test)]", "#[cfg(all(test", "#[test]"].iter().any(|t| line.trim().starts_with(t));
        if is_test {
            let item = lines[at..].iter().position(|(_, line)| !line.trim().starts_with("#["));
            at += item.map_or(lines.len(), |item| item + item_length(&lines[at + item..]));
        } else {
            found.push((number, line));
            at += 1;
        }
    }
    found
}

/// The functions among lines of code: number of the first line, name, length in lines.
pub fn functions<'a>(lines: &[(usize, &'a str)]) -> Vec<(usize, &'a str, usize)> {
    let function = |(at, &(number, line)): (usize, &(usize, &'a str))| {
        Some((number, declared_name(line, &["fn"])?, item_length(&lines[at..])))
    };
    lines.iter().enumerate().filter_map(function).collect()
}

/// The name that a line declares with one of these keywords.
pub fn declared_name<'a>(line: &'a str, keywords: &[&str]) -> Option<&'a str> {
    let is_modifier = |word: &&str| {
        ["const", "async", "unsafe", "extern", "\"C\""].contains(word) || word.starts_with("pub")
    };
    let mut words = line.split_whitespace().skip_while(is_modifier);
    words.next().filter(|word| keywords.contains(word))?;
    let name = words.next()?.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
    (!name.is_empty()).then_some(name)
}

/// The length in lines of the item that begins at the first one.
fn item_length(lines: &[(usize, &str)]) -> usize {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let Some((_, first)) = lines.first() else { return 0 };
    let is_end = |(at, (_, line)): &(usize, &(usize, &str))| {
        indent(line) == indent(first)
            && (line.trim().starts_with('}') || line.ends_with(';') || *at == 0 && line.ends_with('}'))
    };
    lines.iter().enumerate().find(is_end).map_or(lines.len(), |(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_tests_are_not_code() {
        let text = "//! A.\n\nuse a;\n#[cfg(test)]\nuse b::{\n    c,\n};\n/* x\n y */\npub fn f(\n    x: u8,\n) -> u8 {\n    // why\n    x\n}\n\
                    #[cfg(test)]\nmod tests {\n    #[test]\n    fn t() {}\n}\nconst A: u8 = 1;\n";
        let lines = code_lines(text);
        let numbers: Vec<usize> = lines.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [3, 10, 11, 12, 14, 15, 21]);
        assert_eq!(functions(&lines), [(10, "f", 5)]);
    }
}
