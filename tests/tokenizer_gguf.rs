//! Tokenizers from the metadata of GGUF files: the ids are those of llama.cpp's test vectors, of the `tokenizer.json`
//! of the same model, and of SentencePiece's algorithm; what is damaged is refused.

#[path = "tokenizer_gguf/made.rs"]
mod made;
#[path = "device/place.rs"]
mod place;
#[path = "tokenizer_gguf/refused.rs"]
mod refused;
#[path = "tokenizer_gguf/sentence_piece.rs"]
mod sentence_piece;
#[path = "tokenizer_gguf/vectors.rs"]
mod vectors;
#[path = "gguf/writer.rs"]
mod writer;
