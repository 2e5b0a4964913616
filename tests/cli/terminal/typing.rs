//! Lines typed ahead or pasted, Ctrl-C in a line, and colours.

use super::*;

const FEW: [&str; 4] = ["--temp", "0", "-n", "3"];

/// Ends a chat; returns its exit code and all that it showed.
fn leave(mut chat: Terminal, keys: &str) -> (Option<i32>, String) {
    chat.types(keys);
    let mut shown = std::mem::take(&mut chat.seen);
    while let Some(piece) = chat.reads() {
        shown += &piece;
    }
    (chat.child.wait().expect("it ends").code(), shown)
}

#[test]
fn what_is_typed_while_the_model_loads_is_answered() {
    let mut chat = Terminal::chat(&FEW);
    chat.types("Hi\rWho are you?\r/stats\r");
    chat.shows("messages: 2, ");
}

#[test]
fn lines_typed_during_an_answer_are_messages_each() {
    let mut chat = Terminal::chat(&["--temp", "0", "--ignore-eos", "-n", "200"]);
    chat.prompts();
    chat.types("Tell me a story\r");
    chat.shows("\x1b[?2004l\r\n");
    chat.shows(" ");
    chat.types("/set num-tokens 2\rHi\rGo on\r/stats\r");
    chat.shows("messages: 3, ");
}

#[test]
fn pasted_lines_are_one_message_if_they_are_marked_and_else_one_each() {
    let mut chat = Terminal::chat(&FEW);
    chat.prompts();
    chat.types("\x1b[200~One\rTwo\rThree\x1b[201~\r");
    chat.prompts();
    assert_eq!(chat.size().0, "1");
    chat.types("One\rTwo\rThree\r/stats\r");
    chat.shows("messages: 4, ");
    chat.prompts();
    // Also during an answer.
    chat.types("/set num-tokens 200\rGo on\r");
    chat.shows("> ");
    chat.shows("\x1b[?2004h");
    chat.types("\x1b[200~/dance\rTwo\x1b[201~\r/stats\r");
    chat.shows("Unknown command /dance");
    chat.shows("messages: 5, ");
}

#[test]
fn a_line_longer_than_the_terminal_holds_is_kept() {
    let mut chat = Terminal::chat(&["--temp", "0", "--ignore-eos", "-n", "200"]);
    chat.prompts();
    chat.types("Tell me a story\r");
    chat.shows("\x1b[?2004l\r\n");
    chat.shows(" ");
    // While the answer is read, as a terminal does.
    let mut master = chat.master.try_clone().expect("another handle");
    let line = format!("\x1b[200~/{}END\x1b[201~\r", "x".repeat(6000));
    let typing = std::thread::spawn(move || master.write_all(line.as_bytes()));
    let end = format!("{}END", "x".repeat(20));
    chat.shows(&end);
    chat.shows("Unknown command /xx");
    chat.shows(&end);
    typing.join().expect("no panic").expect("typed");
}

#[test]
fn ctrl_c_drops_a_draft_and_leaves_an_empty_line_at_the_second_time() {
    let mut chat = Terminal::chat(&FEW);
    chat.prompts();
    for draft in ["/exit", "Tell me\\\r"] {
        chat.types(draft);
        chat.shows(draft.trim_end_matches('\r'));
        if draft.ends_with('\r') {
            chat.shows(". ");
        }
        chat.types("\x03");
        let said = chat.shows("> ");
        assert!(!said.contains("quit"), "{said:?}");
    }
    // What was dropped is no part of the next message, and does not count.
    assert_eq!(chat.size().0, "0");
    for _ in 0..2 {
        chat.types("\x03");
        chat.shows("Ctrl-C again to quit; /exit and Ctrl-D");
        chat.prompts();
        assert_eq!(chat.size().0, "0");
    }
    chat.types("\x03");
    chat.prompts();
    assert_eq!(leave(chat, "\x03").0, Some(130));
}

#[test]
fn ctrl_c_in_an_answer_drops_the_lines_after_it() {
    let mut chat = Terminal::chat(&["--temp", "0", "--ignore-eos", "-c", "8192"]);
    chat.prompts();
    // At once, so that the editor reads them all.
    chat.types("Tell me a story\rOne\rTwo\r");
    chat.shows("\x1b[?2004l\r\n");
    chat.shows(" ");
    chat.interrupt();
    chat.shows("Stopped. ");
    chat.prompts();
    assert_eq!(chat.size().0, "1");
}

#[test]
fn where_lines_cannot_be_edited_ctrl_c_is_the_same() {
    let mut command = antigravity(["chat"]).args(FEW).into_std();
    command.env("TERM", "dumb");
    let mut chat = Terminal::started(command, 0);
    chat.prompts();
    chat.types("Hi\r");
    chat.prompts();
    chat.interrupt();
    chat.shows("Ctrl-C again to quit");
    chat.prompts();
    chat.types("/stats\r");
    chat.shows("messages: 1, ");
    chat.prompts();
    chat.interrupt();
    chat.shows("Ctrl-C again to quit");
    chat.prompts();
    chat.interrupt();
    let (code, shown) = leave(chat, "");
    assert!(code == Some(130) && !shown.contains('\x1b'), "{code:?} {shown:?}");
}

#[test]
fn colours_are_for_terminals_that_have_them() {
    let mut chat = Terminal::chat(&FEW);
    chat.types("/help\rHi\r/stats\r/exit\r");
    let shown = leave(chat, "").1;
    mentions(&shown, &["\x1b[1mstory\x1b[0m", "\x1b[2m> \x1b[0m", "\x1b[1m/retry\x1b[0m  ", "\x1b[2mTTFT: "]);
    let mut command = antigravity(["chat"]).args(FEW).into_std();
    command.env("NO_COLOR", "1");
    let shown = leave(Terminal::started(command, 0), "/help\rHi\r/stats\r/exit\r").1;
    assert!(
        shown.contains("TTFT: ") && !shown.contains("\x1b[1m") && !shown.contains("\x1b[2m"),
        "{shown:?}"
    );
    let piped = antigravity(["chat"]).args(FEW).stdin("/help\nHi\n/stats\n").run();
    mentions(&piped.err, &["/retry  ", "TTFT: "]);
    assert!(!piped.err.contains('\x1b') && !piped.out.contains('\x1b'), "{}", piped.err);
}

#[test]
fn a_context_that_fills_is_told_once() {
    let mut chat = Terminal::chat(&["--temp", "0", "-n", "4", "--ignore-eos", "-c", "160"]);
    let mut shown = String::new();
    for _ in 0..12 {
        shown += &chat.shows("> ");
        chat.types("Go on\r");
    }
    shown += &leave(chat, "/exit\r").1;
    assert_eq!(shown.matches("three quarters full (").count(), 1, "{shown:?}");
    mentions(&shown, &["of 160 tokens). /clear starts over; -c 256 or --eviction-policy sliding"]);
    assert!(shown.find("three quarters") < shown.find("The context is full"), "{shown:?}");
}

#[test]
fn ctrl_c_during_loading_leaves_a_clean_line() {
    let mut run = Terminal::with_progress(&["generate", "-n", "-1", "--ignore-eos", "-t", "1"]);
    run.shows("loading");
    // SAFETY: sends a signal to a child that is not waited for yet.
    unsafe { libc::kill(run.child.id() as i32, libc::SIGINT) };
    let (code, shown) = leave(run, "");
    assert_eq!(code, Some(130));
    assert!(shown.ends_with("\r\x1b[K") && !shown.contains("TTFT"), "{shown:?}");
}

#[test]
fn the_name_alone_shows_what_to_try() {
    let (code, shown) = leave(Terminal::of(&[], 80), "");
    assert_eq!(code, Some(0));
    mentions(&shown, &["story", "antigravity chat ", "antigravity -p", "antigravity --help"]);
    assert!(shown.lines().count() < 12 && shown.lines().all(|line| line.len() < 80), "{shown}");
    antigravity([""; 0]).fails_with(2, &["a command is missing", "--help"]);
}
