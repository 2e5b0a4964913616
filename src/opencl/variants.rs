//! Variants of the kernels that multiply with quantised matrices. Integer sums are exact in any order, and floats are
//! added in the CPU's order, so all variants give the same bits. Speed alone decides: [`super::tune`] times them.

use files::{Error, Result};
use opencl_runtime::device_info::{DeviceInfo, DotExtension};
use std::fmt;
use std::str::FromStr;

/// Environment variable that forces one variant for all matrix products where possible, and skips tuning.
pub const VARIANT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_VARIANT";

/// Part of a product that one work-item computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProductForm {
    /// Parts of a tile, combined by the work-group in local memory.
    Tile,
    /// Whole rows, in registers.
    Rows,
    /// Whole rows, with integers held as floats.
    Floats,
}

/// A feature that not every device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Feature {
    /// One instruction for four products.
    Dot,
    /// Subgroups, which exchange activations.
    Subgroups,
    /// Images, through which weights are read.
    Images,
}

impl Feature {
    /// True if the device has it.
    fn is_supported_by(self, facts: &DeviceInfo) -> bool {
        match self {
            Feature::Dot => facts.dot_extension().is_some(),
            Feature::Subgroups => facts.has_subgroups(),
            Feature::Images => facts.image_texels > 0,
        }
    }

    /// Its name in messages.
    fn name(self) -> &'static str {
        match self {
            Feature::Dot => "integer dot products",
            Feature::Subgroups => "subgroups",
            Feature::Images => "images of buffers",
        }
    }
}

/// Number of tokens in a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Tokens {
    One,
    Many,
}

/// One variant.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// Name for users, and on disk.
    pub name: &'static str,
    /// Part of a product that a work-item computes.
    pub form: ProductForm,
    /// Rows per work-item of a `gemm` by whole rows.
    pub rows: usize,
    /// Tokens per work-item of a `gemm` by whole rows.
    pub tokens: usize,
    /// Features that the device must have.
    pub needs: &'static [Feature],
    /// Numbers of tokens that it supports.
    pub for_tokens: &'static [Tokens],
}

const BOTH: &[Tokens] = &[Tokens::One, Tokens::Many];
const MANY: &[Tokens] = &[Tokens::Many];

/// All variants: the baseline, which every device supports, then the others in the order timed. The first ones were by
/// far the fastest where measured: `floats` for many tokens and `rows` for one token each took a sixth of the
/// baseline's time (Intel's runtime on Zen 4).
#[rustfmt::skip]
pub const VARIANTS: [Variant; 8] = [
    Variant { name: "tile", form: ProductForm::Tile, rows: 1, tokens: 1, needs: &[], for_tokens: BOTH },
    Variant { name: "floats", form: ProductForm::Floats, rows: 1, tokens: 4, needs: &[], for_tokens: MANY },
    Variant { name: "floats-four", form: ProductForm::Floats, rows: 4, tokens: 8, needs: &[], for_tokens: MANY },
    Variant { name: "rows", form: ProductForm::Rows, rows: 1, tokens: 8, needs: &[], for_tokens: BOTH },
    Variant { name: "rows-dot", form: ProductForm::Rows, rows: 1, tokens: 8, needs: &[Feature::Dot], for_tokens: BOTH },
    Variant { name: "rows-dot-image", form: ProductForm::Rows, rows: 4, tokens: 8, needs: &[Feature::Dot, Feature::Images], for_tokens: BOTH },
    Variant { name: "rows-dot-subgroups", form: ProductForm::Rows, rows: 1, tokens: 8, needs: &[Feature::Dot, Feature::Subgroups], for_tokens: BOTH },
    Variant { name: "tile-dot", form: ProductForm::Tile, rows: 1, tokens: 1, needs: &[Feature::Dot], for_tokens: BOTH },
];

/// Variant that every device supports.
pub const BASELINE: &Variant = &VARIANTS[0];

impl Variant {
    /// Finds the variant with this name.
    ///
    /// # Errors
    ///
    /// `Usage` if there is none.
    pub fn from_name(name: &str) -> Result<&'static Self> {
        VARIANTS.iter().find(|variant| variant.name == name).ok_or_else(|| {
            let names = VARIANTS.each_ref().map(|variant| variant.name).join(", ");
            Error::Usage(format!("unknown kernel variant {}; use one of {names}", files::error::quote(name)))
        })
    }

    /// First required feature that the device lacks.
    pub fn missing_feature(&self, facts: &DeviceInfo) -> Option<&'static str> {
        self.needs.iter().find(|feature| !feature.is_supported_by(facts)).map(|feature| feature.name())
    }

    /// True if it requires a feature.
    pub fn needs_feature(&self, feature: Feature) -> bool {
        self.needs.contains(&feature)
    }

    /// True if a work-item computes whole rows.
    pub fn by_rows(&self) -> bool {
        self.form != ProductForm::Tile
    }

    /// Compiler options.
    pub fn compiler_options(&self, facts: &DeviceInfo) -> String {
        let mut options = String::new();
        let dot = facts.dot_extension().filter(|_| self.needs_feature(Feature::Dot));
        // Older language versions lack these functions.
        if dot.is_some_and(|dot| dot != DotExtension::Arm) || self.needs_feature(Feature::Subgroups) {
            options += facts.newest_language();
        }
        options += match dot {
            Some(DotExtension::Khr) => " -DDOT_KHR",
            Some(DotExtension::Arm) => " -DDOT_ARM",
            Some(DotExtension::Qcom) => " -DDOT_QCOM",
            None => "",
        };
        for (there, flag) in [
            (self.form == ProductForm::Floats, " -DBY_FLOATS"),
            (self.needs_feature(Feature::Subgroups), " -DSUBGROUPS"),
            (self.needs_feature(Feature::Images), " -DW_IMAGE"),
        ] {
            options += if there { flag } else { "" };
        }
        options
    }
}

/// Variants for products of one token and of many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say it")]
pub struct VariantPair {
    pub one: &'static Variant,
    pub many: &'static Variant,
}

impl VariantPair {
    /// The baseline for both.
    pub const BASELINE: Self = Self { one: BASELINE, many: BASELINE };

    /// The variant for the numbers of tokens that it supports, otherwise the baseline.
    pub fn of(variant: &'static Variant) -> Self {
        let either = |tokens| if variant.for_tokens.contains(&tokens) { variant } else { BASELINE };
        Self { one: either(Tokens::One), many: either(Tokens::Many) }
    }

    /// Pair forced by [`VARIANT_VARIABLE`], if set.
    ///
    /// # Errors
    ///
    /// `Usage` if there is no such variant, `Device` if the device lacks a required feature.
    pub fn from_environment(facts: &DeviceInfo) -> Result<Option<Self>> {
        let Some(name) = std::env::var(VARIANT_VARIABLE).ok().filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let variant = Variant::from_name(&name)?;
        match variant.missing_feature(facts) {
            Some(what) => Err(Error::Device(format!(
                "OpenCL: {VARIANT_VARIABLE}={name}: {} has no {what}; choose another variant",
                facts.name
            ))),
            None => Ok(Some(Self::of(variant))),
        }
    }

    /// Variant for a number of tokens.
    pub fn get(&self, tokens: Tokens) -> &'static Variant {
        match tokens {
            Tokens::One => self.one,
            Tokens::Many => self.many,
        }
    }

    /// Sets the variant for a number of tokens.
    pub fn set(&mut self, tokens: Tokens, variant: &'static Variant) {
        match tokens {
            Tokens::One => self.one = variant,
            Tokens::Many => self.many = variant,
        }
    }
}

impl fmt::Display for VariantPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.one.name, self.many.name)
    }
}

impl FromStr for VariantPair {
    type Err = Error;

    fn from_str(names: &str) -> Result<Self> {
        let (one, many) = names.split_once(' ').unwrap_or((names, ""));
        Ok(Self { one: Variant::from_name(one)?, many: Variant::from_name(many)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_is_found_by_its_name() {
        for variant in &VARIANTS {
            assert_eq!(Variant::from_name(variant.name).unwrap(), variant);
        }
        for name in ["", "tiles", "rows-four", "rows-"] {
            let e = Variant::from_name(name).unwrap_err().to_string();
            assert!(
                e.contains("unknown kernel variant") && e.contains("rows-dot") && !e.contains('\n'),
                "{e}"
            );
        }
        let pair = VariantPair { one: &VARIANTS[3], many: &VARIANTS[1] };
        assert_eq!(pair.to_string().parse::<VariantPair>().unwrap(), pair);
        assert!("rows".parse::<VariantPair>().is_err());
    }
}
