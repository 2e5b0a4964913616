//! `cargo xtask parity`: the engine's logits and text against the reference results of transformers,
//! one build for each model.

pub mod compare;
pub mod engine;
pub mod execution_paths;
mod gguf;
mod key_bias;
mod lora;
mod opencl;
pub mod reference;

use crate::error::{AtPath, Error, Result};
use crate::table::{format_table, to_cells};
use crate::tally::Tally;
use crate::{build, command};
use clap::Args;
use compare::{TOLERANCE, is_beginning, is_text, largest_difference, max_abs, wrong_steps};
use engine::{Engine, Variant};
use files::config::ModelConfig;
use reference::{PromptCase, Reference, TextCase};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A greedy step is compared where the margin is above this share of the largest logit: twice the
/// error that [`TOLERANCE`] allows.
pub const DECIDABLE: f64 = 2.0 * TOLERANCE as f64;
pub const FLOAT: &[&str] = &["--weight-type", "f32", "--kv-type", "f32"];
const QUANTISED: &[&str] = &["--weight-type", "q4_0"];
/// Models with what Llama's and Qwen 3's have not: LayerNorm and no gate, windows, delta nets, convolutions and experts,
/// embeddings of each layer, Mamba2.
const FAMILIES: [&str; 6] = [
    "m8-gpt2-bare-f32",
    "m9-gemma3-270m-bf16",
    "m20-qwen35-bf16",
    "m21-lfm2moe-bf16",
    "m22-gemma4-e2b-bf16",
    "m34-falconh1-bf16",
];

#[derive(Args)]
pub struct ParityArgs {
    /// The models to check [default: all that have reference results]
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
}

pub fn run(args: &ParityArgs) -> Result<()> {
    let tally = check(&args.models)?;
    println!("parity: {} passed, {} failed", tally.passed, tally.failed);
    if tally.failed > 0 {
        return Err(Error::Failed(format!("parity: {} checks failed", tally.failed)));
    }
    Ok(())
}

/// Checks the named models, or all that have reference results, and prints a table.
pub fn check(names: &[String]) -> Result<Tally> {
    let dirs = if names.is_empty() {
        all_models()?
    } else {
        names.iter().map(|name| build::model_dir(name)).collect::<Result<Vec<_>>>()?
    };
    let (mut rows, mut total) = (Vec::new(), Tally::default());
    let groups = group_by_config(dirs)?;
    // The next model is built while one is checked.
    std::thread::scope(|scope| {
        let (send, built) = std::sync::mpsc::sync_channel(0);
        let groups = &groups;
        scope.spawn(move || {
            groups.iter().all(|(dir, alike)| send.send(ModelCheck::new(dir, alike)).is_ok());
        });
        for ((dir, _), built) in groups.iter().zip(built) {
            let mut tally = Tally::default();
            match built.and_then(ModelCheck::check) {
                Ok(row) => {
                    row.tallies.iter().for_each(|t| tally += t.clone());
                    rows.push(row.cells());
                }
                // A model that cannot be read or built must not hide the others.
                Err(e) => tally.count_quietly(&dir.display().to_string(), Err(e)),
            }
            total += tally;
        }
    });
    let titles = ["model"].into_iter().chain(COLUMNS).chain(["largest relative error", "q4_0 rms error"]);
    print!("{}", format_table(to_cells(titles), rows.into_iter()));
    Ok(total)
}

/// The digests of the families that have a forward pass of their own kind, computed on 64-bit Arm: built for `target`,
/// run by `emulator`.
pub fn check_families(target: &str, emulator: &'static str) -> Result<Tally> {
    let mut tally = Tally::default();
    for name in FAMILIES {
        let dir = build::model_dir(name)?;
        let reference = Reference::load(&dir)?;
        let place = format!("{name}-{target}");
        let engine = Engine::with_program(&build::build_unoptimised_for(target, &dir)?, &dir, &place)?
            .emulated(emulator);
        let run = engine.logits(&reference.longest_case().ids, reference.vocab, Variant::with(QUANTISED));
        tally.count_quietly(
            &place,
            run.and_then(|bytes| execution_paths::check_golden(&reference.name, &bytes)),
        );
    }
    Ok(tally)
}

fn all_models() -> Result<Vec<PathBuf>> {
    let fixtures = command::root().join("tests/fixtures/models");
    let entries = fs::read_dir(&fixtures).at(&fixtures)?;
    let mut dirs: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    dirs.sort();
    dirs.push(command::root().join("models/story"));
    dirs.retain(|dir| Reference::exists(dir));
    // One build from the first file of each model, unless the program of its checkpoint runs the files.
    let mut models = BTreeSet::new();
    for file in gguf::files()? {
        if models.insert(file.model.clone()) && file.fits_checkpoint()? != Some(true) {
            dirs.push(file.path);
        }
    }
    Ok(dirs)
}

/// Puts models with equal configs together: the first, and those that its program runs too.
fn group_by_config(paths: Vec<PathBuf>) -> Result<Vec<(PathBuf, Vec<PathBuf>)>> {
    let mut groups: Vec<(Option<ModelConfig>, PathBuf, Vec<PathBuf>)> = Vec::new();
    for path in paths {
        let file = path.join("config.json");
        let config = if path.is_dir() {
            Some(ModelConfig::parse(&fs::read_to_string(&file).at(&file)?).at(&file)?)
        } else {
            None
        };
        match groups.iter_mut().find(|(first, ..)| config.is_some() && *first == config) {
            Some((_, _, alike)) => alike.push(path),
            None => groups.push((config, path, Vec::new())),
        }
    }
    Ok(groups.into_iter().map(|(_, first, alike)| (first, alike)).collect())
}

/// Results of one model.
#[derive(Default)]
struct ModelRow {
    model: String,
    /// By [`Column`].
    tallies: [Tally; COLUMNS.len()],
    largest: f32,
    quantised_rms: f64,
}

/// Columns of the table, each with a tally.
#[derive(Clone, Copy)]
enum Column {
    Logits,
    Greedy,
    Text,
    Bits,
    Quantised,
    OpenCl,
    Paths,
    Gguf,
}

const COLUMNS: [&str; 8] = ["logits", "greedy", "text", "same bits", "q4_0", "OpenCL", "paths", "GGUF"];

impl ModelRow {
    fn count(&mut self, column: Column, outcome: Result<()>) {
        self.tallies[column as usize].count_quietly(&self.model, outcome);
    }

    fn add(&mut self, column: Column, tally: Tally) {
        self.tallies[column as usize] += tally;
    }

    fn cells(&self) -> Vec<String> {
        let tallies = self.tallies.iter().map(|tally| tally.to_string());
        let errors = [format!("{:.1e}", self.largest), format!("{:.1e}", self.quantised_rms)];
        [self.model.clone()].into_iter().chain(tallies).chain(errors).collect()
    }
}

/// A model's program, ready to be checked.
struct ModelCheck {
    engine: Engine,
    /// `None` for a GGUF file, of which the program is built too.
    reference: Option<Reference>,
    name: String,
    /// The comparison of its cache with that of transformers, where there is one.
    past: Option<Result<()>>,
    /// Models with the same config, of which the logits are checked.
    alike: Vec<PathBuf>,
}

impl ModelCheck {
    fn new(dir: &Path, alike: &[PathBuf]) -> Result<ModelCheck> {
        let reference = if dir.is_file() { None } else { Some(Reference::load(dir)?) };
        let file = dir.file_name().unwrap_or_default().to_string_lossy();
        let stem = file.split('.').next().unwrap_or_default();
        let name = reference.as_ref().map_or(stem, |r| &r.name).to_string();
        let place = if reference.is_some() { name.clone() } else { format!("{name}-gguf") };
        let engine = Engine::build(dir, &place)?;
        let past = dir.join("past_key_values.json").is_file().then(|| build::compare_past_key_values(dir));
        Ok(ModelCheck { engine, reference, name, past, alike: alike.to_vec() })
    }

    fn check(self) -> Result<ModelRow> {
        let ModelCheck { engine, reference, name, past, alike } = self;
        let Some(reference) = reference else {
            let mut row = ModelRow { model: format!("{name} (GGUF)"), ..ModelRow::default() };
            row.add(Column::Gguf, gguf::check(&engine, &name)?);
            return Ok(row);
        };
        let mut row = ModelRow { model: name, ..ModelRow::default() };
        for case in &reference.cases {
            check_case(&engine, &reference, case, &mut row);
        }
        for text in &reference.texts {
            row.count(Column::Text, check_text(&engine, text, reference.scale()));
            if text.stop.is_some_and(|stop| stop > 0) {
                row.count(Column::Text, check_stop(&engine, text, reference.scale()));
            }
        }
        if reference.eos.is_some() {
            row.count(Column::Greedy, check_eos(&engine, &reference));
        }
        for dir in alike {
            let (engine, reference) = (engine.with_model(&dir), Reference::load(&dir)?);
            for case in &reference.cases {
                check_case(&engine, &reference, case, &mut row);
            }
        }
        if let Some(past) = past {
            row.count(Column::Logits, past);
        }
        if let Some(adapted) = lora::check(&engine, &reference) {
            row.count(Column::Logits, adapted);
        }
        check_bits(&engine, &reference, &mut row);
        check_quantised(&engine, &reference, &mut row);
        row.add(Column::Quantised, key_bias::check(&engine, &reference, reference.longest_case()));
        row.add(Column::Paths, execution_paths::check(&engine, &reference));
        row.add(Column::OpenCl, opencl::check(&engine, &reference));
        row.add(Column::Gguf, gguf::check(&engine, &reference.name)?);
        Ok(row)
    }
}

/// Logits of a prompt; then the prompt with its greedy continuation, whose first rows must be the same
/// bits as without it.
fn check_case(engine: &Engine, reference: &Reference, case: &PromptCase, row: &mut ModelRow) {
    let vocab = reference.vocab;
    let alone = engine.logits(&case.ids, vocab, Variant::with(FLOAT));
    // The last greedy id is not fed: nothing was computed from it.
    let fed = case.greedy_ids.len().saturating_sub(1);
    let longer_ids = [&case.ids[..], &case.greedy_ids[..fed]].concat();
    let longer = engine.logits(&longer_ids, vocab, Variant::with(FLOAT));
    let same = match (&alone, &longer) {
        (Ok(alone), Ok(longer)) => {
            check_same_bits(alone, &longer[..alone.len()], vocab, "in a longer prompt")
        }
        // Reported below.
        _ => Err(Error::Failed(format!("{}: no two runs to compare", case.name))),
    };
    row.count(Column::Bits, same);
    let outcome = alone.and_then(|bytes| {
        let found = reference::to_floats(&bytes);
        let found = &found[found.len() - case.logits.len()..];
        let outcome = check_within(&case.name, found, &case.logits, vocab);
        row.largest = row.largest.max(outcome.0);
        outcome.1
    });
    row.count(Column::Logits, outcome);
    let outcome = longer.and_then(|bytes| {
        let found = reference::to_floats(&bytes);
        let found = &found[(case.ids.len() - 1) * vocab..];
        let scale = max_abs(case.greedy_logits.as_deref().unwrap_or(&case.logits)).max(1.0);
        let threshold = DECIDABLE * f64::from(scale);
        check_steps(&case.name, &wrong_steps(found, &case.greedy_ids, &case.margins, threshold))?;
        let Some(expected) = &case.greedy_logits else { return Ok(()) };
        let outcome = check_within(&format!("{} greedy", case.name), found, expected, vocab);
        row.largest = row.largest.max(outcome.0);
        outcome.1
    });
    row.count(Column::Greedy, outcome);
}

/// Computes the relative error, and whether it is allowed.
fn check_within(name: &str, found: &[f32], expected: &[f32], vocab: usize) -> (f32, Result<()>) {
    let difference = largest_difference(found, expected, vocab);
    let outcome = if difference.is_within(TOLERANCE) {
        Ok(())
    } else {
        Err(Error::Failed(format!("{name}: logits: {difference}, allowed {TOLERANCE:.0e}")))
    };
    (difference.relative, outcome)
}

pub fn check_steps(name: &str, wrong: &[(usize, u32, u32)]) -> Result<()> {
    match wrong.first() {
        None => Ok(()),
        Some((step, found, id)) => Err(Error::Failed(format!(
            "{name}: greedy step {step}: id {found} instead of {id} ({} steps differ)",
            wrong.len()
        ))),
    }
}

fn check_same_bits(a: &[u8], b: &[u8], vocab: usize, what: &str) -> Result<()> {
    match a.iter().zip(b).position(|(a, b)| a != b) {
        None if a.len() == b.len() => Ok(()),
        None => Err(Error::Failed(format!("{} bytes instead of {} {what}", b.len(), a.len()))),
        Some(at) => Err(Error::Failed(format!(
            "other bits {what}, first in row {} id {}",
            at / 4 / vocab,
            at / 4 % vocab
        ))),
    }
}

/// Counts the tokens of a text's continuation that are sure: up to the first step too close to call, and up
/// to the first stop token (whether its own text is shown is not the reference's to say).
fn count_sure_tokens(case: &TextCase, scale: f32) -> usize {
    let threshold = DECIDABLE * f64::from(scale.max(1.0));
    let decidable = case.margins.iter().take_while(|m| **m > threshold).count();
    decidable.min(case.stop.unwrap_or(usize::MAX))
}

/// The program's continuation of the text, computed in f32.
fn continue_text(engine: &Engine, case: &TextCase, count: usize, flags: &[&str]) -> Result<Vec<u8>> {
    engine.generate(&case.text, &[&["--num-tokens", &count.to_string()], FLOAT, flags].concat())
}

fn check_text(engine: &Engine, case: &TextCase, scale: f32) -> Result<()> {
    let count = count_sure_tokens(case, scale);
    let printed = continue_text(engine, case, count, &["--ignore-eos"])?;
    let whole = count == case.margins.len();
    let equal =
        if whole { is_text(&printed, &case.greedy_text) } else { is_beginning(&printed, &case.greedy_text) };
    if equal {
        return Ok(());
    }
    let printed = String::from_utf8_lossy(&printed);
    Err(Error::Failed(format!(
        "{}: {printed:?} instead of {:?} ({count} tokens)",
        case.name, case.greedy_text
    )))
}

/// A generation that honours stop tokens prints what comes before the first, and no more.
fn check_stop(engine: &Engine, case: &TextCase, scale: f32) -> Result<()> {
    let stop = case.stop.unwrap_or(0);
    if count_sure_tokens(case, scale) < stop {
        return Ok(());
    }
    let before = continue_text(engine, case, stop, &["--ignore-eos"])?;
    let stopped = continue_text(engine, case, case.margins.len(), &[])?;
    if before == stopped {
        return Ok(());
    }
    let (before, stopped) = (String::from_utf8_lossy(&before), String::from_utf8_lossy(&stopped));
    Err(Error::Failed(format!("{}: up to the stop token {stopped:?} instead of {before:?}", case.name)))
}

fn check_eos(engine: &Engine, reference: &Reference) -> Result<()> {
    let Some(case) = &reference.eos else { return Ok(()) };
    let fed = case.greedy_ids.len().saturating_sub(1);
    let ids = [&case.ids[..], &case.greedy_ids[..fed]].concat();
    let bytes = engine.logits(&ids, reference.vocab, Variant::with(FLOAT))?;
    let found = reference::to_floats(&bytes);
    let found = &found[(case.ids.len() - 1) * reference.vocab..];
    let margins = vec![case.min_margin; case.greedy_ids.len()];
    let threshold = DECIDABLE * f64::from(reference.scale().max(1.0));
    check_steps("eos prompt", &wrong_steps(found, &case.greedy_ids, &margins, threshold))
}

/// One and two threads, and scalar code, give the same bytes: with float and with quantised weights.
fn check_bits(engine: &Engine, reference: &Reference, row: &mut ModelRow) {
    let case = reference.longest_case();
    for (weights, flags) in [("f32", FLOAT), ("q4_0", QUANTISED)] {
        let run = |threads, scalar| {
            let flags = [flags, &["--threads", threads]].concat();
            engine.logits(&case.ids, reference.vocab, Variant { flags: &flags, scalar, ..Variant::default() })
        };
        let one = run("1", false);
        for (threads, scalar, what) in
            [("2", false, "on two threads instead of one"), ("1", true, "with ANTIGRAVITY_SIMD=scalar")]
        {
            let outcome = match &one {
                Ok(one) => run(threads, scalar).and_then(|other| {
                    check_same_bits(one, &other, reference.vocab, &format!("{what}, {weights} weights"))
                }),
                Err(e) => Err(Error::Failed(e.to_string())),
            };
            row.count(Column::Bits, outcome);
        }
    }
}

/// Quantised weights and the default KV type: no reference is near enough to compare with, so the logits must be finite
/// and those of the day before, and the table shows how far they are from the unquantised model's.
fn check_quantised(engine: &Engine, reference: &Reference, row: &mut ModelRow) {
    let case = reference.longest_case();
    let run = engine.logits(&case.ids, reference.vocab, Variant::with(QUANTISED));
    let outcome = run.and_then(|bytes| {
        let found = reference::to_floats(&bytes);
        row.quantised_rms = compare::rms_difference(&found[found.len() - case.logits.len()..], &case.logits);
        match found.iter().position(|x| !x.is_finite()) {
            None => execution_paths::check_golden(&reference.name, &bytes),
            Some(at) => Err(Error::Failed(format!(
                "{}: q4_0: row {} id {} is {}",
                case.name,
                at / reference.vocab,
                at % reference.vocab,
                found[at]
            ))),
        }
    });
    row.count(Column::Quantised, outcome);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_sure_up_to_a_close_step_or_a_stop_and_other_bits_are_located() {
        let mut case = TextCase {
            name: "t".into(),
            text: "t".into(),
            greedy_text: "u".into(),
            margins: vec![1.0, 1.0, 1e-5, 1.0],
            stop: None,
        };
        assert_eq!(count_sure_tokens(&case, 10.0), 2);
        case.stop = Some(1);
        assert_eq!(count_sure_tokens(&case, 10.0), 1);
        let (a, mut b) = ([0u8; 24], [0u8; 24]);
        assert!(
            check_same_bits(&a, &b, 3, "here").is_ok() && check_same_bits(&a, &b[..12], 3, "here").is_err()
        );
        b[21] = 1;
        let e = check_same_bits(&a, &b, 3, "here").unwrap_err().to_string();
        assert_eq!(e, "other bits here, first in row 1 id 2");
    }

    #[test]
    fn every_model_with_results_is_found() {
        let names = all_models().unwrap();
        // Those with a checkpoint, and those whose GGUF file is for another program than that, or is alone.
        assert_eq!(
            (names.iter().filter(|n| n.is_dir()).count(), names.iter().filter(|n| n.is_file()).count()),
            (42, 3)
        );
        assert_eq!(group_by_config(names).unwrap().len(), 42);
        assert!(gguf::files().unwrap().iter().all(|file| file.path.is_file()));
    }
}
