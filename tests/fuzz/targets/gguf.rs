//! A GGUF file: header, config, tokenizer and chat template, and the first row of every tensor.
#![no_main]

use files::blocks::gguf::decode_values;
use files::source::gguf::Gguf;
use libfuzzer_sys::fuzz_target;
use text::chat::TemplateSource;
use text::tokenizer::{AddSpecial, Tokenizer};

fuzz_target!(|data: &[u8]| {
    // The first byte says how many zeros follow, so that tensors can be inside the file.
    let Some((&pages, data)) = data.split_first() else { return };
    let path = antigravity_fuzz::long_file("model.gguf", data, data.len() as u64 + (u64::from(pages) << 12));
    let Ok(gguf) = Gguf::open(&path) else { return };
    let _ = gguf.read_config();
    if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf, 1 << 16) {
        let ids = tokenizer.encode("Hello, wörld! <|im_end|>\n", AddSpecial::Yes);
        ids.map(|ids| tokenizer.decode(&ids)).ok();
        let _ = TemplateSource::from_gguf(&gguf).load_template().and_then(|template| template.for_tokenizer(&tokenizer));
    }
    gguf.fingerprint();
    for tensor in gguf.tensors() {
        let row = tensor.row_bytes(0);
        let mut values = vec![0.0; row.len() / tensor.block.bytes_per_block() * tensor.block.values_per_block()];
        decode_values(tensor.block, row, &mut values);
    }
});
