//! Layouts of quantised numbers. [`format`] is the packed layout in which all devices read matrices, [`matrix`] a
//! matrix in it; [`rows`] quantises rows to it, [`fit`] with weighted errors. [`activations`] are the quantised inputs of
//! matrix products.

pub mod activations;
pub mod fit;
pub mod format;
pub mod matrix;
pub mod rows;
