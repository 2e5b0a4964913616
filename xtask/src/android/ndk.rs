//! Finds Android's NDK: the variables that name one first, then the newest of the SDK's.

use crate::error::{Error, Result};
use crate::targets::ANDROID_API;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// Before this one, the unwinder that Rust links to was not part of it.
const OLDEST: u64 = 23;

/// A usable NDK.
#[derive(Debug, PartialEq)]
pub struct Ndk {
    pub dir: PathBuf,
    pub version: Version,
    /// The compiler that links for the lowest API level of at least [`ANDROID_API`].
    pub clang: PathBuf,
    pub api: u32,
}

/// The best NDK of those the environment leads to; an error if a variable names something else.
pub fn find(env: impl Fn(&str) -> Option<OsString>) -> Result<Option<Ndk>> {
    let env = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    for name in ["ANDROID_NDK_HOME", "ANDROID_NDK_ROOT"] {
        if let Some(dir) = env(name) {
            let found = open(&dir);
            return found.map(Some).map_err(|e| {
                Error::Failed(format!(
                    "{name}: {e}; set it to an NDK's folder, or unset it to look elsewhere"
                ))
            });
        }
    }
    let home = env("HOME").unwrap_or_default();
    let sdks = [env("ANDROID_HOME"), env("ANDROID_SDK_ROOT")].into_iter().flatten();
    let usual = [home.join("Android/Sdk"), home.join("Library/Android/sdk")];
    for sdk in sdks.chain(usual) {
        let mut found = Vec::new();
        for dir in fs::read_dir(sdk.join("ndk")).into_iter().flatten().flatten() {
            match open(&dir.path()) {
                Ok(ndk) => found.push(ndk),
                Err(e) => eprintln!("note: not used: {e}"),
            }
        }
        found.sort_by(|a, b| a.version.cmp(&b.version));
        if let Some(newest) = found.pop() {
            return Ok(Some(newest));
        }
    }
    Ok(None)
}

fn open(dir: &Path) -> Result<Ndk> {
    let properties = dir.join("source.properties");
    let text = fs::read_to_string(&properties).map_err(|e| Error::at(&properties, e))?;
    let version = revision(&text).ok_or_else(|| Error::at(&properties, "has no usable Pkg.Revision"))?;
    if version.numbers[0] < OLDEST {
        return Err(Error::at(dir, format!("NDK {version} is too old; r{OLDEST} or newer is needed")));
    }
    let hosts = dir.join("toolchains/llvm/prebuilt");
    let mut compilers = Vec::new();
    for host in fs::read_dir(&hosts).map_err(|e| Error::at(&hosts, e))?.flatten() {
        for file in fs::read_dir(host.path().join("bin")).into_iter().flatten().flatten() {
            let api = clang_api(&file.file_name().to_string_lossy());
            compilers.extend(api.filter(|api| *api >= ANDROID_API).map(|api| (api, file.path())));
        }
    }
    let best = compilers.into_iter().min();
    let (api, clang) = best.ok_or_else(|| {
        Error::at(&hosts, format!("no aarch64-linux-android{ANDROID_API}-clang, nor one for later levels"))
    })?;
    Ok(Ndk { dir: dir.into(), version, clang, api })
}

/// The API level in `aarch64-linux-android24-clang`.
fn clang_api(name: &str) -> Option<u32> {
    name.strip_prefix("aarch64-linux-android")?.strip_suffix("-clang")?.parse().ok()
}

fn revision(properties: &str) -> Option<Version> {
    let mut pairs = properties.lines().filter_map(|line| line.split_once('='));
    pairs.find(|(key, _)| key.trim() == "Pkg.Revision").and_then(|(_, value)| Version::parse(value.trim()))
}

/// `27.0.12077973` or `27.0.11718014-beta1`; the order is that of releases.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    numbers: Vec<u64>,
    stage: Stage,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Before(String),
    Release,
}

impl Version {
    fn parse(text: &str) -> Option<Version> {
        let (numbers, stage) = match text.split_once('-') {
            Some((numbers, stage)) => (numbers, Stage::Before(stage.into())),
            None => (text, Stage::Release),
        };
        let numbers = numbers.split('.').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?;
        Some(Version { numbers, stage })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<String> = self.numbers.iter().map(u64::to_string).collect();
        f.write_str(&numbers.join("."))?;
        match &self.stage {
            Stage::Before(name) => write!(f, "-{name}"),
            Stage::Release => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like an NDK.
    fn ndk(dir: &Path, revision: &str, clangs: &[&str]) {
        let bin = dir.join("toolchains/llvm/prebuilt/linux-x86_64/bin");
        fs::create_dir_all(&bin).unwrap();
        fs::write(
            dir.join("source.properties"),
            format!("Pkg.Desc = Android NDK\nPkg.Revision = {revision}\n"),
        )
        .unwrap();
        for clang in clangs {
            fs::write(bin.join(clang), "").unwrap();
        }
    }

    fn found(pairs: &[(&str, &Path)]) -> Result<Option<Ndk>> {
        find(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, dir)| dir.as_os_str().into()))
    }

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("xtask-ndk-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        dir
    }

    #[test]
    fn versions_are_ordered_as_released() {
        let order =
            ["23.1.7779620", "26.3.11579264", "27.0.11718014-beta1", "27.0.11718014", "27.2", "100.0.1"];
        let versions: Vec<Version> = order.iter().map(|v| Version::parse(v).unwrap()).collect();
        assert!(versions.is_sorted(), "{versions:?}");
        assert_eq!(versions[2].to_string(), "27.0.11718014-beta1");
        for bad in ["", "r27", "27..1", "27.x", "-beta1", "99999999999999999999"] {
            assert_eq!(Version::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_newest_of_the_sdk_is_taken() {
        let sdk = scratch("newest");
        let clangs = [
            "aarch64-linux-android35-clang",
            "aarch64-linux-android24-clang",
            "aarch64-linux-android21-clang",
        ];
        ndk(&sdk.join("ndk/9"), "26.3.11579264", &clangs);
        ndk(&sdk.join("ndk/10"), "27.2.12479018", &clangs);
        ndk(&sdk.join("ndk/old"), "21.4.7075529", &clangs);
        fs::create_dir_all(sdk.join("ndk/half-removed")).unwrap();
        let ndk = found(&[("ANDROID_HOME", &sdk)]).unwrap().unwrap();
        assert_eq!((ndk.version.to_string().as_str(), ndk.api), ("27.2.12479018", 24));
        assert!(ndk.clang.ends_with("linux-x86_64/bin/aarch64-linux-android24-clang"));
        assert_eq!(found(&[("ANDROID_SDK_ROOT", &sdk)]).unwrap().unwrap(), ndk);
        let named =
            found(&[("ANDROID_NDK_HOME", &sdk.join("ndk/9")), ("ANDROID_HOME", &sdk)]).unwrap().unwrap();
        assert_eq!(named.version.to_string(), "26.3.11579264");
        fs::remove_dir_all(&sdk).unwrap();
    }

    #[test]
    fn the_usual_place_is_searched() {
        let home = scratch("home");
        assert_eq!(found(&[("HOME", &home)]).unwrap(), None);
        assert_eq!(found(&[("HOME", &home), ("ANDROID_NDK_HOME", Path::new(""))]).unwrap(), None);
        ndk(&home.join("Android/Sdk/ndk/x"), "27.2.12479018", &["aarch64-linux-android29-clang"]);
        assert_eq!(found(&[("HOME", &home)]).unwrap().unwrap().api, 29);
        fs::remove_dir_all(&home).unwrap();
    }

    #[test]
    fn a_variable_that_names_no_ndk_is_an_error() {
        let dir = scratch("wrong");
        let e = found(&[("ANDROID_NDK_ROOT", &dir)]).unwrap_err().to_string();
        assert!(
            e.contains("ANDROID_NDK_ROOT") && e.contains("source.properties") && e.contains("unset"),
            "{e}"
        );
        ndk(&dir, "22.1.7171670", &["aarch64-linux-android24-clang"]);
        let e = found(&[("ANDROID_NDK_ROOT", &dir)]).unwrap_err().to_string();
        assert!(e.contains("22.1.7171670 is too old"), "{e}");
        ndk(&dir, "25.1.8937393", &[]);
        fs::remove_file(dir.join("toolchains/llvm/prebuilt/linux-x86_64/bin/aarch64-linux-android24-clang"))
            .unwrap();
        let e = found(&[("ANDROID_NDK_ROOT", &dir)]).unwrap_err().to_string();
        assert!(e.contains("aarch64-linux-android24-clang"), "{e}");
        fs::remove_dir_all(&dir).unwrap();
    }
}
