//! Commands that measure, inspect and convert models. None is needed to run one.

pub mod bench;
pub mod bundle;
pub mod columns;
pub mod doctor;
pub mod draft;
pub mod eval;
pub mod inspect;
pub mod logits;
pub mod pack;
pub mod plan;
pub mod tokenize;
