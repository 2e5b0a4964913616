//! Whatever text a file holds: an error about it is one line of at most 400 bytes, in which that text is escaped and
//! shortened. Every text of every format is replaced in turn.

use crate::hostile_model::{Model, WEIGHTS};
use crate::support::gguf::writer::{ARRAY, Parts, STRING, U32, array, info, pair, text};
use crate::support::hostile::{self, assert_line, variants};
use crate::support::paths;
use crate::support::test_dir::TestDir;
use crate::tokenizer::made::Made;
use antigravity::model::weights::{ModelPath, WeightType};
use antigravity::{Result, dims};
use files::packed_file::PACKED_NAME;
use files::source::Safetensors;
use files::source::gguf::Gguf;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use text::chat::{Message, PromptEnding, RenderContext, Role, Template, UtcTime};
use text::tokenizer::Tokenizer;

fn fixture() -> PathBuf {
    paths::root().join("tests/fixtures/models/m1-llama32-bf16")
}

/// Puts the variants of a JSON file into `dir` in turn, and checks the errors of `open`: there are at least so many.
fn walk(dir: &Path, file: &str, least: usize, open: impl Fn() -> Result<()>) {
    let path = dir.join(file);
    let sound = fs::read(&path).unwrap();
    open().unwrap_or_else(|e| panic!("{file} as it is: {e}"));
    let document: Value = serde_json::from_slice(&sound).unwrap();
    let mut refused = 0;
    for (place, changed) in variants(&document, &hostile::text()) {
        fs::write(&path, changed.to_string()).unwrap();
        if let Err(e) = open() {
            assert_line(&format!("{file}{place}"), &e.to_string());
            refused += 1;
        }
    }
    assert!(refused >= least, "{file}: {refused} refused");
    fs::write(&path, sound).unwrap();
}

#[test]
fn configs() {
    let model = Model::copy();
    let open = || ModelPath::new(&model.0.0)?.open(WeightType::Auto)?.check_config();
    walk(&model.0.0, "config.json", 20, open);
}

#[test]
fn tokenizers_and_their_settings() {
    let temp = TestDir::new();
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "config.json"] {
        fs::copy(fixture().join(file), temp.file(file)).unwrap();
    }
    let open = || {
        let tokenizer = Tokenizer::open(&temp.0, 352)?;
        let template = Template::load_from_path(&temp.0)?.for_tokenizer(&tokenizer)?;
        template.encode_messages(
            &tokenizer,
            &[Message::new(Role::User, "q")],
            UtcTime::from_unix(0),
            PromptEnding::Prompt,
        )?;
        Ok(())
    };
    walk(&temp.0, "tokenizer.json", 30, open);
    walk(&temp.0, "tokenizer_config.json", 1, open);
    walk(&temp.0, "generation_config.json", 0, open);
}

#[test]
fn chat_templates() {
    let context = RenderContext {
        bos: None,
        now: UtcTime::from_unix(0),
        ending: PromptEnding::Prompt,
        variables: None,
    };
    let hostile = hostile::text();
    for source in [
        format!("{{{{ raise_exception('{hostile}') }}}}"),
        format!("{{{{ strftime_now('%{hostile}') }}}}"),
        format!("{{{{ messages | {hostile} }}}}"),
        format!("{{{{ messages['{hostile}']['{hostile}'].x }}}}"),
        format!("{{% {hostile} %}}"),
        format!("{{{{ {hostile} }}}}"),
        format!("{{{{ '{hostile}'.{}() }}}}", "y".repeat(5000)),
        format!("{{{{ {}() }}}}", "y".repeat(5000)),
    ] {
        let temp = TestDir::new().with("chat_template.jinja", &source);
        let rendered = Template::load_from_path(&temp.0)
            .and_then(|t| t.render_messages(&[Message::new(Role::User, "q")], &context));
        assert_line(&source[..20], &rendered.expect_err(&source[..20]).to_string());
    }
}

#[test]
fn headers_and_indexes_of_safetensors() {
    let temp = TestDir::new();
    let write = |file: &str, header: &Value| {
        let header = header.to_string();
        temp.write(file, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat());
    };
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "U32", "shape": [1], "data_offsets": [4, 8]},
    });
    let name = hostile::text();
    let mut refused = 0;
    for (place, changed) in variants(&header, &name) {
        write("model.safetensors", &changed);
        let open =
            Safetensors::open(&temp.0).and_then(|s| s.get_required(&name).and(s.get_required("b")).map(drop));
        assert_line(&place, &open.expect_err(&place).to_string());
        refused += 1;
    }
    assert!(refused > 15, "{refused}");
    fs::rename(temp.file("model.safetensors"), temp.file("part.safetensors")).unwrap();
    write("part.safetensors", &header);
    for name in [hostile::text(), hostile::short().into()] {
        let index = json!({"metadata": {"total_size": 8}, "weight_map": {"a": "part.safetensors", "b": "part.safetensors"}});
        for (place, changed) in variants(&index, &name) {
            temp.write("model.safetensors.index.json", changed.to_string());
            if let Err(e) = Safetensors::open(&temp.0) {
                assert_line(&place, &e.to_string());
            }
        }
    }
}

#[test]
fn packed_files() {
    let model = Model::packed();
    let sound = fs::read(model.0.file(PACKED_NAME)).unwrap();
    for key in ["antigravity.layout", "config", "source", "weights", "dtypes"] {
        for value in [hostile::text(), json!({"model.norm.weight": hostile::text()}).to_string()] {
            fs::write(model.0.file(PACKED_NAME), &sound).unwrap();
            model.edit(PACKED_NAME, |header, _| header["__metadata__"][key] = value.into());
            if let Err(e) = model.load(WeightType::Q4_0) {
                assert_line(key, &e.to_string());
            }
        }
    }
    let model = Model::copy();
    model.edit(WEIGHTS, |header, _| {
        let entry = header.remove("model.norm.weight").unwrap();
        header.insert(hostile::text(), entry);
    });
    assert_line("a tensor", &model.load(WeightType::Q4_0).unwrap_err().to_string());
}

#[test]
fn keys_values_and_tensors_of_gguf() {
    let temp = TestDir::new();
    let path = temp.file("hostile.gguf");
    let refused = |parts: Parts| {
        fs::write(&path, parts.bytes()).unwrap();
        let open = Gguf::open(&path).and_then(|gguf| gguf.read_config().map(drop));
        assert_line("GGUF", &open.unwrap_err().to_string());
    };
    let (long, name) = (hostile::text(), hostile::short());
    let arch = |name: &str| Parts::default().pair(pair("general.architecture", STRING, text(name)));
    refused(arch(&long));
    for key in [
        "llama.block_count",
        "llama.rope.scaling.type",
        "llama.attention.layer_norm_rms_epsilon",
        "general.alignment",
        "split.count",
        "llama.expert_count",
    ] {
        refused(arch("llama").pair(pair(key, STRING, text(&long))));
    }
    refused(arch("llama").pair(pair(&long, 99, [])));
    refused(arch("llama").pair(pair(&long, U32, [0; 4])).pair(pair(&long, U32, [0; 4])));
    refused(arch("llama").pair(pair(&long, ARRAY, array(STRING, 1, text(b"\xff")))));
    refused(arch("llama").info(info(name, &[4], 99, 0)).data(64));
    refused(arch("llama").info(info(name, &[4], 0, 32)).data(64));
    refused(arch("llama").info(info(name, &[4], 0, 0)).info(info(name, &[4], 0, 32)).data(64));
    refused(Parts { magic: *b"\x1b[2J", ..Parts::default() });

    let template =
        arch("llama").pair(pair("tokenizer.chat_template", STRING, text(format!("{{% {long} %}}"))));
    fs::write(&path, template.bytes()).unwrap();
    assert_line("chat_template", &Template::load_from_path(&path).unwrap_err().to_string());
    let bpe = Made::byte_level;
    for made in [
        bpe().text("model", &long),
        bpe().text("pre", &long),
        bpe().strings("tokens", &[&long; 260]),
        bpe().strings("merges", &[&long]),
        bpe().strings("merges", &[format!("{long} {long}")]),
        bpe().strings("token_type", &[&long; 260]),
        bpe().text("eos_token_id", &long),
        Made::sentence_piece(&[(long.clone(), -1.0)]),
    ] {
        assert_line("a vocabulary", &made.open(dims::VOCAB).unwrap_err().to_string());
    }
}
