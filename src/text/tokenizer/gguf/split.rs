//! Pre-tokenizers, which split text into words before merging, by their names in GGUF files (`tokenizer.ggml.pre`).
//!
//! The steps are those of the `tokenizer.json` published with these models, so that both give the same ids. For models
//! whose file was not at hand they are llama.cpp's (`src/llama-vocab.cpp`), where the names come from. Qwen's
//! normalisation to NFC is included: no GGUF file mentions it and llama.cpp leaves it out, but the model was trained
//! with it.
//!
//! Patterns apply one after another, each to the words of the one before: its matches and the text between them become
//! words. (They are not checked like those of a file; each was tried with long texts of one kind of character.)

use serde_json::{Value, json};

/// SentencePiece's sign for a space.
pub(super) const SPACE_MARK: &str = "▁";

/// The known names, for messages.
pub(super) const NAMES: &str =
    "\"llama-bpe\", \"qwen2\", \"gpt-2\", \"gpt-4o\", \"tekken\" and the other names that llama.cpp has";

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Llama 3's, except that runs of spaces become words of powers of two.
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s";
const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen's without English contractions.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// OpenAI's o200k.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI: &str = r"\p{Han}+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
/// Letters that have upper and lower case.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_SIGNS: &str = r"\s?[!-/:-~！-／：-～‘-‟\x{3000}-。]+";
/// Chinese, Korean and the characters between them.
const DEEPSEEK_EAST: &str = r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+";
/// Chinese and Japanese.
const CJK: &str = r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+";
const YOUTU_EAST: &str = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+|[ㄅ-ㄯ]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+";
const AFMOE_EAST: &str = r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+";
const NUMBER: &str = r"\p{N}";
const NUMBERS: &str = r"\p{N}+";
const UP_TO_THREE: &str = r"\p{N}{1,3}";
/// Runs of digits of bounded length, split before [`THREES`], which looks ahead from each digit to the end of the
/// number. In a longer number threes are counted from these splits, not from its end.
const BOUNDED: &str = r"\d{1,510}";
/// Groups of three digits from the right.
const THREES: &str = r"\d{1,3}(?=(?:\d{3})*(?!\d))";
const THREE_DIGITS: &str = r"[0-9][0-9][0-9]";
const LINES: &str = r"[^\n]+|\n+";

/// A property of a pre-tokenizer besides its patterns.
#[derive(Debug, Clone, Copy, PartialEq)]
enum SplitTrait {
    /// Text is normalised to NFC.
    Nfc,
    /// A word that is a token becomes that token, even if the merges do not lead to it.
    WholeWords,
    /// The begin-of-text token is added unless the file says otherwise.
    AddBos,
    /// Tokens are text, in which U+2581 stands for a space, with bytes as fallback.
    Escaped,
    /// Tokens are text, with bytes as fallback.
    Plain,
}

use SplitTrait::{AddBos, Escaped, Nfc, Plain, WholeWords};

/// The names of a pre-tokenizer, its patterns and its other properties.
type Rule = (&'static [&'static str], &'static [&'static str], &'static [SplitTrait]);

#[rustfmt::skip]
const RULES: &[Rule] = &[
    (&["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        &[LLAMA3], &[WholeWords, AddBos]),
    // "smaug-bpe" is SmolLM3's.
    (&["smaug-bpe", "glm4", "glm5"], &[LLAMA3], &[WholeWords]),
    (&["dbrx", "chatglm-bpe"], &[LLAMA3], &[]),
    (&["jais-2"], &[JAIS2], &[]),
    (&["minicpm5"], &[UP_TO_THREE, MINICPM5], &[WholeWords]),
    (&["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"], &[QWEN2], &[Nfc]),
    (&["qwen35"], &[QWEN35], &[Nfc]),
    (&["stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2], &[]),
    (&["laguna"], &[LINES, QWEN2], &[]),
    (&["ufakzeka"], &[UFAKZEKA], &[]),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING], &[]),
    (&["seed-coder"], &[SEED], &[]),
    (&["exaone-moe"], &[EXAONE_MOE], &[]),
    (&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], &[GPT_4O], &[]),
    (&["granite-embed-multi-97m"], &[GPT_4O], &[WholeWords]),
    (&["tiny_aya", "cohere2moe"], &[BOUNDED, THREES, GPT_4O], &[]),
    (&["youtu"], &[YOUTU_EAST, YOUTU], &[WholeWords]),
    (&["tekken"], &[TEKKEN], &[WholeWords, AddBos]),
    (&["kimi-k2"], &[KIMI], &[]),
    (&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM], &[]),
    (&["viking"], &[BLOOM, NUMBER], &[]),
    (&["deepseek-llm"], &[r"[\r\n]", DEEPSEEK_LETTERS, DEEPSEEK_SIGNS, r"\s+$", DEEPSEEK_EAST, NUMBERS], &[]),
    (&["deepseek-coder"], &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_EAST, NUMBER], &[]),
    (&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], &[UP_TO_THREE, CJK, DEEPSEEK3], &[]),
    (&["spark2_5"], &[UP_TO_THREE, CJK, SPARK, NUMBER], &[]),
    (&["afmoe"], &[BOUNDED, THREES, AFMOE_EAST, DEEPSEEK3], &[]),
    (&["superbpe"], &[NUMBERS, BOUNDED, THREES], &[]),
    (&["falcon"], &[r"[\p{P}$+<=>^~|`]+", GPT2, THREE_DIGITS], &[]),
    (&["default"], &[r"[\p{P}$+<=>^~|]+", GPT2, NUMBERS, THREE_DIGITS], &[]),
    (&["chameleon"], &[r"<sentinel:[0-9]+>", r"IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", NUMBER, r"[\p{P}!-/:-@\[-`{-~]",
        GPT2], &[AddBos]),
    // SmolLM, Granite, Command R: digits one by one.
    (&["smollm", "refact", "starcoder", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"], &[NUMBER, GPT2],
        &[]),
    (&["gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "gigachat", "a.x-4.0",
        "mellum", "modern-bert", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de",
        "jina-v2-code"], &[GPT2], &[]),
    (&["gemma4", "granite-embed-multi-311m", "sarvam-moe"], &[LINES], &[Escaped]),
    (&["whitespace"], &[r"\S+"], &[Plain]),
];

/// The steps of a pre-tokenizer.
pub(super) struct PreTokenizer {
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Value,
    pub ignore_merges: bool,
    pub add_bos: bool,
    /// Tokens are text, not bytes in GPT-2's alphabet.
    pub text: bool,
}

/// The step that replaces each space by [`SPACE_MARK`].
pub(super) fn replace_spaces() -> Value {
    json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK})
}

/// Returns the steps of the pre-tokenizer `name`, if it is known.
pub(super) fn find_pre_tokenizer(name: &str) -> Option<PreTokenizer> {
    let &(_, patterns, traits) = RULES.iter().find(|(names, ..)| names.contains(&name))?;
    let has = |one| traits.contains(&one);
    let text = has(Escaped) || has(Plain);
    // GPT-2's pattern is built into the step that knows its alphabet.
    let (patterns, built_in) = match patterns {
        [before @ .., last] if *last == GPT2 => (before, true),
        _ => (patterns, false),
    };
    let split = |regex: &&str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let mut steps: Vec<Value> = patterns.iter().map(split).collect();
    if !text {
        steps.push(
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": built_in}),
        );
    }
    Some(PreTokenizer {
        normalizer: if has(Escaped) {
            Some(replace_spaces())
        } else {
            has(Nfc).then(|| json!({"type": "NFC"}))
        },
        pre_tokenizer: json!({"type": "Sequence", "pretokenizers": steps}),
        ignore_merges: has(WholeWords),
        add_bos: has(AddBos),
        text,
    })
}
