//! Commands that measure, inspect and convert models. None is needed to run one.

mod bench;
mod bundle;
mod columns;
mod doctor;
mod draft;
mod embed;
mod eval;
mod inspect;
mod list;
mod logits;
mod pack;
mod plan;
mod score;
mod tokenize;

use clap::Subcommand;
use files::Result;

/// The commands of this folder, with their help.
#[allow(clippy::large_enum_variant, reason = "there is one value")]
#[derive(Subcommand)]
pub enum ToolCommand {
    /// Measure perplexity, fact recall, and the difference between two settings
    #[command(before_help = "\
Examples:
  antigravity eval --file story.txt
  antigravity eval --file story.txt --kv-type q4 --against kv=f32,weights=f32")]
    Eval(eval::EvalArgs),
    /// Write the raw logits of given token ids
    #[command(before_help = "\
Examples:
  antigravity logits --tokens ids.json --out logits.f32
  antigravity logits --tokens ids.json --out logits.f32 --trace-hash")]
    Logits(logits::LogitsArgs),
    /// Write embeddings of texts, as JSON lines
    #[command(before_help = "\
Examples:
  antigravity embed 'A dog' 'A puppy'
  antigravity embed --file texts.txt --pooling last --dimensions 256")]
    Embed(embed::EmbedArgs),
    /// Write log-probabilities of given texts, as JSON lines
    #[command(before_help = "\
Examples:
  antigravity score --prompt 'Once upon a' ' time' ' dog'
  antigravity score --file texts.txt --logprobs 0")]
    Score(score::ScoreArgs),
    /// Convert a model to a packed file, which loads instantly
    #[command(before_help = "\
Examples:
  antigravity pack
  antigravity pack --model-path model.gguf --out model.packed.safetensors")]
    Pack(pack::PackArgs),
    /// Write one executable file with program, model, tokenizer and chat template
    #[command(
        before_help = "\
Examples:
  antigravity bundle --out story
  antigravity bundle --out story-arm --program target/aarch64-unknown-linux-musl/dist/antigravity",
        after_help = "\
The file runs from any directory and needs no other file. Every command uses its model unless --model-path names \
another. Each start verifies the file table and the text files (CRC-32) and the model (a hash of its header and of \
samples of its weights, and the checks of any packed file); `doctor` verifies every byte. `strip` would remove the \
model. `bundle`, run from a bundle, replaces the model; `pack`, run from one, writes its packed file."
    )]
    Bundle(bundle::BundleArgs),
    /// Measure prompt and generation speed, loading time and memory
    #[command(before_help = "\
Examples:
  antigravity bench
  antigravity bench -p 512 -n 128 --depth 0,1024 --threads 2,4 -o json")]
    Bench(bench::BenchArgs),
    /// Show how much memory a run needs, without loading the model
    #[command(before_help = "\
Examples:
  antigravity plan
  antigravity plan --max-seq-len 8192 --kv-type f16")]
    Plan(plan::PlanArgs),
    /// Show the contents of a model file and the model this program was built for
    #[command(before_help = "\
Examples:
  antigravity inspect
  antigravity inspect model.gguf --format json")]
    Inspect(inspect::InspectArgs),
    /// Show the model of this program and its files
    #[command(before_help = "\
Examples:
  antigravity list
  antigravity list --format json")]
    List(list::ListArgs),
    /// Convert text to token ids, or ids to text
    #[command(before_help = "\
Examples:
  antigravity tokenize 'Once upon a time'
  antigravity tokenize --decode '1, 2, 3'")]
    Tokenize(tokenize::TokenizeArgs),
    /// (internal) Draft side of speculative decoding; started by --draft-model
    #[command(
        before_help = "\
Examples:
  antigravity generate -p 'Once upon a time' --draft-model ./story-draft
  antigravity draft < /dev/null",
        after_help = "\
Reads requests from stdin and writes answers to stdout, one JSON object per line, until stdin ends. The first line \
reports that the model is loaded and identifies its tokenizer."
    )]
    Draft(draft::DraftArgs),
    /// Check this machine: CPU, memory, OpenCL, and whether the model is ready
    #[command(before_help = "\
Examples:
  antigravity doctor
  antigravity doctor --cl-device 1")]
    Doctor(doctor::DoctorArgs),
}

/// Runs a command.
pub fn run(command: ToolCommand) -> Result<()> {
    match command {
        ToolCommand::Eval(a) => eval::run(&a),
        ToolCommand::Logits(a) => logits::run(&a),
        ToolCommand::Embed(a) => embed::run(&a),
        ToolCommand::Score(a) => score::run(&a),
        ToolCommand::Pack(a) => pack::run(&a),
        ToolCommand::Bundle(a) => bundle::run(&a),
        ToolCommand::Bench(a) => bench::run(&a),
        ToolCommand::Plan(a) => plan::run(&a),
        ToolCommand::Inspect(a) => inspect::run(&a),
        ToolCommand::List(a) => list::run(&a),
        ToolCommand::Tokenize(a) => tokenize::run(&a),
        ToolCommand::Draft(a) => draft::run(&a),
        ToolCommand::Doctor(a) => doctor::run(&a),
    }
}
