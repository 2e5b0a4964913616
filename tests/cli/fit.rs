//! Tests of the machine's limits: too little memory, and chosen cores.

use crate::support::command::*;

/// Runs with this much memory available.
fn with_memory(mib: &str, args: &[&str]) -> RunOutput {
    antigravity(args).env("ANTIGRAVITY_MEMORY_MIB", mib).run()
}

/// The number after `words` in a line.
#[track_caller]
fn number_after(line: &str, words: &str) -> usize {
    let (_, rest) = line.split_once(words).unwrap_or_else(|| panic!("{line:?} does not have {words:?}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("{line:?}: no number after {words:?}"))
}

#[test]
fn the_largest_context_fits_and_one_more_does_not() {
    let temp = TestDir::new();
    let tokens = temp.write("tokens.json", "[0, 55, 1667]");
    // How each command asks for slots, and how the remedy names them.
    let commands: &[(&[&str], &str, &str)] = &[
        (&["generate", "-n", "1", "-p", "x"], "-c", "use --max-seq-len "),
        (&["chat", "-st", "-n", "1", "-p", "x"], "-c", "use --max-seq-len "),
        (&["eval", "--tokens", &tokens], "--chunk", "use --chunk "),
        (&["eval", "--tokens", &tokens, "--against", "kv=f16"], "--chunk", "use --chunk "),
        (&["bench", "-n", "0", "-r", "1", "-t", "1"], "-p", "use rows of "),
    ];
    for (args, flag, remedy) in commands {
        let run = |slots: usize| with_memory("120", &[*args, &[flag, &slots.to_string()]].concat());
        let said = run(1 << 20);
        assert_eq!((said.code, said.out.as_str()), (Some(4), ""), "{args:?}: {}", said.err);
        assert_eq!(said.err.lines().count(), 1, "{args:?}: {}", said.err);
        mentions(&said.err, &["error: ", "1048576", "120.0 MiB are available"]);
        let longest = number_after(&said.err, remedy);
        let over = run(longest + 1);
        assert_eq!(over.code, Some(4), "{args:?} {longest}: {}", over.err);
        assert_eq!(number_after(&over.err, remedy), longest, "{args:?}");
        // Prefilling so many tokens takes too long to try.
        if args[0] != "bench" {
            let fits = run(longest);
            assert_eq!(fits.code, Some(0), "{args:?} {longest}: {}", fits.err);
        }
    }
}

#[test]
fn the_default_context_of_a_conversation_is_the_models_or_what_fits() {
    let plan = |mib: &str, args: &[&str]| -> serde_json::Value {
        let said = with_memory(mib, &[&["plan", "--json", "--kv-type", "f32"], args].concat());
        serde_json::from_str(&said.out).expect("JSON")
    };
    let need = |slots: &str| plan("4000", &["-c", slots])["need_bytes"].as_u64().expect("a number") >> 20;
    let mib = ((need("2048") + need("512")) / 2).to_string();
    let context = |mib: &str, more: &[&str]| {
        let chat = [&["chat", "--kv-type", "f32", "-n", "1"], more].concat();
        let said = antigravity(chat).env("ANTIGRAVITY_MEMORY_MIB", mib).stdin("/stats\n").run();
        (said.code, if said.code == Some(0) { number_after(&said.err, " of ") } else { 0 })
    };
    assert_eq!(context("4000", &[]), (Some(0), 2048));
    let (code, slots) = context(&mib, &[]);
    assert!(code == Some(0) && (512..2048).contains(&slots), "{code:?} {slots}");
    // One that was asked for is not changed, and nothing shorter than a conversation is taken.
    assert_eq!(context(&mib, &["-c", "2048"]).0, Some(4));
    assert_eq!(context("20", &[]).0, Some(4));
    assert_eq!(plan("4000", &["--slots", "4"])["max_seq_len"], 2048);
    let help = antigravity(["chat", "--help"]).text();
    mentions(
        &help.split_whitespace().collect::<Vec<_>>().join(" "),
        &["the model's own maximum, at most 8192"],
    );
}

/// Peak resident memory of a chat that has filled its context and waits, and what was planned; then both without the
/// program's own pages, of which the system reads in as many as it likes. In bytes.
#[cfg(target_os = "linux")]
fn used_and_planned(more: &[&str]) -> [(u64, u64); 2] {
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;
    let long = "The dog ran to the park and saw a red ball. ".repeat(100);
    let args = [&["chat", "--format", "jsonl", "--ignore-eos", "-n", "-1", "-p", &long], more].concat();
    let mut run = antigravity(&args).into_std();
    run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = run.spawn().expect("the binary starts");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut texts = lines.map(|line| line.expect("UTF-8"));
    assert!(texts.any(|line| line.contains("\"stop\":\"context\"")), "it fills its context");
    let read = |file| std::fs::read_to_string(format!("/proc/{}/{file}", child.id())).expect("it waits");
    let bytes = |line: &str, name| {
        let kib: u64 = line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok()?;
        Some(1024 * kib)
    };
    let used = read("status").lines().find_map(|line| bytes(line, "VmHWM:")).expect("a peak");
    let (program, smaps) = (binary(), read("smaps"));
    let (mut of_program, mut touched) = (false, 0);
    for line in smaps.lines() {
        match bytes(line, "Rss:") {
            Some(rss) if of_program => touched += rss,
            // A mapping's first line says its rights and ends with its file.
            None if line.contains("-") => of_program = line.ends_with(program.to_str().expect("UTF-8")),
            _ => {}
        }
    }
    drop(child.stdin.take());
    child.wait().expect("it ends");
    let plan = antigravity(["plan", "--format", "json"]).args(more).text();
    let plan: serde_json::Value = serde_json::from_str(&plan).expect("JSON");
    let planned = plan["peak_bytes"].as_u64().expect("a number");
    let items = plan["items"].as_array().expect("items");
    let program = items.iter().find(|item| item["what"] == "program").expect("the program");
    [(used, planned), (used - touched, planned - program["bytes"].as_u64().expect("a number"))]
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_takes_what_is_planned_and_not_much_less() {
    for more in [&["-c", "2048", "-t", "2"][..], &["-c", "1536", "-t", "1", "--kv-type", "f16"]] {
        let [(used, planned), (own, own_planned)] = used_and_planned(more);
        assert!(used <= planned, "{more:?}: {used} of {planned}");
        assert!(own_planned as f64 <= 1.3 * own as f64, "{more:?}: {own} of {own_planned}");
    }
}

/// Checks that each limit is either refused at once or sufficient.
#[cfg(target_os = "linux")]
#[test]
fn the_limits_of_the_process_are_known() {
    let args = ["generate", "-n", "3", "-p", "Once", "-t", "2", "--temp", "0"];
    let reference = antigravity(args).text();
    // KiB, from what the program itself needs to plenty.
    let address = (90_000..700_000).step_by(61_000).map(|kib| format!("-v {kib}"));
    let data = (12_000..130_000).step_by(9_000).map(|kib| format!("-d {kib}"));
    let mut ends = [0; 2];
    for limit in address.chain(data) {
        let mut run = std::process::Command::new("sh");
        run.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]).arg(binary()).args(args);
        let said = run_command(run.env_remove("HOME"));
        match said.code {
            Some(0) => assert_eq!(said.text(), reference, "{limit}: {}", said.err),
            Some(4) => {
                assert_eq!((said.err.lines().count(), said.out.as_str()), (1, ""), "{limit}: {}", said.err);
                mentions(&said.err, &["error: ", &limit[..2], " leaves ", "raise it"]);
            }
            code => panic!("{limit}: {code:?} {}", said.err),
        }
        ends[usize::from(said.code == Some(0))] += 1;
    }
    assert!(ends.iter().all(|&n| n > 3), "{ends:?}");
}

#[test]
fn smaller_settings_are_named_where_they_help() {
    let args = ["generate", "-n", "1", "-p", "x", "--kv-type", "f32", "-c", "100000"];
    let said = with_memory("120", &args);
    assert_eq!(said.code, Some(4), "{}", said.err);
    let (all, smaller) = (
        number_after(&said.err, "use --max-seq-len "),
        number_after(&said.err, ", --kv-type q4 with --max-seq-len "),
    );
    assert!(all < smaller && smaller <= 100_000, "{}", said.err);
    let typed = ["generate", "-n", "1", "-p", "x", "--kv-type", "q4", "-c", &smaller.to_string()];
    assert_eq!(with_memory("120", &typed).code, Some(0));
    let nothing = with_memory("1", &args);
    assert_eq!(nothing.code, Some(4));
    mentions(&nothing.err, &["no context fits", "smaller model"]);
    let odd = with_memory("lots", &args);
    assert_eq!(odd.code, Some(2));
    mentions(&odd.err, &["error: ANTIGRAVITY_MEMORY_MIB=lots: "]);
    mentions(&with_memory("120", &["plan", "-c", "16"]).out, &["as stated", "120.0 MiB"]);
}

#[test]
fn chosen_cores_are_checked_and_kept_to() {
    for (mask, words) in [
        ("xyz", ["xyz", "4-7"]),
        ("4-", ["4-", "4-7"]),
        ("0", ["0", "names no core"]),
        ("1023-1023", ["--cpu-mask 1023-1023", "1023; this process may use"]),
    ] {
        antigravity(["generate", "-p", "x", "-C", mask]).fails_with(2, &words);
        antigravity(["bench", "-C", mask]).fails_with(2, &words);
    }
    let Some(&core) = numeric::topology::allowed_cores().first() else { return };
    let reference = greedy().text();
    for mask in [format!("{core}-{core}"), format!("0x{:x}", 1u128 << core.min(127))] {
        let mut args = vec!["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12", "-C", &mask];
        let said = antigravity(&args).run();
        assert_eq!((said.code, said.text()), (Some(0), reference.as_str()), "{}", said.err);
        // A thread for each core of the mask, unless told otherwise.
        mentions(&said.err, &["1 threads"]);
        args.extend(["-t", "2"]);
        mentions(&antigravity(&args).run().err, &["2 threads"]);
    }
}

/// Every thread, the one that calls included, is on the cores of the mask.
#[cfg(target_os = "linux")]
#[test]
fn every_thread_stays_on_the_chosen_cores() {
    use std::io::Read;
    use std::process::Stdio;
    let cores = numeric::topology::allowed_cores();
    let Some(&core) = cores.last() else { return };
    let mask = format!("{core}-{core}");
    let args = ["generate", "-n", "-1", "--ignore-eos", "-p", "Once", "-t", "3", "-C", &mask];
    let mut child = antigravity(args)
        .into_std()
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut [0]).expect("some text");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).expect("its threads");
    let lists: Vec<String> = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
        .filter_map(|s| {
            Some(s.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?.trim().to_string())
        })
        .collect();
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert!(lists.len() >= 3 && lists.iter().all(|l| *l == core.to_string()), "{lists:?}");
}
