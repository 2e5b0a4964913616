//! What is measured: rows made of the lists on the command line, and the groups that share a cache.

use crate::cli::args::{MOST_THREADS, within};
use crate::run::options::EngineOptions;
use files::{Error, Result};
use numeric::kv::KvTypes;

/// The lists as given.
pub struct Lists {
    pub prompts: Vec<usize>,
    pub gens: Vec<usize>,
    /// Sequences that generate together.
    pub batches: Vec<usize>,
    pub depths: Vec<usize>,
    pub kv_types: Vec<KvTypes>,
    pub threads: Vec<usize>,
}

/// What a row times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// This many tokens at once.
    Prefill(usize),
    /// This many tokens, one by one.
    Decode(usize),
    /// This many tokens of each of this many sequences, which decode together.
    Together(usize, usize),
}

impl Test {
    /// Tokens per repetition.
    pub fn tokens(self) -> usize {
        match self {
            Test::Prefill(n) | Test::Decode(n) => n,
            Test::Together(n, batch) => n * batch,
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub test: Test,
    pub depth: usize,
    pub kv_types: KvTypes,
    pub threads: usize,
}

impl Row {
    /// `pp512`, `tg128`, `tg128 x8`, `tg128 @ d1024`.
    pub fn name(&self) -> String {
        let name = match self.test {
            Test::Prefill(n) => format!("pp{n}"),
            Test::Decode(n) => format!("tg{n}"),
            Test::Together(n, batch) => format!("tg{n} x{batch}"),
        };
        if self.depth == 0 { name } else { format!("{name} @ d{}", self.depth) }
    }

    /// The cache it starts from.
    fn group(&self) -> Group {
        Group {
            depth: self.depth,
            kv_types: self.kv_types,
            threads: self.threads,
            batch: self.batch(),
            slots: self.slots(),
        }
    }

    /// Sequences at once.
    pub fn batch(&self) -> usize {
        match self.test {
            Test::Together(_, batch) => batch,
            _ => 1,
        }
    }

    /// Slots that each sequence needs.
    fn slots(&self) -> usize {
        self.depth + self.test.tokens() / self.batch()
    }
}

/// Rows that start from the same state and so can use the same cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    pub depth: usize,
    pub kv_types: KvTypes,
    pub threads: usize,
    /// Sequences.
    pub batch: usize,
    /// Slots of its longest row.
    pub slots: usize,
}

impl Group {
    /// True for a row of this group.
    pub fn has(&self, row: &Row) -> bool {
        (row.depth, row.kv_types, row.threads, row.batch())
            == (self.depth, self.kv_types, self.threads, self.batch)
    }

    /// The model's options with the group's own.
    pub fn options(&self, base: &EngineOptions) -> EngineOptions {
        EngineOptions {
            kv_types: self.kv_types,
            threads: self.threads,
            max_seq_len: self.slots,
            batch: self.batch,
            ..base.clone()
        }
    }
}

/// The groups of some rows, in the order of the rows.
pub fn groups(rows: &[Row]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|g| g.has(row)) {
            Some(group) => group.slots = group.slots.max(row.slots()),
            None => groups.push(row.group()),
        }
    }
    groups
}

/// Longest sequence of a row, as for `--max-seq-len`.
const MOST_SLOTS: usize = 1 << 24;
const MOST_ROWS: usize = 1000;
const MOST_SEQUENCES: usize = 256;

impl Lists {
    /// Every combination once: threads, then cache types, then depths; prompts before generations.
    pub fn rows(&self) -> Result<Vec<Row>> {
        self.threads.iter().try_for_each(|&n| within("--threads", n, MOST_THREADS).map(drop))?;
        self.batches.iter().try_for_each(|&n| within("--batch", n, MOST_SEQUENCES).map(drop))?;
        let decode = |n: usize, batch: usize| match batch {
            1 => Test::Decode(n),
            _ => Test::Together(n.min(MOST_SLOTS), batch),
        };
        let tests: Vec<Test> = (self.prompts.iter().map(|&n| Test::Prefill(n)))
            .chain(self.gens.iter().flat_map(|&n| self.batches.iter().map(move |&batch| decode(n, batch))))
            .filter(|t| t.tokens() > 0)
            .collect();
        let mut rows: Vec<Row> = Vec::new();
        for &threads in &self.threads {
            for &kv_types in &self.kv_types {
                for &depth in &self.depths {
                    for &test in &tests {
                        let row = Row { test, depth, kv_types, threads };
                        if depth.saturating_add(test.tokens()) > MOST_SLOTS {
                            return Err(Error::Usage(format!(
                                "-p, -n and --depth: {depth} and {} tokens are more than {MOST_SLOTS}",
                                test.tokens()
                            )));
                        }
                        if !rows.contains(&row) {
                            rows.push(row);
                        }
                        if rows.len() > MOST_ROWS {
                            return Err(Error::Usage(format!(
                                "the lists make more than {MOST_ROWS} rows; shorten them"
                            )));
                        }
                    }
                }
            }
        }
        if rows.is_empty() {
            return Err(Error::Usage("nothing to measure; give -p or -n a number above 0".into()));
        }
        Ok(rows)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use numeric::kv::KvType;

    pub fn row(test: Test, depth: usize) -> Row {
        Row { test, depth, kv_types: KvTypes::both(KvType::Q4), threads: 2 }
    }

    fn lists() -> Lists {
        Lists {
            prompts: vec![512],
            gens: vec![128],
            batches: vec![1],
            depths: vec![0],
            kv_types: vec![KvTypes::both(KvType::Q4)],
            threads: vec![2],
        }
    }

    #[test]
    fn names() {
        assert_eq!(row(Test::Prefill(512), 0).name(), "pp512");
        assert_eq!(row(Test::Decode(128), 0).name(), "tg128");
        assert_eq!(row(Test::Decode(128), 1024).name(), "tg128 @ d1024");
        assert_eq!(row(Test::Together(128, 8), 16).name(), "tg128 x8 @ d16");
    }

    #[test]
    fn every_combination_once_in_a_steady_order() {
        let l = Lists { prompts: vec![16, 0, 16], depths: vec![0, 8], threads: vec![1, 2], ..lists() };
        let rows = l.rows().expect("valid lists");
        let names: Vec<String> = rows.iter().map(|r| format!("{} t{}", r.name(), r.threads)).collect();
        let one = ["pp16", "tg128", "pp16 @ d8", "tg128 @ d8"];
        let all: Vec<String> = [1, 2].iter().flat_map(|t| one.map(|n| format!("{n} t{t}"))).collect();
        assert_eq!(names, all);
        let groups = groups(&rows);
        assert_eq!(groups.len(), 4);
        assert_eq!(groups.iter().map(|g| g.slots).collect::<Vec<_>>(), [128, 136, 128, 136]);
        assert!(rows.iter().all(|r| groups.iter().filter(|g| g.has(r)).count() == 1));
    }

    #[test]
    fn sequences_that_decode_together_have_caches_of_their_own() {
        let l = Lists { gens: vec![16], batches: vec![1, 8], depths: vec![4], ..lists() };
        let rows = l.rows().expect("valid lists");
        assert_eq!(
            rows.iter().map(Row::name).collect::<Vec<_>>(),
            ["pp512 @ d4", "tg16 @ d4", "tg16 x8 @ d4"]
        );
        assert_eq!(rows[2].test.tokens(), 128);
        let found: Vec<_> = groups(&rows).iter().map(|g| (g.batch, g.slots)).collect();
        assert_eq!(found, [(1, 516), (8, 20)]);
    }

    #[test]
    fn impossible_lists_are_refused() {
        let refused = |l: Lists| matches!(l.rows(), Err(Error::Usage(_)));
        assert!(refused(Lists { prompts: vec![0], gens: vec![0], ..lists() }));
        assert!(refused(Lists { prompts: vec![usize::MAX], ..lists() }));
        assert!(refused(Lists { depths: vec![usize::MAX], ..lists() }));
        assert!(refused(Lists { threads: vec![0], ..lists() }));
        assert!(
            refused(Lists { batches: vec![0], ..lists() })
                && refused(Lists { batches: vec![257], ..lists() })
        );
        assert!(refused(Lists { gens: vec![usize::MAX], batches: vec![2], ..lists() }));
        assert!(refused(Lists { threads: vec![1025], ..lists() }));
        assert!(refused(Lists { gens: (1..2000).collect(), ..lists() }));
        assert!(!refused(Lists { prompts: vec![], ..lists() }));
    }
}
