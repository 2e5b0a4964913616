//! `cargo xtask bench --count`: instructions executed for a token on emulated Arm cores.
//!
//! Nothing is timed, so the counts are the same on every machine and however busy it is. They are differences of whole
//! runs: loading, the tokenizer and the threads' start cancel out.

mod emulator;

use crate::args::{Args, Flag};
use crate::error::{Error, Result};
use crate::table::{cells, fixed, markdown};
use crate::targets::target_dir;
use crate::{build, sh, synth, test};
use emulator::Emulator;
use files::atomic_file;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

pub const FLAGS: &[Flag] = &[
    Flag::switch("--count", "instead: instructions for a token on emulated Arm cores (QEMU, QEMU_PLUGIN)"),
    Flag::valued("--formats", "LIST", "of --count: q4_0, q8_0, q4_k, q5_k, q6_k [q4_0]"),
    Flag::valued("--depth", "N", "of --count: tokens before those that are counted, a multiple of 128 [128]"),
    Flag::valued("--kv-type", "TYPE", "of --count: f32, f16, q8, q4 [f16]"),
    Flag::valued("--programs", "A,B", "of --count: Arm programs for its models of 2 and 3 layers [built]"),
    Flag::switch("--build-qemu", "of --count: make QEMU and QEMU_PLUGIN from the distribution's source"),
];

/// The cores: what they have beyond NEON, as qemu names them.
const CPUS: [(&str, &str); 3] =
    [("i8mm", "max,sve=off,pauth-impdef=on"), ("dotprod", "neoverse-n1"), ("NEON", "cortex-a53")];
/// Layers of the models. The last layer of a prompt is computed only where it is read, so a full layer is the
/// difference between the two.
const LAYERS: [usize; 2] = [2, 3];
/// More tokens in the longer prompt; and tokens of the shorter one, with the one that begins every text, where nobody says
/// how many.
const MORE: usize = 128;
/// More decoded tokens.
const DECODED: usize = 8;
/// Positions that the models have.
const POSITIONS: usize = 4096;

/// Whether `--count` was given; its flags mean nothing without it.
pub fn asked(args: &Args, theirs: &[String]) -> Result<bool> {
    let ours = ["--formats", "--depth", "--kv-type", "--programs"]
        .into_iter()
        .find(|flag| args.value(flag).is_some());
    let ours = ours.or_else(|| args.has("--build-qemu").then_some("--build-qemu"));
    let others = ["--device", "--serial", "--model", "--runs", "--cool-down"];
    let other = others.into_iter().find(|flag| args.value(flag).is_some());
    match (args.has("--count"), ours, other) {
        (false, Some(flag), _) => {
            Err(Error::Usage(format!("{flag}: belongs to --count, which is not there")))
        }
        (true, _, Some(flag)) => {
            Err(Error::Usage(format!("{flag}: not with --count, whose models are its own")))
        }
        (true, ..) if !theirs.is_empty() => Err(Error::Usage("--count: takes no flags after --".into())),
        (count, ..) => Ok(count),
    }
}

pub fn run(args: &Args) -> Result<()> {
    let formats = formats(args.value("--formats").unwrap_or("q4_0"))?;
    let depth = depth(args.value("--depth"))?;
    let kv_type = kv_type(args.value("--kv-type").unwrap_or("f16"))?;
    let emulator = if args.has("--build-qemu") { Emulator::built()? } else { Emulator::of_environment()? };
    let programs = match args.value("--programs") {
        Some(list) => given(list)?,
        None => [program(LAYERS[0])?, program(LAYERS[1])?],
    };
    let mut rows = Vec::new();
    for format in &formats {
        let models = [model(LAYERS[0], format)?, model(LAYERS[1], format)?];
        for (program, model) in programs.iter().zip(&models) {
            emulator.pack(CPUS[0].1, program, model)?;
        }
        for (set, cpu) in CPUS {
            eprintln!("{format} with {set}: qemu's {cpu}");
            let count = |i: usize, prompt, decoded| {
                emulator.count(cpu, &programs[i], &generate(&models[i], prompt, decoded, kv_type))
            };
            let (short, long) = (count(0, depth, 1)?, count(0, depth + MORE, 1)?);
            let (short_3, long_3) = (count(1, depth, 1)?, count(1, depth + MORE, 1)?);
            let counts =
                Counts { short, long, decoded: count(0, depth, 1 + DECODED)?, deeper: [short_3, long_3] };
            rows.push(counts.row(format, set));
            eprint!("{}", table(&rows[rows.len() - 1..]));
        }
    }
    print!("{}", table(&rows));
    if let Some(file) = args.value("--json") {
        let cpus = CPUS.map(|(_, cpu)| cpu);
        let result = json!({"schema": 1, "cpus": cpus, "depth": depth, "kv_type": kv_type, "rows": rows});
        let text = format!("{result:#}\n");
        atomic_file::write(Path::new(file), text.as_bytes()).map_err(|e| Error::at(Path::new(file), e))?;
        eprintln!("results: {file}");
    }
    Ok(())
}

/// Instructions of whole runs on one core, with one format.
struct Counts {
    /// The model of two layers: the prompt, a longer one, more decoded tokens.
    short: u64,
    long: u64,
    decoded: u64,
    /// That of three layers: the prompt, and the longer one.
    deeper: [u64; 2],
}

impl Counts {
    /// Millions of instructions: for a decoded token and for a token of a prompt, of the model of two layers, and for
    /// a token of a prompt and full layer.
    fn row(&self, format: &str, set: &str) -> Value {
        let each = |more: u64, less: u64, tokens: usize| (more as f64 - less as f64) / tokens as f64 / 1e6;
        let prompt = each(self.long, self.short, MORE);
        let layer = each(self.deeper[1], self.deeper[0], MORE) - prompt;
        let decoded = each(self.decoded, self.short, DECODED);
        json!({"format": format, "set": set, "decoded": decoded, "prompt": prompt, "layer": layer})
    }
}

fn table(rows: &[Value]) -> String {
    let titles =
        ["million instructions", "set", "decoded token", "prompt token", "prompt token and full layer"];
    let line = |row: &Value| {
        let text = |key: &str| row[key].as_str().unwrap_or_default().to_string();
        let number = |key: &str| fixed(row[key].as_f64(), 2);
        vec![text("format"), text("set"), number("decoded"), number("prompt"), number("layer")]
    };
    markdown(cells(titles), rows.iter().map(line))
}

/// The formats of a list; each is checked before anything is built.
fn formats(list: &str) -> Result<Vec<String>> {
    let known = synth::mixes();
    let named = |name: &str| match known.contains(&name) {
        true => Ok(name.to_string()),
        false => Err(Error::Usage(format!("--formats {name}: use {}", known.join(", ")))),
    };
    list.split(',').map(|name| named(name.trim())).collect()
}

/// How many tokens come before those that are counted.
fn depth(given: Option<&str>) -> Result<usize> {
    let Some(given) = given else { return Ok(MORE) };
    // With room for the longer prompt and what is decoded.
    let most = POSITIONS - 2 * MORE;
    let fits = |depth: &usize| (MORE..=most).contains(depth) && depth.is_multiple_of(MORE);
    let wrong = || Error::Usage(format!("--depth {given}: use a multiple of {MORE} from {MORE} to {most}"));
    given.parse().ok().filter(fits).ok_or_else(wrong)
}

/// A type of the cache.
fn kv_type(name: &str) -> Result<&str> {
    let known = ["f32", "f16", "q8", "q4"];
    let wrong = || Error::Usage(format!("--kv-type {name}: use one of {}", known.join(", ")));
    if known.contains(&name) { Ok(name) } else { Err(wrong()) }
}

/// What `--programs` names.
fn given(list: &str) -> Result<[PathBuf; 2]> {
    let programs: Vec<PathBuf> = list.split(',').map(PathBuf::from).collect();
    if let Some(missing) = programs.iter().find(|program| !program.is_file()) {
        return Err(Error::Usage(format!("--programs: {} is no file", missing.display())));
    }
    let wrong =
        |_| Error::Usage(format!("--programs {list}: give two, for 2 and for 3 layers, with a comma"));
    programs.try_into().map_err(wrong)
}

/// Where models and programs are kept.
fn folder(layers: usize) -> PathBuf {
    target_dir().join("count").join(layers.to_string())
}

/// The program for the model of so many layers, of its own name: the next build replaces what this one makes.
fn program(layers: usize) -> Result<PathBuf> {
    let (shape, program) = (shape(layers)?, folder(layers).join("antigravity"));
    let built = build::for_target(test::arm::TARGET, Some(&shape))?;
    fs::copy(&built, &program).map_err(|e| Error::at(&program, e))?;
    Ok(program)
}

/// The model's folder, with its configuration: layers of Llama 3.2 1B, and a small vocabulary.
fn shape(layers: usize) -> Result<PathBuf> {
    let (dir, source) = (folder(layers), sh::root().join("models/llama3.2-1b/config.json"));
    let mut config = crate::json::read(&source)?;
    config["num_hidden_layers"] = layers.into();
    config["vocab_size"] = 4096.into();
    config["bos_token_id"] = 4093.into();
    config["eos_token_id"] = 4094.into();
    config["max_position_embeddings"] = POSITIONS.into();
    // Frequencies that are not scaled: the program is the same for a GGUF file and for a checkpoint.
    config.as_object_mut().and_then(|fields| fields.remove("rope_scaling"));
    fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
    let file = dir.join("config.json");
    // Unchanged, it does not build the program again.
    let text = format!("{config:#}\n");
    if fs::read_to_string(&file).ok().as_ref() != Some(&text) {
        fs::write(&file, text).map_err(|e| Error::at(&file, e))?;
    }
    Ok(dir)
}

/// A model of random weights in one format.
fn model(layers: usize, format: &str) -> Result<PathBuf> {
    let shape = shape(layers)?;
    synth::write(&shape, Some(format), &shape.join(format), 1)
}

/// The arguments of a run. The tokenizer makes a token of each byte, and one more in front.
fn generate(model: &Path, prompt: usize, decoded: usize, kv_type: &str) -> Vec<String> {
    let (model, prompt) = (model.display().to_string(), "a".repeat(prompt - 1));
    let decoded = decoded.to_string();
    let words = ["generate", "--model-path", &model, "--prompt", &prompt, "-n", &decoded, "-t", "1"];
    let more = ["--temp", "0", "--kv-type", kv_type, "--ignore-eos", "--quiet"];
    words.into_iter().chain(more).map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench;

    fn parsed(words: &str) -> Args {
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        Args::parse(&words, bench::FLAGS).unwrap()
    }

    #[test]
    fn figures_are_differences_for_a_token() {
        let counts = Counts {
            short: 1_000_000_000,
            long: 1_000_000_000 + 128 * 9_000_000,
            decoded: 1_000_000_000 + 8 * 28_800_000,
            deeper: [2_000_000_000, 2_000_000_000 + 128 * 15_500_000],
        };
        let row = counts.row("q4_0", "i8mm");
        assert_eq!(
            (&row["decoded"], &row["prompt"], &row["layer"]),
            (&json!(28.8), &json!(9.0), &json!(6.5))
        );
        let text = table(&[row]);
        let line: Vec<&str> = text.lines().nth(2).unwrap().split('|').map(str::trim).collect();
        assert_eq!(line[1..6], ["q4_0", "i8mm", "28.80", "9.00", "6.50"]);
    }

    #[test]
    fn flags_that_mean_nothing_are_refused() {
        assert!(!asked(&parsed("--runs 2"), &["-p".into()]).unwrap());
        assert!(asked(&parsed("--count --formats q4_k --build-qemu --json x"), &[]).unwrap());
        for words in ["--formats q4_0", "--build-qemu", "--count --model story", "--count --device qemu"] {
            assert_eq!(asked(&parsed(words), &[]).err().map(|e| e.exit_code()), Some(2), "{words}");
        }
        assert!(asked(&parsed("--count"), &["-p".into()]).is_err());
    }

    #[test]
    fn formats_and_programs_are_checked_first() {
        assert_eq!(formats("q4_0, q6_k").unwrap(), ["q4_0", "q6_k"]);
        let said = formats("q4_0,q3_k").unwrap_err().to_string();
        assert!(said.contains("--formats q3_k") && said.contains("q8_0"), "{said}");
        assert_eq!((depth(None).unwrap(), depth(Some("1024")).unwrap()), (128, 1024));
        for wrong in ["0", "1000", "3968", "x", "18446744073709551488"] {
            let said = depth(Some(wrong)).unwrap_err().to_string();
            assert!(
                said.contains(&format!("--depth {wrong}: use a multiple of 128 from 128 to 3840")),
                "{said}"
            );
        }
        assert!(kv_type("q4").is_ok() && kv_type("q4_0").unwrap_err().to_string().contains("f16"));
        let here = std::env::current_exe().unwrap().display().to_string();
        assert!(given(&format!("{here},{here}")).is_ok());
        assert!(given(&here).unwrap_err().to_string().contains("give two"));
        let said = given(&format!("{here},/nonexistent")).unwrap_err().to_string();
        assert!(said.contains("/nonexistent is no file"), "{said}");
    }

    #[test]
    fn a_prompt_has_as_many_tokens_as_are_counted() {
        let words = generate(Path::new("m.gguf"), 128, 9, "f16");
        assert_eq!((words[4].len(), words[6].as_str()), (127, "9"));
    }
}
