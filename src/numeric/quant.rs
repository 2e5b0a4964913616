//! Layouts of quantised numbers. [`format`] is the layout in which all devices read matrices in blocks, [`matrix`] a
//! matrix in it, [`rows`] quantises rows to it. [`activations`] are what such a matrix is multiplied with.

pub mod activations;
pub mod format;
pub mod matrix;
pub mod rows;
