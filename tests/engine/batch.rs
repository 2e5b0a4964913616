//! Prompts that are completed together: the same bits as each alone, in the order in which they are complete.

use crate::support::cpu_sequence::CpuSequence;
use crate::support::paths;
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvRows, Logits, Run};
use antigravity::model::trace::Trace;
use antigravity::run::eviction::{Eviction, Policy};
use antigravity::run::generate::prompts::BatchAnswer;
use antigravity::run::session::{CancelToken, StopReason};
use antigravity::{BatchItem, Engine, EngineOptions, Error, GenerateOptions, dims};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;
use text::sampler::SamplerOptions;

fn options(batch: usize, threads: usize) -> EngineOptions {
    EngineOptions {
        batch,
        threads,
        max_seq_len: 256,
        prefill_chunk: 48,
        ..EngineOptions::new(paths::model())
    }
}

fn item(prompt: &str, tokens: usize, sampler: SamplerOptions) -> BatchItem {
    let options = GenerateOptions { max_tokens: Some(tokens), sampler, ..Default::default() };
    BatchItem { prompt: prompt.into(), options }
}

fn greedy() -> SamplerOptions {
    SamplerOptions { temperature: 0.0, ..Default::default() }
}

/// Prompts of a token to more than a chunk of attention, answers of none to the whole context, greedy and drawn, with
/// and without stop strings.
fn items() -> Vec<BatchItem> {
    let long = "Once upon a time there was a little girl who had a red ball. ".repeat(11);
    let mut items = vec![
        item("", 20, greedy()),
        item("Once upon a time", 60, greedy()),
        item(&long, 90, greedy()),
        item("Lily", 0, greedy()),
        item("The dog", 5, SamplerOptions { seed: 7, ..Default::default() }),
        item("The dog", 33, SamplerOptions { seed: 8, temperature: 1.2, top_k: 0, ..Default::default() }),
        item("One day", 40, SamplerOptions { seed: 9, frequency_penalty: 0.5, ..Default::default() }),
        item("Tom and Sue", 70, SamplerOptions { seed: 10, min_p: 0.05, ..Default::default() }),
        item("She said", 48, greedy()),
    ];
    items[1].options.stop = vec!["park".into(), ".".into()];
    items[8].options.stop = vec!["\n".into()];
    // Up to the end of its context.
    items[2].options.ignore_eos = true;
    items[7].options.ignore_eos = true;
    items[4].options.logprobs = Some(3);
    items
}

fn alone(engine: &Engine, index: usize, item: &BatchItem) -> BatchAnswer {
    let mut stream = engine.generate_stream(&item.prompt, &item.options).unwrap();
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    while let Some(piece) = stream.next() {
        text += &piece.unwrap();
        logprobs.extend(stream.logprobs().cloned());
    }
    let (tokens, stop) = (stream.timing().tokens, stream.stop_reason().unwrap());
    BatchAnswer { index, text, tokens, logprobs, stop, ..BatchAnswer::default() }
}

fn together(engine: &Engine, items: &[BatchItem]) -> Vec<BatchAnswer> {
    engine.generate_batch(items).unwrap().collect::<Result<_, _>>().unwrap()
}

#[test]
fn each_answer_is_that_of_its_prompt_alone() {
    let items = items();
    let expected: Vec<BatchAnswer> = {
        let engine = Engine::load(options(1, 2)).unwrap();
        items.iter().enumerate().map(|(i, item)| alone(&engine, i, item)).collect()
    };
    let reasons: Vec<StopReason> = expected.iter().map(|a| a.stop).collect();
    assert!(reasons.contains(&StopReason::Context) && reasons.contains(&StopReason::Stop), "{reasons:?}");
    // More prompts than sequences, as many, one; more threads than prompts.
    for (batch, threads) in [(4, 1), (2, 3), (9, 2), (3, 12), (1, 2)] {
        let engine = Engine::load(options(batch, threads)).unwrap();
        let mut found = together(&engine, &items);
        let mut order: Vec<usize> = found.iter().map(|a| a.index).collect();
        found.sort_by_key(|a| a.index);
        assert_eq!(found, expected, "{batch} at once, {threads} threads");
        assert_eq!(order.is_sorted(), batch == 1, "{order:?}");
        order.sort_unstable();
        assert_eq!(order, (0..items.len()).collect::<Vec<_>>());
    }
}

/// Short texts of all kinds, with eight at once: a prompt is computed beside others' tokens, and with experts each pass
/// has other tokens of each expert.
#[test]
fn five_hundred_texts_are_each_as_alone() {
    const WORDS: [&str; 7] = ["Once", " upon", " a", " time", " Lily", " saw", " 17"];
    let items: Vec<BatchItem> = (0..500usize)
        .map(|i| {
            let prompt: String =
                (0..=i % 9).map(|n| WORDS[(i / 9 + n * (i % 5 + 1)) % WORDS.len()]).collect();
            let drawn = SamplerOptions { seed: i as u64, temperature: 1.5, top_k: 0, ..Default::default() };
            let mut item = item(&prompt, i % 7, if i % 3 == 0 { greedy() } else { drawn });
            item.options.ignore_eos = true;
            item
        })
        .collect();
    let engine = Engine::load(options(1, 1)).unwrap();
    let expected: Vec<BatchAnswer> =
        items.iter().enumerate().map(|(i, item)| alone(&engine, i, item)).collect();
    let mut texts: Vec<&str> = expected.iter().map(|answer| &*answer.text).collect();
    texts.sort_unstable();
    texts.dedup();
    assert!(texts.len() > 200, "only {} different texts", texts.len());
    let engine = Engine::load(EngineOptions { prefill_chunk: 5, ..options(8, 3) }).unwrap();
    let mut found = together(&engine, &items);
    found.sort_by_key(|answer| answer.index);
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found, expected);
    }
    assert_eq!(found.len(), expected.len());
}

#[test]
fn each_text_evicts_as_it_would_alone() {
    for policy in [Policy::Sliding, Policy::SnapKv, Policy::H2o] {
        let eviction = Eviction { policy, window: 64, prefix: Some(4), memory_threshold: 0 };
        let engine = Engine::load(EngineOptions { eviction, ..options(4, 2) }).unwrap();
        let items: Vec<BatchItem> = (0..5).map(|i| item("Once upon a time", 60 + 20 * i, greedy())).collect();
        let expected: Vec<BatchAnswer> =
            items.iter().enumerate().map(|(i, item)| alone(&engine, i, item)).collect();
        assert_eq!(together(&engine, &items), expected, "{policy:?}");
    }
}

#[test]
fn a_prompt_that_cannot_be_completed_is_named_before_anything_runs() {
    let engine = Engine::load(options(2, 1)).unwrap();
    let long = "a b c d e f g ".repeat(100);
    for (bad, what) in [
        (item(&long, 3, greedy()), "raise `EngineOptions::max_seq_len`"),
        (item("a", 3, SamplerOptions { temperature: f32::NAN, ..greedy() }), "temperature"),
    ] {
        let items = [item("Lily", 3, greedy()), bad];
        let Err(e) = engine.generate_batch(&items) else { panic!("{what}") };
        let said = e.to_string();
        assert!(matches!(e, Error::Usage(_)) && said.contains("prompt 1 ") && said.contains(what), "{said}");
    }
    assert!(together(&engine, &[]).is_empty());
}

/// A text that its grammar makes impossible after the first letter, among others.
#[cfg(feature = "grammar")]
#[test]
fn a_text_that_cannot_go_on_ends_alone() {
    for batch in [1, 2, 3] {
        let engine = Engine::load(options(batch, 2)).unwrap();
        let grammar = text::sampler::Grammar::from_gbnf("g", "root ::= \"ab\"").unwrap();
        let has_b = |&id: &u32| engine.tokenizer().decode(&[id]).contains('b');
        let logit_bias = (0..dims::VOCAB as u32).filter(has_b).map(|id| (id, f32::NEG_INFINITY)).collect();
        let ruled_out = SamplerOptions { grammar: Some(grammar), logit_bias, ..greedy() };
        let good = [item("Lily", 20, greedy()), item("Tom and Sue", 9, greedy())];
        let items = [good[0].clone(), item("The", 5, ruled_out), good[1].clone()];
        let (mut right, wrong): (Vec<_>, Vec<_>) =
            engine.generate_batch(&items).unwrap().partition(|answer| answer.is_ok());
        right.sort_by_key(|a| a.as_ref().unwrap().index);
        assert_eq!(right, [Ok(alone(&engine, 0, &items[0])), Ok(alone(&engine, 2, &items[2]))]);
        let said = wrong.iter().map(|e| e.as_ref().unwrap_err().to_string()).collect::<Vec<_>>();
        assert!(said.len() == 1 && said[0].starts_with("prompt 1 (from 0): the grammar"), "{said:?}");
    }
}

#[test]
fn cancelling_ends_all_with_what_there_is() {
    for batch in [1, 3] {
        let engine = Engine::load(options(batch, 2)).unwrap();
        let cancel = CancelToken::default();
        let mut items: Vec<BatchItem> = (0..6).map(|_| item("Once upon a time", 100, greedy())).collect();
        items[0].options.max_tokens = Some(10);
        items.iter_mut().for_each(|item| item.options.cancel = cancel.clone());
        let whole = alone(&engine, 1, &items[1]).text;
        let mut answers = engine.generate_batch(&items).unwrap();
        let first = answers.next().unwrap().unwrap();
        assert_eq!((first.index, first.tokens, first.stop), (0, 10, StopReason::Length));
        cancel.cancel();
        let rest: Vec<BatchAnswer> = answers.map(|a| a.unwrap()).collect();
        assert_eq!(rest.len(), 5);
        assert!(
            rest.iter().all(|a| a.stop == StopReason::Interrupt && whole.starts_with(&a.text)),
            "{rest:?}"
        );
        let begun = rest.iter().filter(|a| a.tokens > 0).count();
        assert_eq!(begun, batch - 1, "{rest:?}");
    }
}

/// Runs of one pass: tokens of sequences of different lengths, from a first token alone to one that ends beyond a chunk
/// of attention, and parts of prompts beside them.
#[test]
fn logits_of_any_mixture_of_runs_are_those_of_each_alone() {
    let engine = Engine::load(options(1, 1)).unwrap();
    let token = |sequence: usize, i: usize| ((sequence * 131 + i * 37) % 3000 % dims::VOCAB) as u32;
    for isa in Isa::available() {
        let kv_types = KvTypes { k: KvType::Q8, v: KvType::Q4 };
        let options = CpuOptions { threads: 3, isa, kv_types, slots: 160, max_tokens: 40 };
        let weights = || Arc::clone(engine.weights());
        let mut together = CpuDevice::new(weights(), options).unwrap();
        let mut caches: Vec<_> = (0..5).map(|_| together.new_cache(160).unwrap()).collect();
        let mut singles: Vec<_> =
            (0..5).map(|_| CpuSequence::new(weights(), CpuOptions { threads: 2, ..options })).collect();
        let mut lengths = [0usize, 1, 30, 118, 126];
        for (sequence, &n) in lengths.iter().enumerate() {
            let prompt: Vec<u32> = (0..n).map(|i| token(sequence, i)).collect();
            for (i, chunk) in prompt.chunks(32).enumerate() {
                let run = Run::new(&mut *caches[sequence], chunk, 32 * i, Logits::None);
                together.forward(&mut [run], None).unwrap();
                singles[sequence].forward(chunk, Logits::None);
            }
        }
        for step in 0..6 {
            // Not always all of them; one, two or seven tokens; of all, the last or none the logits.
            let tokens: Vec<Vec<u32>> = (0..5)
                .map(|s| {
                    (0..[1, 1, 7, 1, 2][(s + step) % 5]).map(|i| token(s, 500 + 10 * step + i)).collect()
                })
                .collect();
            let mut found: Vec<Vec<f32>> = tokens.iter().map(|t| vec![0.0; t.len() * dims::VOCAB]).collect();
            let mut runs = Vec::new();
            for (s, ((cache, tokens), found)) in caches.iter_mut().zip(&tokens).zip(&mut found).enumerate() {
                if (s + step) % 4 == 0 {
                    continue;
                }
                let logits = match (s + step) % 3 {
                    0 => Logits::All(found),
                    1 => Logits::Last(&mut found[..dims::VOCAB]),
                    _ => Logits::None,
                };
                runs.push(Run::new(&mut **cache, tokens, lengths[s], logits));
            }
            together.forward(&mut runs, None).unwrap();
            for (s, (tokens, found)) in
                tokens.iter().zip(&found).enumerate().filter(|(s, _)| (s + step) % 4 != 0)
            {
                let mut expected = vec![0.0; found.len()];
                match (s + step) % 3 {
                    0 => singles[s].forward(tokens, Logits::All(&mut expected)),
                    1 => singles[s].forward(tokens, Logits::Last(&mut expected[..dims::VOCAB])),
                    _ => singles[s].forward(tokens, Logits::None),
                }
                lengths[s] += tokens.len();
                assert!(*found == expected, "{}: sequence {s}, step {step}", isa.name());
                assert_eq!(caches[s].extent().len, lengths[s]);
            }
        }
        for (s, (cache, single)) in caches.iter_mut().zip(&mut singles).enumerate() {
            let mut rows = KvRows::default();
            for (layer, expected) in single.rows().iter().enumerate() {
                cache.read_rows(layer, 0..lengths[s], &mut rows).unwrap();
                assert!(rows == *expected, "{}: rows of sequence {s}", isa.name());
            }
        }
    }
}

/// The last layer is computed only where it is read; this must not show in logits, in rows, nor in the mass
/// of observed slots.
#[test]
fn logits_are_the_same_whichever_others_are_read() {
    const LENGTHS: [usize; 5] = [17, 1, 5, 1, 9];
    let engine = Engine::load(options(1, 1)).unwrap();
    let token = |s: usize, i: usize| ((s * 151 + i * 41) % 3000 % dims::VOCAB) as u32;
    for (isa, types) in Isa::available().into_iter().zip([KvType::Q4, KvType::F16, KvType::Q8].iter().cycle())
    {
        let options =
            CpuOptions { threads: 3, isa, kv_types: KvTypes::same(*types), slots: 256, max_tokens: 40 };
        let weights = || Arc::clone(engine.weights());
        let mut together = CpuDevice::new(weights(), options).unwrap();
        let mut caches: Vec<_> = (0..5).map(|_| together.new_cache(256).unwrap()).collect();
        let mut whole: Vec<_> = (0..5).map(|_| CpuSequence::new(weights(), options)).collect();
        // Sequence 4 is observed.
        whole[4].observe(6);
        caches[4].write_mass(0, &[]).unwrap();
        for step in 0..10 {
            let mut runs = Vec::new();
            let mut found = vec![vec![0.0; 17 * dims::VOCAB]; 5];
            let tokens: [Vec<u32>; 5] = std::array::from_fn(|s| {
                (0..LENGTHS[(s + step) % 5]).map(|i| token(s, 20 * step + i)).collect()
            });
            let present = |s: usize| step < 5 || !(s + step).is_multiple_of(3);
            let read = |s: usize| [0, 1, 2, 1][(s * (1 + step / 4) + step) % 4];
            let all = caches.iter_mut().zip(&tokens).zip(&mut found).enumerate();
            for (s, ((cache, tokens), found)) in all.filter(|(s, _)| present(*s)) {
                let logits = match read(s) {
                    0 => Logits::None,
                    1 => Logits::Last(&mut found[..dims::VOCAB]),
                    _ => Logits::All(&mut found[..tokens.len() * dims::VOCAB]),
                };
                let observe = if s == 4 { 6 } else { 0 };
                runs.push(Run {
                    observed_tokens: observe,
                    ..Run::new(&mut **cache, tokens, whole[s].len(), logits)
                });
            }
            together.forward(&mut runs, None).unwrap();
            for s in (0..5).filter(|&s| present(s)) {
                let mut expected = vec![0.0; tokens[s].len() * dims::VOCAB];
                whole[s].forward(&tokens[s], Logits::All(&mut expected));
                let from = [expected.len(), expected.len() - dims::VOCAB, 0][read(s)];
                let expected = &expected[from..];
                assert!(found[s][..expected.len()] == *expected, "{}: {s} in step {step}", isa.name());
            }
        }
        for (s, (cache, whole)) in caches.iter_mut().zip(&mut whole).enumerate() {
            let mut rows = KvRows::default();
            for (layer, expected) in whole.rows().iter().enumerate() {
                cache.read_rows(layer, 0..whole.len(), &mut rows).unwrap();
                assert!(rows == *expected, "{}: rows of {s}", isa.name());
            }
        }
        let mut mass = [(); 2].map(|()| vec![0.0; dims::KV_HEADS * whole[4].len()]);
        for layer in dims::full_attention_layers() {
            caches[4].read_mass(layer, &mut mass[0]).unwrap();
            whole[4].cache.read_mass(layer, &mut mass[1]).unwrap();
            assert!(mass[0] == mass[1], "{}: mass of layer {layer}", isa.name());
        }
    }
}

/// The digest after the last layer is that of the last token, even where nobody reads its logits.
#[test]
fn a_trace_has_the_same_residuals_whatever_is_read() {
    let engine = Engine::load(options(1, 1)).unwrap();
    let options = CpuOptions {
        threads: 2,
        isa: Isa::detect().unwrap(),
        kv_types: KvTypes::same(KvType::Q4),
        slots: 64,
        max_tokens: 40,
    };
    let tokens: Vec<u32> = (0..23).map(|i| (i * 89 % dims::VOCAB) as u32).collect();
    let trace_of = |read: usize| {
        let mut alone = CpuSequence::new(Arc::clone(engine.weights()), options);
        alone.device.set_trace(Some(Trace::default()));
        let mut rows = vec![0.0; [0, 1, tokens.len()][read] * dims::VOCAB];
        let logits = match read {
            0 => Logits::None,
            1 => Logits::Last(&mut rows),
            _ => Logits::All(&mut rows),
        };
        alone.forward(&tokens, logits);
        let trace = alone.device.set_trace(None).unwrap();
        let projections = trace.step_totals().into_iter().find(|step| step.0 == "qkv").unwrap().2;
        (trace.hashes, projections - dims::LAYERS as u64)
    };
    let (all, narrowed) = trace_of(2);
    assert_eq!((all.len(), narrowed), (dims::LAYERS, 0));
    // Where not all is read, the queries of the last layer are a step of their own, of the tokens left.
    assert_eq!([trace_of(0), trace_of(1)], [(all.clone(), 1), (all, 1)]);
}
