//! Simple questions, which a real model answers with the defaults of `chat`. With the repetition penalty of `generate`
//! it answers fewer: not the ones for a program and for a name.
//!
//! A seed makes each answer the same on every machine. The results with llama.cpp's defaults are printed for
//! comparison.

use crate::command;
use crate::error::{Error, Result};
use crate::parity::engine::Engine;
use crate::test::report::Tally;

/// A question, its seed, the maximum tokens of its answer, and texts of a right answer without spaces.
type Question = (&'static str, &'static str, &'static str, &'static [&'static str]);

const QUESTIONS: [Question; 10] = [
    ("Write a Python function that returns the nth Fibonacci number.", "4", "160", &["(n-1)+", "(n-2)"]),
    ("What is the most famous museum in Paris?", "1", "50", &["Louvre"]),
    ("Which planet is known as the Red Planet?", "3", "30", &["Mars"]),
    ("Who wrote the play Romeo and Juliet?", "1", "30", &["Shakespeare"]),
    ("How many days are there in a week?", "5", "30", &["7days"]),
    ("What is the opposite of hot?", "5", "30", &["cold"]),
    ("What is the capital of France?", "6", "40", &["Paris"]),
    ("What is the largest ocean on Earth?", "2", "40", &["Pacific"]),
    ("What is the capital of Japan?", "5", "30", &["Tokyo"]),
    ("How many legs does a spider have?", "4", "30", &["8legs"]),
];

/// Number of questions, from the first, that a repetition penalty spoils.
const SPOILED: usize = 2;

/// The repetition penalty of `generate`.
const PENALTY: [&str; 2] = ["--repeat-penalty", "1.1"];
/// Defaults of llama.cpp that differ from `chat`.
const AS_LLAMA_CPP: [&str; 4] = ["--top-p", "0.95", "--min-p", "0.05"];

pub(super) fn check(engine: &Engine, tally: &mut Tally) -> Result<()> {
    let (mut with_penalty, mut as_llama_cpp) = (0, 0);
    for (i, question) in QUESTIONS.iter().enumerate() {
        let (answer, penalised) = (ask(engine, question, &[])?, ask(engine, question, &PENALTY)?);
        let wrong = || Error::Failed(format!("{answer:?}"));
        tally.count(question.0, is_right(question, &answer).then_some(()).ok_or_else(wrong));
        let unspoiled = is_right(question, &penalised);
        with_penalty += usize::from(unspoiled);
        as_llama_cpp += usize::from(is_right(question, &ask(engine, question, &AS_LLAMA_CPP)?));
        if i < SPOILED && unspoiled {
            let why = Error::Failed(format!("a penalty of 1.1 no longer spoils it: {penalised:?}"));
            tally.count(&format!("{} With a penalty", question.0), Err(why));
        }
    }
    let all = QUESTIONS.len();
    eprintln!(
        "right of {all}: {with_penalty} with a repetition penalty of 1.1, {as_llama_cpp} with llama.cpp's defaults"
    );
    Ok(())
}

fn ask(engine: &Engine, (question, seed, tokens, _): &Question, more: &[&str]) -> Result<String> {
    let mut chat = engine.command("chat");
    chat.args(["--single-turn", "--quiet", "--seed", seed, "--num-tokens", tokens, "--prompt", question])
        .args(more);
    Ok(String::from_utf8_lossy(&command::stdout(&mut chat)?).into_owned())
}

fn is_right((_, _, _, words): &Question, answer: &str) -> bool {
    let answer = answer.replace(' ', "");
    words.iter().all(|word| answer.contains(word))
}
