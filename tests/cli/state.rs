//! Files that are written and read again: sessions, packed models, logits, calibrations.

use crate::support::command::*;
use crate::support::gguf::writer;
use crate::support::paths;
use numeric::simd::Isa;

#[test]
fn a_continued_session_is_one_run() {
    let temp = TestDir::new();
    let others = ["--seed", "3", "--xtc-probability", "0.5", "--dry-multiplier", "0.8", "--typical", "0.9"];
    for sampler in [&["--temp", "0"][..], &["--temp", "1.1", "--seed", "3"], &others] {
        let file = temp.path(&format!("state{}", sampler.len()));
        let run = |prompt: &[&str], n: &str, session: &[&str]| {
            antigravity(["generate", "-n", n]).args(sampler).args(prompt).args(session).text()
        };
        let prompt = ["-p", "Once upon a time"];
        let whole = run(&prompt, "20", &[]);
        let session = ["--session", file.as_str()];
        let parts = run(&prompt, "7", &session) + &run(&[], "1", &session) + &run(&[], "12", &session);
        assert_eq!(parts, whole);
    }
}

#[test]
fn sessions_that_do_not_fit_are_refused() {
    let temp = TestDir::new();
    let file = temp.path("state");
    greedy().args(["--session", &file]).text();
    let args = ["generate", "-p", "x", "--session", &file];
    let with = |flag, value| [&args[..], &[flag, value]].concat();
    antigravity(with("--kv-type", "f16")).fails_with(2, &["--session", "--kv-type q4"]);
    antigravity(with("-c", "8")).fails_with(2, &["--session", "--max-seq-len"]);
    let mut bytes = std::fs::read(&file).expect("the session");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    temp.write("state", &bytes);
    antigravity(args).fails_with(3, &["state", "damaged"]);
    temp.write("state", "short");
    antigravity(args).fails_with(3, &["state"]);
}

#[test]
fn packed_models_say_the_same() {
    let temp = TestDir::new();
    let dir = temp.model_without("model.safetensors");
    let packed = temp.path("model.packed.safetensors");
    let source = model();
    let source = source.to_str().expect("UTF-8");
    assert_eq!(antigravity(["pack", "-m", source, "-o", &packed]).text(), "");
    let reference = greedy().text();
    assert_eq!(reference, greedy().args(["-m", &dir]).text());
    assert_eq!(reference, greedy().args(["-m", &packed]).text());
    // The packed file holds the calibration that the program computes for the other.
    let tokens = temp.write("tokens.json", "[0, 55, 1667, 338, 2236]");
    let logits = |model: &str| {
        let out = temp.path("logits");
        assert_eq!(
            antigravity(["logits", "--kv-type", "q4", "--tokens", &tokens, "--out", &out, "-m", model])
                .text(),
            ""
        );
        std::fs::read(&out).expect("the logits")
    };
    let reference = logits(source);
    assert!(logits(&packed) == reference);
    // Files of older programs hold mean keys alone, or nothing.
    let bytes = std::fs::read(&packed).expect("the packed file");
    let name = format!("{:?}", antigravity::model::weights::Calibration::tensor_name());
    let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).expect("a calibration");
    for older in [r#""key_means.1""#, r#""something""#] {
        let mut bytes = bytes.clone();
        bytes[at..][..name.len()].copy_from_slice(format!("{older:0$}", name.len()).as_bytes());
        assert!(logits(&temp.write("older.packed.safetensors", &bytes)) == reference, "{older}");
    }
    let args = ["generate", "-p", "x", "-m", &packed, "--weight-type", "f32"];
    antigravity(args).fails_with(2, &["--weight-type f32", "packed"]);
    let bytes = std::fs::read(&packed).expect("the packed file");
    temp.write("model.packed.safetensors", &bytes[..bytes.len() / 2]);
    antigravity(["generate", "-p", "x", "-m", &packed]).fails(3);
    antigravity(["pack", "-q", "-m", source, "-o", &temp.path("")]).fails(2);
}

/// An importance file of one matrix of the story model, in llama.cpp's older format.
fn old_importance_file(name: &str, sums: &[f32]) -> Vec<u8> {
    let int = |n: usize| (n as u32).to_le_bytes().to_vec();
    let values = sums.iter().flat_map(|x| x.to_le_bytes()).collect();
    [int(1), int(name.len()), name.into(), int(3), int(sums.len()), values].concat()
}

/// An importance file of one matrix, as a GGUF file.
fn importance_gguf(kind: &str, name: &str, sums: &[f32]) -> Vec<u8> {
    let cols = sums.len() as u64;
    let mut bytes = writer::Parts::default()
        .pair(writer::pair("general.type", writer::STRING, writer::text(kind)))
        .info(writer::info(format!("{name}.in_sum2"), &[cols, 1], 0, 0))
        .info(writer::info(format!("{name}.counts"), &[1, 1], 0, 4 * cols))
        .data(4 * sums.len() + 4)
        .bytes();
    let at = bytes.len() - 4 * sums.len() - 4;
    bytes[at..].copy_from_slice(&sums.iter().chain(&[3.0]).flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>());
    bytes
}

#[test]
fn importance_files_of_llama_cpp_decide_which_errors_count() {
    let temp = TestDir::new();
    let out = temp.path("packed");
    let source = model();
    let source = source.to_str().expect("UTF-8");
    let pack = |file: &str| {
        antigravity(["pack", "-m", source, "-o", &out, "--weight-type", "q4", "--calibration", file])
    };
    let packed = |file: &str| {
        pack(file).run();
        std::fs::read(&out).expect("the packed file")
    };
    let sums: Vec<f32> = (0..antigravity::dims::DIM).map(|i| if i % 7 == 0 { 50.0 } else { 1.0 }).collect();
    let name = "blk.0.attn_q.weight";
    let old = packed(&temp.write("imatrix.dat", old_importance_file(name, &sums)));
    assert!(old == packed(&temp.write("imatrix.gguf", importance_gguf("imatrix", name, &sums))));
    let alike = vec![1.0; sums.len()];
    assert!(old != packed(&temp.write("imatrix.dat", old_importance_file(name, &alike))));
    // Of keys and values too, which have the input of queries.
    let keys = old_importance_file("blk.0.attn_k.weight", &sums);
    assert!(old == packed(&temp.write("imatrix.dat", keys)));
    for (file, bytes, words) in [
        (
            "a.dat",
            old_importance_file(name, &sums[1..]),
            ["a.dat", "blk.0.attn_q.weight has 255 values", "256"],
        ),
        (
            "b.dat",
            old_importance_file("blk.9.attn_q.weight", &sums),
            ["b.dat", "no matrix of this model", "give"],
        ),
        ("c.dat", old_importance_file(name, &[-1.0; 256]), ["c.dat", "value -1", "sum of squares"]),
        ("d.dat", b"imatrix".to_vec(), ["d.dat", "past the end of the file", "make it again"]),
        ("e.gguf", importance_gguf("model", name, &sums), ["e.gguf", "general.type", "imatrix"]),
    ] {
        pack(&temp.write(file, bytes)).fails_with(3, &words);
    }
    let text = temp.write("text.txt", "Once upon a time");
    antigravity(["pack", "-m", source, "-o", &out, "--calibration", &text])
        .fails_with(2, &["--calibration", "q4_0", "--weight-type q4"]);
}

#[test]
fn an_adapter_changes_the_text_and_fits_no_session_of_another() {
    if antigravity::dims::MODEL != "story" {
        return;
    }
    let temp = TestDir::new();
    let fixtures = paths::root().join("tests/fixtures/lora");
    let file = |name: &str| fixtures.join(name).to_string_lossy().into_owned();
    let (first, second) = (file("story"), file("story-rslora:0.5"));
    let (packed, session) = (temp.path("model.packed.safetensors"), temp.path("state"));
    let dir = temp.model_without("model.safetensors");
    let adapted = greedy().args(["--lora", &first, "--lora", &second]).text();
    assert!(adapted != greedy().text() && adapted != greedy().args(["--lora", &first]).text());
    let source = model();
    let source = source.to_str().expect("UTF-8");
    let pack = ["pack", "-q", "-m", source, "-o", &packed, "--lora", &first, "--lora", &second];
    assert_eq!(antigravity(pack).text(), "");
    assert_eq!(greedy().args(["-m", &dir]).text(), adapted);
    mentions(&antigravity(["inspect", &packed]).text(), &["adapters", "story:1, story-rslora:0.5"]);
    // Begun with the checkpoint and continued with the packed file.
    greedy().args(["--lora", &first, "--lora", &second, "--session", &session]).text();
    antigravity(["generate", "-n", "2", "--session", &session, "-m", &packed]).text();
    for lora in [&[][..], &["--lora", first.as_str()]] {
        let other = antigravity(["generate", "-n", "2", "--session", &session]).args(lora);
        other.fails_with(3, &["was saved with another model"]);
    }
    let twice = ["--lora", "is packed", "give the checkpoint it was packed from"];
    greedy().args(["-m", &packed, "--lora", &first]).fails_with(2, &twice);
    let scaled = format!("{first}:nan");
    greedy().args(["--lora", &scaled]).fails_with(2, &["--lora", "story:NaN", "finite number"]);
    greedy().args(["--lora", &file("m8-gpt2-bare-f32")]).fails_with(3, &["no matrix of story"]);
}

#[test]
fn logits_have_the_same_bits_on_every_instruction_set() {
    let temp = TestDir::new();
    let tokens = temp.write("tokens.json", "[0, 55, 1667, 338, 2236]");
    let logits = |isa: &str| {
        let out = temp.path("logits");
        let args = ["logits", "--tokens", &tokens, "--out", &out];
        let said = antigravity(args).env("ANTIGRAVITY_SIMD", isa).run();
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", ""));
        std::fs::read(&out).expect("the logits")
    };
    let reference = logits("scalar");
    assert_eq!(reference.len(), 5 * 4 * antigravity::dims::VOCAB);
    for isa in Isa::available() {
        assert!(logits(isa.family()) == reference, "{}", isa.name());
    }
    let args = ["generate", "-p", "x"];
    let said = antigravity(args).env("ANTIGRAVITY_SIMD", "mmx").run();
    assert_eq!(said.code, Some(2));
    mentions(&said.err, &["error: ANTIGRAVITY_SIMD=mmx", "scalar"]);
}

#[test]
fn a_calibration_is_kept_and_what_is_damaged_is_computed_again() {
    let temp = TestDir::new();
    let said = |args: &[&str], state: &str| {
        let args = [&["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12"], args].concat();
        let said = antigravity(&args).env("XDG_STATE_HOME", state).run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        (said.text().to_string(), said.err)
    };
    let kept = || {
        let names = std::fs::read_dir(temp.0.join("antigravity")).into_iter().flatten().flatten();
        names
            .map(|e| e.path())
            .filter(|path| path.extension().is_some_and(|e| e == "calibration"))
            .collect::<Vec<_>>()
    };
    let state = temp.0.to_str().expect("UTF-8");
    // Only a q4 cache needs it.
    said(&["--kv-type", "q8", "-q"], state);
    assert!(kept().is_empty());
    let (reference, _) = said(&["-q"], state);
    let [file] = &kept()[..] else { panic!("one file: {:?}", kept()) };
    let good = std::fs::read(file).expect("the calibration");
    let mut flipped = good.clone();
    flipped[good.len() / 2] ^= 1;
    for bytes in [&good, &flipped, &good[..good.len() - 1], &[][..], &[good.clone(), vec![0]].concat()] {
        std::fs::write(file, bytes).expect("written");
        assert_eq!(said(&["-q"], state).0, reference);
        assert!(std::fs::read(file).expect("the calibration") == good);
    }
    // What is whole is taken as it is.
    let before = std::fs::metadata(file).and_then(|meta| meta.modified()).expect("a time");
    said(&["-q"], state);
    assert_eq!(std::fs::metadata(file).and_then(|meta| meta.modified()).expect("a time"), before);
    // No place for it is no error.
    let nowhere = temp.write("file", "");
    let (text, line) = said(&[], &nowhere);
    assert_eq!(text, reference);
    mentions(&line, &["calibration", "computed at each start"]);
}
