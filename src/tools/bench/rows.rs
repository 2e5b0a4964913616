//! Rows of the table: all combinations of the lists on the command line.

use crate::cli::args::{MAX_SEQ_LEN, check_range, check_threads};
use crate::run::options::EngineOptions;
use clap::Args;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};

const MAX_ROWS: usize = 1000;
const MAX_SEQUENCES: usize = 256;

/// One measurement: a prompt, or some decoded tokens; the other number of tokens is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BenchRow {
    /// Length of the prompt in tokens.
    pub n_prompt: usize,
    /// Tokens that each sequence decodes.
    pub n_gen: usize,
    /// Sequences that decode together.
    pub batch: usize,
    /// Slots filled before the run.
    pub depth: usize,
    pub kv_types: KvTypes,
    pub threads: usize,
}

impl BenchRow {
    /// The row's name: `pp512`, `tg128`, `tg128 x8`, `tg128 @ d1024`.
    pub fn name(&self) -> String {
        let test =
            if self.is_decode() { format!("tg{}", self.n_gen) } else { format!("pp{}", self.n_prompt) };
        let batch = if self.batch > 1 { format!(" x{}", self.batch) } else { String::new() };
        let depth = if self.depth > 0 { format!(" @ d{}", self.depth) } else { String::new() };
        test + &batch + &depth
    }

    pub fn is_decode(&self) -> bool {
        self.n_gen > 0
    }

    /// Tokens of one sequence.
    pub fn tokens_per_sequence(&self) -> usize {
        self.n_prompt + self.n_gen
    }

    /// Slots that each sequence needs.
    fn slots_needed(&self) -> usize {
        self.depth.saturating_add(self.tokens_per_sequence())
    }

    /// True if both rows start from the same caches.
    pub fn shares_caches(&self, other: &BenchRow) -> bool {
        let caches = |row: &BenchRow| (row.depth, row.kv_types, row.threads, row.batch);
        caches(self) == caches(other)
    }

    /// The base options with those of the row.
    pub fn with_options(&self, base: &EngineOptions) -> EngineOptions {
        EngineOptions {
            kv_types: self.kv_types,
            threads: self.threads,
            max_seq_len: self.slots_needed(),
            batch: self.batch,
            ..base.clone()
        }
    }
}

/// The longest row of each group that shares caches, in the order of the rows.
pub fn longest_of_groups(rows: &[BenchRow]) -> Vec<BenchRow> {
    let mut groups: Vec<BenchRow> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|group| group.shares_caches(row)) {
            Some(group) if group.slots_needed() < row.slots_needed() => *group = *row,
            Some(_) => {}
            None => groups.push(*row),
        }
    }
    groups
}

/// Lists on the command line; every combination is a row.
#[derive(Args, Clone)]
pub struct RowLists {
    /// Prompt lengths in tokens; 0 is none
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "512", value_name = "LIST")]
    n_prompt: Vec<usize>,
    /// Numbers of tokens to generate; 0 is none
    #[arg(short, long, value_delimiter = ',', default_value = "128", value_name = "LIST")]
    n_gen: Vec<usize>,
    /// Numbers of sequences that each generate -n tokens, together; tokens/s counts all of them
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "LIST")]
    batch: Vec<usize>,
    /// Numbers of tokens in the context before each run
    #[arg(
        short,
        long,
        visible_alias = "n-depth",
        value_delimiter = ',',
        default_value = "0",
        value_name = "LIST"
    )]
    depth: Vec<usize>,
    /// Data types of the KV cache: f32, f16, q8, q6, q5 or q4
    #[arg(long, value_delimiter = ',', default_value = "q4", value_name = "LIST")]
    kv_type: Vec<KvType>,
    /// Numbers of CPU threads [default: one per core used]
    #[arg(short, long, value_delimiter = ',', value_name = "LIST")]
    threads: Vec<usize>,
}

impl RowLists {
    /// All combinations without duplicates: by threads, then cache types, then depths; prompts before generations.
    pub fn combine_rows(&self, default_threads: usize) -> Result<Vec<BenchRow>> {
        let threads = if self.threads.is_empty() { &[default_threads][..] } else { &self.threads };
        threads.iter().try_for_each(|&n| check_threads(n).map(drop))?;
        self.batch.iter().try_for_each(|&n| check_range("--batch", n, MAX_SEQUENCES).map(drop))?;
        let prompts = self.n_prompt.iter().map(|&n| (n, 0, 1));
        let gens = self.n_gen.iter().flat_map(|&n| self.batch.iter().map(move |&batch| (0, n, batch)));
        let tests: Vec<_> = prompts.chain(gens).filter(|(prompt, tokens, _)| prompt + tokens > 0).collect();
        let caches = threads.iter().flat_map(|&threads| {
            let types = self.kv_type.iter();
            types.flat_map(move |&kv_type| self.depth.iter().map(move |&depth| (threads, kv_type, depth)))
        });
        let mut rows: Vec<BenchRow> = Vec::new();
        for (threads, kv_type, depth) in caches {
            for &(n_prompt, n_gen, batch) in &tests {
                let row =
                    BenchRow { n_prompt, n_gen, batch, depth, kv_types: KvTypes::same(kv_type), threads };
                if row.slots_needed() > MAX_SEQ_LEN {
                    return Err(Error::Usage(format!(
                        "-p, -n and --depth: {depth} and {} tokens are more than {MAX_SEQ_LEN}",
                        row.tokens_per_sequence()
                    )));
                }
                if !rows.contains(&row) {
                    rows.push(row);
                }
                if rows.len() > MAX_ROWS {
                    let message = format!("the lists make more than {MAX_ROWS} rows; shorten them");
                    return Err(Error::Usage(message));
                }
            }
        }
        if rows.is_empty() {
            return Err(Error::Usage("nothing to measure; set -p or -n to a number above 0".into()));
        }
        Ok(rows)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A prompt without depth, of two threads.
    pub fn prompt(n_prompt: usize) -> BenchRow {
        let kv_types = KvTypes::same(KvType::Q4);
        BenchRow { n_prompt, n_gen: 0, batch: 1, depth: 0, kv_types, threads: 2 }
    }

    pub fn decode(n_gen: usize, depth: usize) -> BenchRow {
        BenchRow { n_prompt: 0, n_gen, depth, ..prompt(0) }
    }

    fn lists() -> RowLists {
        let (n_prompt, n_gen, threads) = (vec![512], vec![128], vec![2]);
        RowLists { n_prompt, n_gen, batch: vec![1], depth: vec![0], kv_type: vec![KvType::Q4], threads }
    }

    #[test]
    fn every_combination_comes_once_in_a_steady_order() {
        let l = RowLists { n_prompt: vec![16, 0, 16], depth: vec![0, 8], threads: vec![1, 2], ..lists() };
        let rows = l.combine_rows(1).expect("valid lists");
        let names: Vec<String> = rows.iter().map(|r| format!("{} t{}", r.name(), r.threads)).collect();
        let one = ["pp16", "tg128", "pp16 @ d8", "tg128 @ d8"];
        let all: Vec<String> = [1, 2].iter().flat_map(|t| one.map(|n| format!("{n} t{t}"))).collect();
        assert_eq!(names, all);
        let groups = longest_of_groups(&rows);
        assert_eq!(groups.iter().map(BenchRow::slots_needed).collect::<Vec<_>>(), [128, 136, 128, 136]);
        assert!(rows.iter().all(|r| groups.iter().filter(|g| g.shares_caches(r)).count() == 1));
    }

    #[test]
    fn sequences_that_decode_together_have_caches_of_their_own() {
        let l = RowLists { n_gen: vec![16], batch: vec![1, 8], depth: vec![4], ..lists() };
        let rows = l.combine_rows(1).expect("valid lists");
        let names: Vec<String> = rows.iter().map(BenchRow::name).collect();
        assert_eq!(names, ["pp512 @ d4", "tg16 @ d4", "tg16 x8 @ d4"]);
        let found: Vec<_> = longest_of_groups(&rows).iter().map(|g| (g.batch, g.slots_needed())).collect();
        assert_eq!(found, [(1, 516), (8, 20)]);
    }

    #[test]
    fn impossible_lists_are_refused() {
        let refused = |l: RowLists| matches!(l.combine_rows(1), Err(Error::Usage(_)));
        for l in [
            RowLists { n_prompt: vec![0], n_gen: vec![0], ..lists() },
            RowLists { n_prompt: vec![usize::MAX], ..lists() },
            RowLists { depth: vec![usize::MAX], ..lists() },
            RowLists { threads: vec![0], ..lists() },
            RowLists { threads: vec![1025], ..lists() },
            RowLists { batch: vec![0], ..lists() },
            RowLists { batch: vec![257], ..lists() },
            RowLists { n_gen: vec![usize::MAX], batch: vec![2], ..lists() },
            RowLists { n_gen: (1..2000).collect(), ..lists() },
        ] {
            assert!(refused(l));
        }
        assert!(!refused(RowLists { n_prompt: vec![], ..lists() }));
    }
}
