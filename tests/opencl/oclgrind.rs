//! Tests of the kernels under oclgrind, which finds accesses out of bounds, races and reads of uninitialised memory.
//!
//! It is slow: what takes long has a test of its own, so that they run side by side, and shapes are small there.

use crate::device;
use crate::kernels::{GRIND, products};
use crate::support::process::{child, ended, job};
use std::path::Path;

/// Runs tests of this binary on oclgrind; what it said. `None` where it is not installed.
fn grind(test: &str) -> Option<(Option<i32>, String)> {
    let library = "/usr/lib/oclgrind/liboclgrind-rt.so";
    if !Path::new(library).exists() {
        device::skip("oclgrind is not installed");
        return None;
    }
    let mut child = child(test, "grind");
    child.env("ANTIGRAVITY_OPENCL_LIB", library).env(GRIND, "1");
    // Its search for uninitialised values is not made for several threads.
    child.env("OCLGRIND_NUM_THREADS", "1");
    child.env("ANTIGRAVITY_OPENCL_LIMIT", "off");
    // It loses track of float16, which attention uses throughout.
    let uninitialised = if test.starts_with("kernels::attention") { "0" } else { "1" };
    child.env("OCLGRIND_UNINITIALIZED", uninitialised);
    child.env("OCLGRIND_DATA_RACES", "1").env("OCLGRIND_MAX_ERRORS", "4");
    Some(ended(&mut child))
}

fn complains(said: &str) -> bool {
    ["Invalid", "race", "Uninitialized", "OCLGRIND"].iter().any(|word| said.contains(word))
}

/// oclgrind has nothing to say about tests of this binary.
fn clean(tests: &[&str]) {
    if job().is_some() {
        return;
    }
    for test in tests {
        let Some((code, said)) = grind(test) else { return };
        assert!(code == Some(0) && said.contains("1 passed") && !complains(&said), "{test}: {said}");
    }
}

#[test]
fn products_of_one_token_are_clean() {
    clean(&[
        "kernels::products::products_of_one_token_have_the_cpus_bits",
        "kernels::products::inputs_of_products_have_the_cpus_bits",
    ]);
}

#[test]
fn mixtures_of_experts_are_clean() {
    clean(&[
        "kernels::experts::the_choice_of_experts_has_the_cpus_bits",
        "kernels::experts::products_with_experts_have_the_cpus_bits",
    ]);
}

#[test]
fn products_of_many_tokens_are_clean() {
    clean(&["kernels::products::products_of_many_tokens_have_the_cpus_bits"]);
}

#[test]
fn products_of_other_formats_are_clean() {
    clean(&["kernels::formats::some_formats_have_the_cpus_bits_on_few_columns"]);
}

#[test]
fn products_of_a_real_model_are_clean() {
    clean(&["kernels::formats::matrices_of_a_real_model_have_the_cpus_bits_each_time"]);
}

#[test]
fn attention_makes_no_invalid_access() {
    clean(&["kernels::attention::attention_has_the_cpus_bits_on_small_shapes"]);
}

#[test]
fn a_planted_error_is_caught() {
    match job() {
        // A matrix that is said to have a group of rows more than it has.
        Some(_) => products::head(&device::device().unwrap(), 1),
        None => {
            let Some((_, said)) = grind("oclgrind::a_planted_error_is_caught") else { return };
            assert!(said.contains("Invalid read"), "{said}");
        }
    }
}
