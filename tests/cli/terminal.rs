//! A chat at a terminal: line editing, what Ctrl-C does, and what a closed window does.

/// Lines that are typed ahead or pasted are lost, Ctrl-C in a line leaves, or text has colours where it must not.
mod typing;

use crate::support::command::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A chat whose three streams are one terminal.
struct Terminal {
    child: Child,
    master: File,
    seen: String,
}

impl Terminal {
    fn chat(args: &[&str]) -> Self {
        Self::of(&[&["chat"], args].concat(), 0)
    }

    /// A terminal with so many columns; 0 are not told.
    fn of(args: &[&str], columns: u16) -> Self {
        Self::started(antigravity(args).into_std(), columns)
    }

    /// A program that shows the progress of short work too.
    fn with_progress(args: &[&str]) -> Self {
        let mut command = antigravity(args).into_std();
        command.env("ANTIGRAVITY_PROGRESS_AT_ONCE", "1");
        Self::started(command, 80)
    }

    /// A window of a terminal, with which its program ends.
    fn window(args: &[&str]) -> Self {
        let mut command = antigravity(args).into_std();
        // SAFETY: calls that a child may make before it becomes another program.
        unsafe {
            command.pre_exec(|| match libc::setsid() >= 0 && libc::ioctl(0, libc::TIOCSCTTY, 0) == 0 {
                true => Ok(()),
                false => Err(std::io::Error::last_os_error()),
            });
        }
        Self::started(command, 24)
    }

    fn started(mut command: Command, columns: u16) -> Self {
        // The program must not hold its own window open.
        let flags = pty::OpenptFlags::RDWR | pty::OpenptFlags::NOCTTY | pty::OpenptFlags::CLOEXEC;
        let master = pty::openpt(flags).expect("a terminal");
        pty::grantpt(&master).expect("granted");
        pty::unlockpt(&master).expect("unlocked");
        let name = pty::ptsname(&master, Vec::new()).expect("a name").into_string().expect("UTF-8");
        let side = || {
            // Or it would become the terminal of the tests.
            let mut options = File::options();
            std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOCTTY);
            Stdio::from(options.read(true).write(true).open(&name).expect("the other side"))
        };
        let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).expect("a size");
        if !command.get_envs().any(|(name, _)| name == "TERM") {
            command.env("TERM", "xterm");
        }
        // A long message takes long enough to be interrupted.
        command.env("ANTIGRAVITY_SIMD", "scalar");
        let child = command.stdin(side()).stdout(side()).stderr(side()).spawn();
        Self { child: child.expect("the binary starts"), master: master.into(), seen: String::new() }
    }

    fn types(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).expect("typed");
    }

    /// The next output; nothing once the program has ended, as its terminal cannot be read then.
    fn reads(&mut self) -> Option<String> {
        let wait = Timespec { tv_sec: 300, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.master, PollFlags::IN)], Some(&wait)).ok().filter(|ready| *ready > 0)?;
        let mut bytes = [0; 4096];
        let n = self.master.read(&mut bytes).unwrap_or(0);
        (n > 0).then(|| String::from_utf8_lossy(&bytes[..n]).into_owned())
    }

    /// Reads on until it has shown `what`; returns what came before.
    #[track_caller]
    fn shows(&mut self, what: &str) -> String {
        let began = Instant::now();
        loop {
            if let Some(at) = self.seen.find(what) {
                let rest = self.seen.split_off(at + what.len());
                let mut before = std::mem::replace(&mut self.seen, rest);
                before.truncate(at);
                return before;
            }
            assert!(began.elapsed() < Duration::from_secs(300), "{what:?} is not in {:?}", self.seen);
            match self.reads() {
                Some(piece) => self.seen += &piece,
                None => panic!("ended before {what:?}: {:?}", self.seen),
            }
        }
    }

    /// Waits for the next line's prompt: before it, Ctrl-C would be nobody's.
    #[track_caller]
    fn prompts(&mut self) {
        self.shows("> ");
    }

    /// As the terminal does where it is the process's own.
    fn interrupt(&self) {
        self.signal("-INT");
    }

    fn signal(&self, name: &str) {
        let status = std::process::Command::new("kill").args([name, &self.child.id().to_string()]).status();
        assert!(status.expect("a kill program").success());
    }

    /// Interrupts a prompt that is being computed; returns what was said of it.
    #[track_caller]
    fn interrupts_the_prompt(&mut self) -> String {
        self.shows("reading the prompt: ");
        self.interrupt();
        self.shows("Stopped. ");
        let then = self.shows("Ctrl-C again to quit");
        self.prompts();
        then
    }

    /// The number of messages and of tokens.
    #[track_caller]
    fn size(&mut self) -> (String, String) {
        self.types("/stats\r");
        self.shows("messages: ");
        let messages = self.shows(", tokens: ");
        let tokens = self.shows("\x1b[0m\r\n");
        self.prompts();
        (messages, tokens)
    }
}

#[test]
fn ctrl_c_stops_an_answer_and_then_leaves() {
    let mut chat = Terminal::chat(&["--temp", "0", "--ignore-eos", "--format", "jsonl", "-c", "8192"]);
    chat.prompts();
    chat.types("Tell me a story\r");
    chat.shows("\"t\":\"token\"");
    chat.interrupt();
    chat.shows("\"stop\":\"interrupt\"");
    chat.shows("Stopped. ");
    chat.prompts();
    // The next message goes on after it.
    chat.types("/stats\r");
    chat.shows("messages: 1, tokens: ");
    chat.prompts();
    chat.types("Go on.\r");
    chat.shows("\"t\":\"token\"");
    chat.interrupt();
    chat.shows("\"prompt_tokens\":");
    let computed: usize = chat.shows(",").parse().expect("a number");
    assert!(computed < 25, "{computed}");
    chat.types("/stats\r");
    chat.shows("messages: 2, tokens: ");
    chat.prompts();
    chat.types("\x03");
    chat.shows("Ctrl-C again to quit");
    chat.prompts();
    chat.types("\x03");
    assert_eq!(chat.child.wait().expect("it ends").code(), Some(130));
}

#[test]
fn lines_are_edited_and_come_back() {
    let mut chat = Terminal::chat(&["--temp", "0", "-n", "5"]);
    chat.prompts();
    // Backspace, back by a word, the end of the line.
    chat.types("/stasx\x7f\x7f\x1bb\x05ts\r");
    chat.shows("no answer yet");
    chat.prompts();
    chat.types("\x1b[A\r");
    chat.shows("no answer yet");
    chat.prompts();
    chat.types("\x04");
    assert_eq!(chat.child.wait().expect("it ends").code(), Some(0));

    let mut chat = Terminal::chat(&["-q"]);
    chat.prompts();
    chat.types("\x04");
    assert_eq!(chat.child.wait().expect("it ends").code(), Some(0));
}

/// Checks between passes would come too late.
const IN_ONE_PASS: [&str; 4] = ["-t", "1", "--prefill-chunk", "512"];
const STORY: &str = "The dog ran to the park and saw a red ball. ";

#[test]
fn a_message_that_is_interrupted_before_its_answer_is_asked_again() {
    let long = STORY.repeat(40);
    let mut chat = Terminal::with_progress(
        &[&["chat"], &IN_ONE_PASS[..], &["--temp", "0", "-n", "5", "-p", &long]].concat(),
    );
    let then = chat.interrupts_the_prompt();
    assert!(then.contains("withdrawn") && then.contains("/retry sends it again"), "{then}");
    assert_eq!(chat.size().0, "0");
    chat.types("/retry\r");
    chat.prompts();
    assert_eq!(chat.size().0, "1");
}

#[test]
fn an_answer_stays_where_another_one_is_interrupted_before_it_begins() {
    let temp = TestDir::new();
    let file = temp.path("state");
    let evicting =
        ["-c", "512", "--eviction-policy", "sliding", "--eviction-window", "64", "--session", &file];
    let long = STORY.repeat(33);
    let more = ["--temp", "0", "--ignore-eos", "-n", "200", "-p", &long];
    let mut chat = Terminal::with_progress(&[&["chat"], &evicting[..], &IN_ONE_PASS, &more].concat());
    chat.shows("reading the prompt: ");
    chat.prompts();
    let before = chat.size();
    assert_eq!(before.0, "1");
    for _ in 0..2 {
        // All of it is computed again, as its slots were evicted.
        chat.types("/retry\r");
        let then = chat.interrupts_the_prompt();
        assert!(then.contains("The previous answer stays"), "{then}");
        assert_eq!(chat.size(), before);
    }
    let saved = antigravity(["chat"]).args(evicting).stdin("/stats\n").run();
    mentions(&saved.err, &["messages: 1, ", &format!("tokens: {}\n", before.1)]);
}

#[test]
fn a_message_that_the_template_refuses_does_not_end_the_chat() {
    let temp = TestDir::new();
    let dir = temp.model_without("");
    temp.write(
        "chat_template.jinja",
        "{% for m in messages %}{% if 'cat' in m.content %}{{ raise_exception('no cats') }}{% endif %}\
         <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n",
    );
    let args = ["-m", &dir, "--temp", "0", "-n", "5"];
    let mut chat = Terminal::chat(&args);
    chat.prompts();
    for (message, questions) in [("A dog", "1"), ("A cat", "1"), ("/retry", "1"), ("A fox", "2")] {
        chat.types(&format!("{message}\r"));
        if ["A cat", "/retry"].contains(&message) {
            chat.shows("no cats. The message was withdrawn");
        }
        chat.prompts();
        assert_eq!(chat.size().0, questions, "{message}");
    }
    let piped = antigravity(["chat"]).args(args).stdin("A dog\nA cat\nA fox\n").run();
    assert_eq!(piped.code, Some(0), "{}", piped.err);
    mentions(&piped.err, &["no cats"]);
    assert!(piped.out.lines().filter(|l| !l.is_empty()).count() >= 2, "the next is answered: {}", piped.out);
}

#[test]
fn a_signal_that_ends_the_program_leaves_the_terminal_as_it_was() {
    let mut chat = Terminal::chat(&[]);
    let modes = |chat: &Terminal| tcgetattr(&chat.master).expect("a terminal").local_modes;
    let edited = LocalModes::ICANON | LocalModes::ECHO;
    chat.prompts();
    assert!(!modes(&chat).intersects(edited));
    chat.signal("-TERM");
    chat.shows("\x1b[?2004l");
    chat.child.wait().expect("it ends");
    assert!(modes(&chat).contains(edited));
}

#[test]
fn a_chat_begins_with_model_context_and_device() {
    let mut chat = Terminal::chat(&["-c", "512"]);
    chat.shows("\x1b[1mstory\x1b[0m, 512 tokens of context, cpu (");
    chat.shows("/help lists commands");
    chat.prompts();
    chat.types("\x04");
}

#[test]
fn the_prompt_is_shown_dimmed_before_the_text() {
    for (args, prompt) in
        [(&["-p", "Once upon a time"][..], "Once upon a time"), (&[], "Hello, world! I am a")]
    {
        let mut terminal = Terminal::of(&[&["generate", "-n", "4", "--temp", "0"], args].concat(), 0);
        terminal.shows(&format!("\x1b[2m{prompt}\x1b[0m"));
        let text = terminal.shows("\r\n");
        assert!(!text.is_empty() && !text.contains("TTFT"), "{text:?}");
        terminal.shows("TTFT: ");
    }
    let mut quiet = Terminal::of(&["generate", "-q", "-n", "4", "--temp", "0", "-p", "Once upon a time"], 0);
    assert!(!quiet.shows("\r\n").contains("Once"));
}

/// Without colours where they are not wanted, and not at all where no line can be erased.
#[test]
fn a_line_shows_how_much_of_a_long_prompt_is_done_and_goes() {
    let long = STORY.repeat(25);
    let args = ["chat", "-st", "-t", "1", "--prefill-chunk", "32", "--temp", "0", "-n", "3", "-p", &long];
    let started = |name: &str, value: &str| {
        let mut command = antigravity(args).into_std();
        command.env(name, value).env("ANTIGRAVITY_PROGRESS_AT_ONCE", "1");
        Terminal::started(command, 60)
    };
    let mut terminals = [("NO_COLOR", ""), ("NO_COLOR", "1"), ("TERM", "dumb")].map(|(n, v)| started(n, v));
    let [colored, plain, dumb] = &mut terminals;
    for (terminal, color) in [(colored, "\x1b[36m"), (plain, "")] {
        terminal.shows("\rreading the prompt: ");
        terminal.shows(&format!("tokens  {color}━"));
        // The last thing before the answer.
        let text = terminal.shows("TTFT: ");
        let (line, answer) = text.rsplit_once("\r\x1b[K").expect("it is erased");
        assert!(!answer.contains("reading") && !answer.trim().is_empty(), "{answer:?}");
        assert_eq!(line.contains("\x1b[36m"), !color.is_empty(), "{line:?}");
        // With escape sequences, a line of the terminal is never full.
        let shown = |line: &str| line.replace("\x1b[36m", "").replace("\x1b[39m", "").chars().count();
        assert!(line.split('\r').all(|line| shown(line.trim_end_matches("\x1b[K")) < 60), "{line:?}");
    }
    assert!(!dumb.shows("TTFT: ").contains("reading"));
}

#[test]
fn thoughts_are_dimmed() {
    let temp = TestDir::new();
    let dir = temp.model_that_says("<think>\nhm\n</think>\n\nYes.");
    let args = [
        "chat",
        "-m",
        &dir,
        "-st",
        "-p",
        "Hi",
        "--temp",
        "0",
        "-n",
        "1",
        "--ignore-eos",
        "--logit-bias",
        "1+10000",
    ];
    let mut terminal = Terminal::of(&args, 0);
    terminal.shows("\x1b[2mhm\r\n\x1b[0m\r\nYes.");
    terminal.shows("TTFT: ");
    // Where nothing can be dimmed, they are in tags.
    let mut plain = antigravity(args).into_std();
    plain.env("NO_COLOR", "1");
    let mut terminal = Terminal::started(plain, 0);
    let before = terminal.shows("<think>\r\nhm\r\n</think>\r\n\r\nYes.");
    assert!(!before.contains("\x1b[2m"), "{before:?}");
    let mut hidden = Terminal::of(&[&args[..], &["--think", "hide"]].concat(), 0);
    assert!(!hidden.shows("Yes.").contains("hm"));
    // Thoughts that are cut leave the terminal as it was.
    let long = [&args[..8], &["--ignore-eos", "-n", "3", "--template-arg", "begin=1"]].concat();
    let mut cut = Terminal::of(&long, 0);
    cut.shows("\x1b[2m");
    cut.shows("\x1b[0m");
    cut.shows("TTFT: ");
}

#[test]
fn a_message_goes_on_after_a_backslash_and_between_quotes() {
    let mut chat = Terminal::chat(&["--temp", "0", "-n", "3"]);
    chat.prompts();
    chat.types("Tell me\\\r");
    chat.shows(". ");
    chat.types("a story\r");
    chat.prompts();
    assert_eq!(chat.size().0, "1");
    chat.types("\"\"\"\r");
    chat.shows(". ");
    chat.types("/exit\r");
    chat.shows(". ");
    chat.types("is no command here\"\"\"\r");
    chat.prompts();
    assert_eq!(chat.size().0, "2");
}

#[test]
fn what_is_typed_during_an_answer_waits_for_the_prompt() {
    let mut chat = Terminal::chat(&["--temp", "0", "--ignore-eos", "-n", "300"]);
    chat.prompts();
    chat.types("Tell me a story\r");
    // The answer has begun.
    chat.shows("\x1b[?2004l\r\n");
    chat.shows(" ");
    chat.types("/stats\r");
    let answer = chat.shows("\x1b[?2004h");
    assert!(!answer.contains("/stats"), "{answer:?}");
    chat.shows("messages: 1, tokens: ");
}

#[test]
fn words_of_an_answer_are_not_cut_at_the_right_edge() {
    for command in [&["chat", "-st", "-p", "Tell me a story"], &["generate", "-q", "-p", "The dog went"][..]]
    {
        let args = [command, &["--temp", "0", "-n", "120", "--ignore-eos"]].concat();
        let plain = antigravity(&args).text();
        let mut terminal = Terminal::of(&args, 24);
        let mut shown = String::new();
        while let Some(piece) = terminal.reads() {
            shown += &piece;
        }
        // Without progress, statistics and the modes of the terminal.
        let text = shown.rsplit("\r\x1b[K").next().and_then(|text| text.split("\x1b[2mTTFT").next());
        let text = text.expect("text").replace("\x1b[?2004h", "").replace("\x1b[?2004l", "");
        let lines = seen_lines(&text);
        assert!(lines.len() > 10 && lines.iter().all(|line| line.chars().count() < 24), "{lines:?}");
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&lines.join("\n")), words(&plain));
    }
}

/// The lines that a terminal shows of a text: what is taken back is not seen.
fn seen_lines(shown: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut rest = shown.replace('\r', "");
    while let Some(c) = rest.chars().next() {
        let line = lines.last_mut().expect("a line");
        let mut used = c.len_utf8();
        match rest.strip_prefix("\x1b[").and_then(|code| code.split_once(char::is_alphabetic)) {
            Some((parameters, after)) => {
                used = rest.len() - after.len();
                if rest[..used].ends_with('D') {
                    (0..parameters.parse().expect("a number")).for_each(|_| _ = line.pop());
                }
            }
            None if c == '\n' => lines.push(String::new()),
            None => line.push(c),
        }
        rest.drain(..used);
    }
    lines
}

#[test]
fn a_terminal_that_is_closed_in_mid_answer_loses_nothing() {
    let temp = TestDir::new();
    for round in 0..20 {
        let file = temp.path(&format!("state-{round}"));
        let (command, begun): (&[&str], _) = match round % 4 {
            0 => (&["chat", "-p", "Tell me a story"], "D\x1b[K"),
            1 => (&["chat", "--format", "jsonl", "-p", "Tell me a story"], "\"t\":\"token\""),
            2 => (&["generate", "-n", "-1", "-p", "Once"], "\x1b[0m"),
            _ => (&["generate", "--format", "jsonl", "-n", "-1", "-p", "Once"], "\"t\":\"token\""),
        };
        let endless = ["--temp", "0", "--ignore-eos", "-c", "8192", "--session", &file];
        let args = [command, &endless[..]].concat();
        // With the signal of a window, and without it: writing fails.
        let mut terminal = if round % 8 < 4 { Terminal::window(&args) } else { Terminal::of(&args, 24) };
        terminal.shows(begun);
        std::thread::sleep(Duration::from_millis(10 * round));
        let Terminal { mut child, master, .. } = terminal;
        drop(master);
        if round % 8 < 4 {
            // Both the system and the shell in the window send one.
            std::thread::sleep(Duration::from_millis(2 * (round % 8) + 4));
            // SAFETY: sends a signal to a child that is not waited for yet.
            unsafe { libc::kill(child.id() as i32, libc::SIGHUP) };
        }
        let status = child.wait().expect("it ends");
        assert!([None, Some(libc::SIGHUP)].contains(&status.signal()), "{args:?}: {status}");
        let saved = std::fs::read(&file).unwrap_or_else(|e| panic!("{args:?}: {status}: {e}"));
        assert!(saved.starts_with(b"AGSAVED"));
    }
    let chat =
        antigravity(["chat", "-c", "8192", "--session", &temp.path("state-0")]).stdin("/stats\n").run();
    mentions(&chat.err, &["messages: 1, "]);
    greedy().args(["-c", "8192", "--session", &temp.path("state-2")]).text();
}
