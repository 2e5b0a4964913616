//! `draft`: drafts tokens for the antigravity program that started this one.

use crate::cli::args::{LoadArgs, MAX_SEQ_LEN, MAX_THREADS, check_range};
use crate::cli::terminal::write_stdout;
use crate::dims::VOCAB;
use crate::run::draft_model::protocol::{
    self, DraftAnswer, DraftRequest, Handshake, MAX_DRAFT, MAX_REQUEST_BYTES, VERSION,
};
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use crate::run::session::{CancelToken, Session};
use clap::Args;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use text::sampler::{Sampler, SamplerOptions};

/// Maximum of `--sequences`: as many as prompts that run together.
const MAX_SEQUENCES: usize = 256;

/// The draft side of speculative decoding.
#[derive(Args, Clone)]
pub struct DraftArgs {
    #[command(flatten, next_help_heading = "Model")]
    load: LoadArgs,
    /// Number of CPU threads
    #[arg(short, long, default_value_t = 2, value_name = "N")]
    threads: usize,
    /// Context size in tokens, for each sequence; of a longer one, the end is recomputed from time to time
    #[arg(short = 'c', long, default_value_t = 2048, value_name = "N")]
    max_seq_len: usize,
    /// Number of sequences that draft together
    #[arg(short = 'n', long, default_value_t = 1, value_name = "N")]
    sequences: usize,
}

/// Loads the model, sends the handshake, and answers requests until stdin ends. Writes no file, because its parent may
/// kill it.
pub fn run(args: &DraftArgs) -> Result<()> {
    let options = EngineOptions {
        // f16 is small enough and closest to the model's training.
        kv_types: KvTypes::same(KvType::F16),
        threads: check_range("--threads", args.threads, MAX_THREADS)?,
        max_seq_len: check_range("--max-seq-len", args.max_seq_len, MAX_SEQ_LEN)?,
        batch: check_range("--sequences", args.sequences, MAX_SEQUENCES)?,
        ..args.load.resolve_options()?
    };
    let engine = Engine::load(options)?;
    let mut texts = Vec::with_capacity(args.sequences);
    for session in engine.sessions_with(engine.options(), args.sequences)? {
        texts.push(DraftSequence::new(session)?);
    }
    let tokenizer = engine.tokenizer().pieces().compute_checksum();
    write_stdout(&protocol::to_line(&Handshake {
        antigravity_draft: VERSION,
        tokenizer,
        sequences: args.sequences,
    }))?;
    let mut input = std::io::stdin().lock();
    while let Some(line) = protocol::read_line(&mut input, MAX_REQUEST_BYTES)? {
        let request = protocol::parse_message(&line).map_err(|e| Error::Usage(format!("stdin: {e}")))?;
        write_stdout(&protocol::to_line(&answer_request(&mut texts, request, &engine)?))?;
    }
    Ok(())
}

/// Answers a request.
///
/// # Errors
///
/// `Usage` for an invalid request, and the errors of the model.
fn answer_request(
    texts: &mut [DraftSequence],
    request: DraftRequest,
    engine: &Engine,
) -> Result<DraftAnswer> {
    let wrong = |what: String| Err(Error::Usage(format!("stdin: {what}")));
    let DraftRequest { id, sequence, keep, tokens, draft, least, sampler, random } = request;
    let most = texts.len();
    let Some(text) = texts.get_mut(sequence) else {
        return wrong(format!("sequence {sequence}: this program has only {most}"));
    };
    if keep > text.tokens.len() || draft > MAX_DRAFT {
        return wrong(format!("keep {keep} of {} tokens, draft {draft}", text.tokens.len()));
    }
    text.tokens.truncate(keep);
    text.tokens.extend(tokens);
    if let Some(options) = sampler {
        text.sampler = Sampler::new(options, VOCAB)?.with_pieces(engine.tokenizer().pieces());
    }
    if let Some(random) = random {
        text.sampler.set_rng(random);
    }
    Ok(DraftAnswer { id, tokens: text.draft_tokens(draft, least)? })
}

/// One of the parent program's sequences.
struct DraftSequence {
    session: Session,
    /// All tokens; the session may hold only the last ones.
    tokens: Vec<u32>,
    /// Index in `tokens` of the session's first token.
    session_start: usize,
    sampler: Sampler,
    /// `[VOCAB]`, scratch for the sampler.
    logits: Vec<f32>,
}

impl DraftSequence {
    fn new(session: Session) -> Result<Self> {
        let greedy = SamplerOptions { temperature: 0.0, repetition_penalty: 1.0, ..Default::default() };
        let sampler = Sampler::new(greedy, VOCAB)?;
        Ok(Self { session, tokens: Vec::new(), session_start: 0, sampler, logits: vec![0.0; VOCAB] })
    }

    /// Samples the next tokens: at most `most`, as long as their joint probability is at least `least`.
    fn draft_tokens(&mut self, most: usize, least: f32) -> Result<Vec<u32>> {
        let (all, slots) = (self.tokens.len(), self.session.extent().slots);
        // The parent's vocabulary may have more ids, for padding at its end.
        let is_known = |&id: &u32| (id as usize) < VOCAB;
        if most == 0 || all == 0 || most >= slots || !self.tokens.iter().all(is_known) {
            return Ok(Vec::new());
        }
        if self.session_start >= all || all - self.session_start + most > slots {
            self.session_start = all.saturating_sub((slots - most).min(slots / 2).max(1));
        } else if all + most <= slots {
            self.session_start = 0;
        }
        self.session.sync_prompt(&self.tokens[self.session_start..], &CancelToken::default())?;
        let mut joint = 1.0;
        for n in 1..=most {
            self.logits.copy_from_slice(self.session.logits());
            let token = self.sampler.sample_token(&mut self.logits, &self.tokens);
            joint *= self.token_probability(token);
            if joint < least {
                break;
            }
            self.tokens.push(token);
            if n < most {
                self.session.decode(token)?;
            }
        }
        Ok(self.tokens.split_off(all))
    }

    /// The probability of the sampled token, before top-k and the like.
    fn token_probability(&self, token: u32) -> f32 {
        let chosen = self.logits[token as usize];
        match self.sampler.options().temperature {
            // Greedy: `logits` still holds logits, and the token has the largest.
            0.0 => 1.0 / self.logits.iter().map(|x| (x - chosen).exp()).sum::<f32>(),
            _ => chosen,
        }
    }
}
