//! The ways of computing a product with a quantised matrix. Integer sums are exact in any order and floats are added in
//! the CPU's, so all have the same bits, and speed alone decides: see [`super::tune`].

use super::storage::Step;
use files::{Error, Result};
use opencl_runtime::facts::{Dot, Facts};
use std::fmt;
use std::str::FromStr;

/// Set to the name of a way, all products are computed so where they can be, and nothing is timed. With `-recorded` behind
/// the name the launches of a token are recorded too.
pub const VARIANT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_VARIANT";

/// What an item computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Form {
    /// Parts of a tile that work-groups put together in local memory.
    #[default]
    Tile,
    /// Whole rows, in registers.
    Rows,
    /// The same, with integers held as floats.
    Floats,
}

/// One way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Way {
    /// What an item computes.
    pub form: Form,
    /// An item has four rows of a group and not one, where there are many tokens.
    pub four: bool,
    /// Smaller work-groups, or fewer tokens or rows of an item.
    pub small: bool,
    /// One instruction for four products.
    pub dot: bool,
    /// Activations are exchanged in subgroups.
    pub subgroups: bool,
    /// Weights are read through an image.
    pub image: bool,
}

impl Way {
    /// What every device has.
    pub const PLAIN: Self =
        Self { form: Form::Tile, four: false, small: false, dot: false, subgroups: false, image: false };

    /// All that a device has, the plain one first.
    pub fn of(facts: &Facts) -> Vec<Self> {
        let mut all = Vec::new();
        for form in [Form::Tile, Form::Rows, Form::Floats] {
            for bits in 0..32 {
                let [four, small, dot, subgroups, image] = std::array::from_fn(|i| bits >> i & 1 == 1);
                let way = Self { form, four, small, dot, subgroups, image };
                if way.makes_sense() && way.missing(facts).is_none() {
                    all.push(way);
                }
            }
        }
        all
    }

    /// Whether these belong together.
    pub(super) fn makes_sense(self) -> bool {
        match self.form {
            Form::Tile => !self.four && !self.subgroups,
            Form::Rows => true,
            Form::Floats => !self.dot && !self.subgroups,
        }
    }

    /// What a device lacks for it.
    pub fn missing(self, facts: &Facts) -> Option<&'static str> {
        if self.dot && facts.dot().is_none() {
            return Some("integer dot products");
        }
        if self.subgroups && !facts.subgroups() {
            return Some("subgroups");
        }
        if self.image && facts.image_texels == 0 {
            return Some("images of buffers");
        }
        None
    }

    /// Words of weights that it reads at once.
    pub fn words(self) -> usize {
        if self.form == Form::Tile || self.four { 4 } else { 1 }
    }

    /// The compiler's options for it.
    pub fn options(self, facts: &Facts) -> String {
        let mut options = String::new();
        let dot = facts.dot().filter(|_| self.dot);
        // Older languages do not know these functions.
        if dot.is_some_and(|dot| dot != Dot::Arm) || self.subgroups {
            options += facts.newest_language();
        }
        options += match dot {
            Some(Dot::Khr) => " -DDOT_KHR",
            Some(Dot::Arm) => " -DDOT_ARM",
            Some(Dot::Qcom) => " -DDOT_QCOM",
            None => "",
        };
        for (there, flag) in [
            (self.form == Form::Floats, " -DBY_FLOATS"),
            (self.subgroups, " -DSUBGROUPS"),
            (self.image, " -DW_IMAGE"),
        ] {
            options += if there { flag } else { "" };
        }
        options
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.form {
            Form::Tile => "tile",
            Form::Rows => "rows",
            Form::Floats => "floats",
        })?;
        for (there, name) in [
            (self.four, "-four"),
            (self.small, "-small"),
            (self.dot, "-dot"),
            (self.subgroups, "-subgroups"),
            (self.image, "-image"),
        ] {
            f.write_str(if there { name } else { "" })?;
        }
        Ok(())
    }
}

impl FromStr for Way {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let mut parts = name.split('-');
        let form = match parts.next() {
            Some("tile") => Some(Form::Tile),
            Some("rows") => Some(Form::Rows),
            Some("floats") => Some(Form::Floats),
            _ => None,
        };
        let way = form.and_then(|form| {
            parts.try_fold(Way { form, ..Self::PLAIN }, |way, part| match part {
                "four" => Some(Self { four: true, ..way }),
                "small" => Some(Self { small: true, ..way }),
                "dot" => Some(Self { dot: true, ..way }),
                "subgroups" => Some(Self { subgroups: true, ..way }),
                "image" => Some(Self { image: true, ..way }),
                _ => None,
            })
        });
        way.filter(|way| way.makes_sense()).ok_or_else(|| {
            Error::Usage(format!(
                "no variant of kernels is named {}; tile, rows or floats, and then -four, -small, -dot, -subgroups, -image, -recorded",
                files::error::quoted(name)
            ))
        })
    }
}

/// How many tokens a product is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Tokens {
    One,
    Many,
}

/// The way of each step, for one token and for many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ways {
    of: [[Way; Step::ALL.len()]; 2],
    /// The launches of a token are recorded for those that follow.
    pub recorded: bool,
}

/// Ends the name of a way where that is so.
const RECORDED: &str = "-recorded";

impl Ways {
    /// One for all.
    pub fn all(way: Way) -> Self {
        Self { of: [[way; Step::ALL.len()]; 2], recorded: false }
    }

    /// What [`VARIANT_VARIABLE`] asks for.
    ///
    /// # Errors
    ///
    /// `Usage` where there is no such way, `Device` where the device does not have it.
    pub fn forced(facts: &Facts) -> Result<Option<Self>> {
        let Some(name) = std::env::var(VARIANT_VARIABLE).ok().filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let plain = name.strip_suffix(RECORDED);
        let (way, recorded) = (plain.unwrap_or(&name).parse::<Way>()?, plain.is_some());
        match way.missing(facts).or((recorded && !facts.records).then_some("recordings of launches")) {
            Some(what) => {
                Err(Error::Device(format!("OpenCL: {} has no {what}; {VARIANT_VARIABLE}={name}", facts.name)))
            }
            None => Ok(Some(Self { recorded, ..Self::all(way) })),
        }
    }

    /// That of a step.
    pub fn get(&self, tokens: Tokens, step: Step) -> Way {
        self.of[tokens as usize][step as usize]
    }

    /// Changes that of a step.
    pub fn set(&mut self, tokens: Tokens, step: Step, way: Way) {
        self.of[tokens as usize][step as usize] = way;
    }
}

impl fmt::Display for Ways {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.of.iter().flatten().map(Way::to_string).collect();
        f.write_str(&names.join(" "))?;
        f.write_str(if self.recorded { RECORDED } else { "" })
    }
}

impl FromStr for Ways {
    type Err = Error;

    fn from_str(names: &str) -> Result<Self> {
        let plain = names.strip_suffix(RECORDED);
        let mut ways = Self { recorded: plain.is_some(), ..Self::default() };
        let mut names = plain.unwrap_or(names).split(' ');
        for way in ways.of.iter_mut().flatten() {
            *way = names.next().unwrap_or_default().parse()?;
        }
        Ok(ways)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for name in ["tile", "tile-dot-image", "rows-four-small-dot-subgroups-image", "floats-small"] {
            assert_eq!(name.parse::<Way>().unwrap().to_string(), name);
        }
        for name in ["", "tiles", "tile-four", "floats-dot", "rows-", "rows-dot-fast", "dot"] {
            let e = name.parse::<Way>().unwrap_err().to_string();
            assert!(e.contains("no variant") && !e.contains('\n'), "{e}");
        }
        let mut ways = Ways::all("rows".parse().unwrap());
        ways.set(Tokens::One, Step::Down, "floats-small".parse().unwrap());
        for recorded in [false, true] {
            ways.recorded = recorded;
            assert_eq!(ways.to_string().parse::<Ways>().unwrap(), ways);
        }
        assert!("rows tile".parse::<Ways>().is_err());
    }
}
