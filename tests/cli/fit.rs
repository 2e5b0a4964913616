//! What the machine allows: memory that is too little, and cores that are chosen.

use crate::bed::program::*;

/// Runs where so much memory is available.
fn with_memory(mib: &str, args: &[&str]) -> Said {
    let output = command(args).env("ANTIGRAVITY_MEMORY_MIB", mib).output();
    said(output.expect("the binary starts"))
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
    let temp = Temp::new();
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
        mentions(&fails(&["generate", "-p", "x", "-C", mask], 2), &words);
        mentions(&fails(&["bench", "-C", mask], 2), &words);
    }
    let Some(&core) = numeric::topology::allowed_cores().first() else { return };
    let reference = greedy(&[]);
    for mask in [format!("{core}-{core}"), format!("0x{:x}", 1u128 << core.min(127))] {
        let mut args = vec!["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12", "-C", &mask];
        let said = run(&args);
        assert_eq!((said.code, said.text()), (Some(0), reference.as_str()), "{}", said.err);
        // A thread for each core of the mask, unless told otherwise.
        mentions(&said.err, &["1 threads"]);
        args.extend(["-t", "2"]);
        mentions(&run(&args).err, &["2 threads"]);
    }
}

/// Every thread, the one that calls included, is on the cores of the mask.
#[cfg(target_os = "linux")]
#[test]
fn no_thread_leaves_the_mask() {
    use std::io::Read;
    use std::process::Stdio;
    let cores = numeric::topology::allowed_cores();
    let Some(&core) = cores.last() else { return };
    let mask = format!("{core}-{core}");
    let args = ["generate", "-n", "-1", "--ignore-eos", "-p", "Once", "-t", "3", "-C", &mask];
    let mut child =
        command(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary starts");
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
