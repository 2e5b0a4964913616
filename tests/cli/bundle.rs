//! `bundle`: one executable file with the model inside.

use crate::support::command::*;
use std::path::Path;
use std::process::{Command, Stdio};

/// A bundle of the baked model, alone in a directory.
struct Bundled {
    temp: TestDir,
    path: String,
}

impl Bundled {
    fn new() -> Self {
        let temp = TestDir::new();
        // Files beside a bundle are none of its own.
        for name in ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"] {
            temp.write(name, "{");
        }
        let path = temp.path("story");
        assert_eq!(antigravity(["bundle", "-q", "--out", &path]).text(), "");
        Self { temp, path }
    }

    /// Runs the bundle from an empty directory, with an environment that names a missing model.
    #[track_caller]
    fn says(&self, args: &[&str]) -> String {
        let said = started(&self.path, args);
        assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
        said.out
    }

    fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("the bundle")
    }
}

fn started(program: &str, args: &[&str]) -> RunOutput {
    let empty = TestDir::new();
    let mut command = Command::new(program);
    for name in ["ANTIGRAVITY_SIMD", "ANTIGRAVITY_MEMORY_MIB", "XDG_STATE_HOME", "HOME"] {
        command.env_remove(name);
    }
    command.env("ANTIGRAVITY_MODEL", &empty.0).args(args).current_dir(&empty.0).stdin(Stdio::null());
    run_command(command)
}

/// Finds the offset of `words` in `bytes`, which must contain it exactly once.
fn place_of(bytes: &[u8], words: &[u8]) -> usize {
    let mut found = bytes.windows(words.len()).enumerate().filter(|(_, w)| *w == words).map(|(at, _)| at);
    let at = found.next().expect("it is there");
    assert_eq!(found.next(), None);
    at
}

#[test]
fn a_bundle_runs_from_anywhere_and_says_the_same() {
    let bundle = Bundled::new();
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(&bundle.path).expect("the bundle").permissions(),
    );
    assert_eq!(mode & 0o777, 0o755);
    let greedy = ["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12"];
    let tokenize = ["tokenize", "--prompt", "Once upon a time"];
    let chat = ["chat", "--single-turn", "-q", "--temp", "0", "-n", "8", "--prompt", "Hello"];
    for args in [&greedy[..], &tokenize, &chat] {
        assert_eq!(bundle.says(args), antigravity(args).run().out, "{args:?}");
    }
    let (temp, session) = (&bundle.temp, bundle.temp.path("state"));
    // A session of one continues in the other.
    let whole = antigravity(["generate", "--temp", "0", "-p", "Once upon a time", "-n", "20"]).text();
    let first =
        antigravity(["generate", "--temp", "0", "-p", "Once upon a time", "-n", "9", "--session", &session])
            .text();
    let rest = bundle.says(&["generate", "--temp", "0", "-n", "11", "--session", &session]);
    assert_eq!(first + rest.trim_end_matches('\n'), whole);
    let tokens = temp.write("tokens.json", "[0, 55, 1667, 338, 2236]");
    let logits = |out: &str| ["logits", "--tokens", &tokens, "--out", out].map(str::to_owned);
    let (ours, theirs) = (temp.path("ours"), temp.path("theirs"));
    bundle.says(&logits(&ours).each_ref().map(String::as_str));
    antigravity(logits(&theirs).each_ref().map(String::as_str)).text();
    assert!(std::fs::read(ours).expect("logits") == std::fs::read(theirs).expect("logits"));
}

#[test]
fn every_command_takes_the_model_inside_unless_another_is_named() {
    let bundle = Bundled::new();
    let path = bundle.path.as_str();
    assert!(bundle.says(&["inspect"]).starts_with(path));
    let doctor = bundle.says(&["doctor"]);
    mentions(&doctor, &[path, "every byte verified", "tokenizer.json"]);
    mentions(&bundle.says(&["plan"]), &["packed file"]);
    // Cold starts are of the model, not of the program that is running.
    let dropped: serde_json::Value =
        serde_json::from_str(&bundle.says(&["bench", "--drop-cache"])).expect("JSON");
    assert!(
        (1_000_000..bundle.bytes().len() as u64 - 1_000_000)
            .contains(&dropped["bytes"].as_u64().expect("bytes"))
    );
    let model = model();
    let model = model.to_str().expect("UTF-8");
    assert!(bundle.says(&["inspect", "-m", model]).starts_with(model));
    let line = started(path, &["generate", "-m", "/no/such/model"]);
    assert_eq!(line.code, Some(3), "{}", line.err);
    // Any program reads it where it is named, and its files as the bundle's own.
    assert_eq!(greedy().args(["-m", path]).text(), greedy().text());
    let f32 = ["generate", "-p", "x", "--weight-type", "f32"];
    let said = started(path, &f32);
    assert_eq!(said.code, Some(2));
    mentions(&said.err, &["--weight-type f32", "packed"]);
}

#[test]
fn a_bundle_of_a_bundle_is_the_same_and_pack_takes_its_model_out() {
    let bundle = Bundled::new();
    let (copy, again) = (bundle.temp.path("copy"), bundle.temp.path("again"));
    bundle.says(&["bundle", "-q", "-o", &copy]);
    assert!(std::fs::read(&copy).expect("a copy") == bundle.bytes());
    let model = model();
    let model = model.to_str().expect("UTF-8");
    bundle.says(&["bundle", "-q", "-m", model, "-o", &again]);
    assert!(std::fs::read(&again).expect("a bundle") == bundle.bytes());
    let (ours, theirs) = (bundle.temp.path("ours"), bundle.temp.path("theirs"));
    bundle.says(&["pack", "-q", "-o", &ours]);
    antigravity(["pack", "-q", "-m", model, "-o", &theirs]).text();
    assert!(std::fs::read(&ours).expect("a packed file") == std::fs::read(&theirs).expect("a packed file"));
    // Its default name is beside the bundle.
    bundle.says(&["pack", "-q"]);
    assert!(Path::new(&format!("{}.packed.safetensors", bundle.path)).is_file());
    // A packed file without its tokenizer is no model that a bundle could run.
    let alone = TestDir::new();
    std::fs::copy(&ours, alone.file("model.packed.safetensors")).expect("a copy");
    let alone = alone.0.to_str().expect("UTF-8");
    antigravity(["bundle", "-q", "-m", alone, "-o", &copy]).fails_with(3, &["tokenizer.json"]);
}

#[test]
fn a_damaged_bundle_says_so() {
    let bundle = Bundled::new();
    let (whole, mark) = (bundle.bytes(), place_of(&bundle.bytes(), b"antigravity bundle\n\0\x01"));
    // The mark, the table, the model's header, the text files.
    let model = mark + place_of(&whole[mark..], b"antigravity.layout");
    for at in [mark + 3, mark + 100, model, mark + 4096 + 10, mark + 4096 + 20_000] {
        let mut bad = whole.clone();
        bad[at] ^= 1;
        let bad = bundle.temp.write("bad", &bad);
        antigravity(["generate", "-p", "x", "-m", &bad]).fails_with(3, &[&bad, "damaged bundle", "bundle"]);
    }
    // What runs: a shell makes it, since no other thread may start a process while this one writes a program.
    for len in [mark + 40, mark + 5000, whole.len() / 2 + mark / 2, whole.len() - 1] {
        let cut = bundle.temp.path("cut");
        let script = format!("cp {} {cut} && truncate -s {len} {cut}", bundle.path);
        assert!(Command::new("sh").args(["-c", &script]).status().expect("a shell").success());
        for command in [&["generate", "-p", "x"][..], &["inspect"], &["tokenize", "-p", "x"], &["plan"]] {
            let said = started(&cut, command);
            assert_eq!((said.code, said.err.lines().count()), (Some(3), 1), "{len}: {}", said.err);
            mentions(&said.err, &["damaged bundle", "antigravity bundle"]);
        }
        mentions(&started(&cut, &["doctor"]).out, &["damaged bundle"]);
    }
    // A byte of a weight that no start looks at.
    let mut bad = whole.clone();
    let at = whole.len() - 3_000_001;
    bad[at] ^= 1;
    let bad = bundle.temp.write("bad", &bad);
    mentions(
        &antigravity(["doctor", "-m", &bad]).text(),
        &["the checksum of model.packed.safetensors is wrong"],
    );
}

#[test]
fn only_a_program_for_the_same_model_is_taken() {
    let temp = TestDir::new();
    let out = temp.path("out");
    let bundle = |program: &str| antigravity(["bundle", "-q", "--out", &out, "--program", program]).fails(1);
    let text = temp.write("text", "no program");
    mentions(&bundle(&text), &[&text, "is not a complete 64-bit program"]);
    mentions(&bundle("/no/such/program"), &["/no/such/program"]);
    let whole = std::fs::read(binary()).expect("the program");
    mentions(&bundle(&temp.write("cut", &whole[..whole.len() - 1])), &["is not a complete 64-bit program"]);
    let built_for = place_of(&whole, b" is built for {");
    let mut other = whole.clone();
    other[built_for - 1] ^= 1;
    mentions(&bundle(&temp.write("older", &other)), &["the same sources"]);
    let dim = format!("\"hidden_size\":{}", antigravity::dims::DIM);
    let at = built_for + place_of(&whole[built_for..built_for + 1000], dim.as_bytes());
    let mut other = whole.clone();
    other[at + dim.len() - 1] ^= 1;
    mentions(&bundle(&temp.write("other", &other)), &["not built for this program's model", "hidden_size"]);
    assert!(!Path::new(&out).exists());
    antigravity(["bundle", "-q"]).fails(2);
    antigravity(["bundle", "-q", "--out", "/dev/null"])
        .fails_with(2, &["/dev/null", "is not a regular file"]);
    let program = temp.write("program", &whole);
    text_of(&["bundle", "-q", "--out", &out, "--program", &program]);
    assert_eq!(greedy().args(["-m", &out]).text(), greedy().text());
}

#[track_caller]
fn text_of(args: &[&str]) {
    assert_eq!(antigravity(args).text(), "");
}
