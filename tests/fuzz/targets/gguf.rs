//! A GGUF file: header, config, tokenizer and chat template, and the first row of every tensor.
#![no_main]

use text::chat::TemplateSource;
use files::blocks::gguf::decode;
use text::tokenizer::{AddSpecial, Tokenizer};
use files::source::gguf::Gguf;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    // The first byte says how many zeros follow, so that tensors can be inside the file.
    let Some((&pages, data)) = data.split_first() else { return };
    let path = antigravity_fuzz::long_file("model.gguf", data, data.len() as u64 + (u64::from(pages) << 12));
    let Ok(gguf) = Gguf::open(&path) else { return };
    let _ = gguf.config();
    if let Ok(tokenizer) = Tokenizer::from_gguf(&gguf, 1 << 16) {
        let ids = tokenizer.encode("Hello, wörld! <|im_end|>\n", AddSpecial::Yes);
        ids.map(|ids| tokenizer.decode(&ids)).ok();
        let _ = TemplateSource::of_gguf(&gguf).load().and_then(|template| template.for_tokenizer(&tokenizer));
    }
    gguf.fingerprint();
    for tensor in gguf.tensors() {
        let row = &tensor.data.bytes()[..tensor.block.row_bytes(tensor.shape[tensor.shape.len() - 1])];
        let mut values = vec![0.0; row.len() / tensor.block.bytes() * tensor.block.values()];
        decode(tensor.block, row, &mut values);
    }
});
