//! SentencePiece's algorithm, written out, against what the merges derived from scores give.

use super::made::{CONTROL, Made};
use crate::support::random::Random;
use std::collections::HashMap;
use text::tokenizer::AddSpecial;

/// Of all neighbours that are a piece together joins those of the highest score, the leftmost first.
fn reference(pieces: &[(String, f32)], text: &str) -> Vec<u32> {
    let ids: HashMap<&str, usize> = pieces.iter().enumerate().map(|(i, (p, _))| (p.as_str(), i)).collect();
    let text = if text.is_empty() { String::new() } else { format!("▁{}", text.replace(' ', "▁")) };
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for (i, pair) in symbols.windows(2).enumerate() {
            if let Some(&id) = ids.get(pair.concat().as_str())
                && best.is_none_or(|(score, _)| pieces[id].1 > score)
            {
                best = Some((pieces[id].1, i));
            }
        }
        let Some((_, i)) = best else { break };
        let right = symbols.remove(i + 1);
        symbols[i] += &right;
    }
    let id = |symbol: &String| match ids.get(symbol.as_str()) {
        Some(&id) => vec![259 + id as u32],
        None => symbol.bytes().map(|b| 3 + u32::from(b)).collect(),
    };
    symbols.iter().flat_map(id).collect()
}

fn random_text(random: &mut Random, letters: &[char], longest: usize) -> String {
    (0..random.below(longest)).map(|_| letters[random.below(letters.len())]).collect()
}

fn scored(pieces: &[&str]) -> Vec<(String, f32)> {
    pieces.iter().enumerate().map(|(i, piece)| (piece.to_string(), -(i as f32))).collect()
}

#[test]
fn words_become_the_pieces_of_the_highest_scores() {
    let pieces = scored(&[
        "▁t",
        "he",
        "▁the",
        "▁▁",
        "er",
        "▁▁▁▁",
        "in",
        "▁▁▁",
        "ing",
        "th",
        "▁th",
        "at",
        "▁that",
        "an",
        "▁an",
        "hat",
        "▁",
        "e",
        "t",
        "a",
        "h",
        "n",
        "i",
        "g",
        "r",
        "é",
    ]);
    let made = Made::sentence_piece(&pieces);
    let tokenizer = made.open(400).unwrap();
    let id = |piece: &str| 259 + pieces.iter().position(|(p, _)| p == piece).unwrap() as u32;
    // "at" comes before "hat", "▁th" before both.
    let encode = |text: &str| tokenizer.encode(text, AddSpecial::Yes).unwrap();
    assert_eq!(encode("the that"), [1, id("▁the"), id("▁that")]);
    assert_eq!(encode("xhat"), [1, id("▁"), 3 + u32::from(b'x'), id("hat")]);
    assert_eq!(tokenizer.encode("x", AddSpecial::No).unwrap(), [id("▁"), 3 + u32::from(b'x')]);
    assert_eq!(tokenizer.encode("</s>the", AddSpecial::No).unwrap(), [2, id("▁the")]);
    let mut random = Random(3);
    let letters: Vec<char> = "   theanigré한<s>/".chars().collect();
    for _ in 0..5000 {
        let text = random_text(&mut random, &letters, 40).replace("<s>", "").replace("</s>", "");
        let ids = tokenizer.encode(&text, AddSpecial::No).unwrap();
        assert_eq!(ids, reference(&pieces, &text), "{text:?}");
        assert_eq!(tokenizer.decode(&ids), text);
        assert!(tokenizer.encode_plain("</s> <s>").unwrap().iter().all(|&id| !tokenizer.is_special(id)));
    }
    assert_eq!((tokenizer.bos_token(), tokenizer.eos_ids()), (Some("<s>"), &[2][..]));
}

/// Vocabularies such as training makes: every piece is two others put together, later ones of a lower score.
#[test]
fn random_vocabularies_cut_words_like_the_reference() {
    let mut random = Random(11);
    let mut merged = 0;
    for (round, letters) in ["▁ab", "▁abcd", "▁a", "▁abcdefgh"].iter().cycle().take(24).enumerate() {
        let letters: Vec<char> = letters.chars().collect();
        let mut pieces: Vec<(String, f32)> = letters.iter().map(|c| (c.to_string(), -1000.0)).collect();
        for score in 0..2000 {
            let (a, b) = (random.below(pieces.len()), random.below(pieces.len()));
            let piece = pieces[a].0.clone() + &pieces[b].0;
            if piece.chars().count() <= 10 && pieces.iter().all(|(p, _)| *p != piece) {
                pieces.push((piece, -(score as f32)));
            }
        }
        let tokenizer = Made::sentence_piece(&pieces).open(4000).unwrap();
        let letters: Vec<char> = letters.iter().map(|&c| if c == '▁' { ' ' } else { c }).collect();
        for _ in 0..400 {
            let text = random_text(&mut random, &letters, 60);
            let ids = tokenizer.encode(&text, AddSpecial::No).unwrap();
            assert_eq!(ids, reference(&pieces, &text), "{round}: {text:?}");
            merged += text.len().saturating_sub(ids.len());
        }
    }
    assert!(merged > 10_000, "{merged}");
}

#[test]
fn settings_of_the_file_are_kept_to() {
    let pieces = scored(&["▁a", "a", "▁", "b"]);
    let made = Made::sentence_piece(&pieces);
    let encode = |made: &Made, text: &str| made.open(400).unwrap().encode(text, AddSpecial::Yes).unwrap();
    assert_eq!(encode(&made, "a b"), [1, 259, 261, 262]);
    assert_eq!(encode(&made.clone().truth("add_space_prefix", 0), "a b"), [1, 260, 261, 262]);
    assert_eq!(encode(&made.clone().truth("add_bos_token", 0), "a"), [259]);
    assert_eq!(encode(&made.clone().truth("add_eos_token", 1), "a"), [1, 259, 2]);
    let unnamed = made.clone().without("bos_token_id").without("eos_token_id");
    assert_eq!(encode(&unnamed, "a"), [1, 259]);
    assert_eq!(unnamed.open(400).unwrap().eos_ids(), [2]);
    let others =
        made.clone().number("eot_token_id", 260).number("eom_token_id", 2).number("padding_token_id", 0);
    let tokenizer = others.open(400).unwrap();
    assert_eq!(tokenizer.eos_ids(), [2, 260]);
    assert!(tokenizer.is_special(260));
    // Without the prefix the blank at the start is the text's.
    let tokenizer = made.clone().truth("add_space_prefix", 0).open(400).unwrap();
    assert_eq!(tokenizer.decode(&[261, 260]), " a");
    assert_eq!(made.open(400).unwrap().decode(&[261, 260]), "a");

    // Without the bytes, what is unknown is the unknown token, once for a run.
    let made =
        made.strings("tokens", &["<unk>", "a", "▁", "<s>"]).integers("token_type", &[2, 1, 1, CONTROL]);
    let made = made.floats("scores", &[0.0; 4]).number("bos_token_id", 3).without("eos_token_id");
    assert_eq!(encode(&made, "a한국a"), [3, 2, 1, 0, 1]);
}
