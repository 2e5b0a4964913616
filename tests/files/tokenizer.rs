//! Tokenizers from the metadata of GGUF files: the ids are those of llama.cpp's test vectors, of the `tokenizer.json`
//! of the same model, and of SentencePiece's algorithm; what is damaged is refused.

pub mod made;
mod refused;
mod sentence_piece;
mod vectors;
