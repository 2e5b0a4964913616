//! Finds Android's NDK: the one that a variable names, else the newest in an SDK.

use crate::error::{AtPath, Error, Result};
use crate::targets::ANDROID_API;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// The oldest supported release: earlier ones lack the unwinder that Rust links to.
const OLDEST: u64 = 23;

/// A usable NDK.
#[derive(Debug, PartialEq)]
pub struct Ndk {
    pub dir: PathBuf,
    /// `27.0.12077973` or `27.0.11718014-beta1`
    pub version: String,
    /// The compiler for the lowest API level that is at least [`ANDROID_API`].
    pub clang: PathBuf,
    pub api: u32,
}

/// The NDK that the environment leads to; an error if a variable names something else.
pub fn find_ndk(target: &str, env: impl Fn(&str) -> Option<OsString>) -> Result<Option<Ndk>> {
    let env = |name: &str| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    for name in ["ANDROID_NDK_HOME", "ANDROID_NDK_ROOT"] {
        if let Some(dir) = env(name) {
            let remedy = "set it to an NDK's folder, or unset it to look elsewhere";
            return open_ndk(target, &dir)
                .map(Some)
                .map_err(|e| Error::Failed(format!("{name}: {e}; {remedy}")));
        }
    }
    let home = env("HOME").unwrap_or_default();
    let sdks = [env("ANDROID_HOME"), env("ANDROID_SDK_ROOT")].into_iter().flatten();
    for sdk in sdks.chain([home.join("Android/Sdk"), home.join("Library/Android/sdk")]) {
        let dirs = fs::read_dir(sdk.join("ndk")).into_iter().flatten().flatten();
        let usable = dirs.filter_map(|dir| {
            open_ndk(target, &dir.path()).inspect_err(|e| eprintln!("note: not used: {e}")).ok()
        });
        if let Some(newest) = usable.max_by_key(|ndk| release_order(&ndk.version)) {
            return Ok(Some(newest));
        }
    }
    Ok(None)
}

fn open_ndk(target: &str, dir: &Path) -> Result<Ndk> {
    let properties = dir.join("source.properties");
    let text = fs::read_to_string(&properties).at(&properties)?;
    let revision =
        text.lines().filter_map(|line| line.split_once('=')).find(|(key, _)| key.trim() == "Pkg.Revision");
    let version = revision.map_or("", |(_, value)| value.trim()).to_string();
    let order =
        release_order(&version).ok_or_else(|| Error::at(&properties, "has no usable Pkg.Revision"))?;
    if order.0[0] < OLDEST {
        return Err(Error::at(dir, format!("NDK {version} is too old; r{OLDEST} or newer is needed")));
    }
    let hosts = dir.join("toolchains/llvm/prebuilt");
    let mut compilers = Vec::new();
    for host in fs::read_dir(&hosts).at(&hosts)?.flatten() {
        for file in fs::read_dir(host.path().join("bin")).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            let api = name.strip_prefix(target).and_then(|name| name.strip_suffix("-clang"));
            let api = api.and_then(|api| api.parse().ok()).filter(|api| *api >= ANDROID_API);
            compilers.extend(api.map(|api| (api, file.path())));
        }
    }
    let (api, clang) = compilers.into_iter().min().ok_or_else(|| {
        Error::at(&hosts, format!("no {target}{ANDROID_API}-clang, nor one for later levels"))
    })?;
    Ok(Ndk { dir: dir.into(), version, clang, api })
}

/// A key that sorts versions by release; a stage such as `beta1` comes before the release itself.
fn release_order(version: &str) -> Option<(Vec<u64>, bool, String)> {
    let (numbers, stage) = version.split_once('-').unwrap_or((version, ""));
    let numbers = numbers.split('.').map(|n| n.parse().ok()).collect::<Option<Vec<u64>>>()?;
    Some((numbers, stage.is_empty(), stage.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a folder that looks like an NDK.
    fn make(dir: &Path, revision: &str, clangs: &[&str]) {
        let bin = dir.join("toolchains/llvm/prebuilt/linux-x86_64/bin");
        fs::create_dir_all(&bin).unwrap();
        let properties = format!("Pkg.Desc = Android NDK\nPkg.Revision = {revision}\n");
        fs::write(dir.join("source.properties"), properties).unwrap();
        clangs.iter().for_each(|clang| fs::write(bin.join(clang), "").unwrap());
    }

    fn found(pairs: &[(&str, &Path)]) -> Result<Option<Ndk>> {
        find_ndk("aarch64-linux-android", |name| {
            pairs.iter().find(|(n, _)| *n == name).map(|(_, dir)| dir.as_os_str().into())
        })
    }

    #[test]
    fn the_newest_ndk_is_found_and_a_variable_that_names_none_is_an_error() {
        let order = ["23.1.7779620", "27.0.11718014-beta1", "27.0.11718014", "27.2", "100.0.1"];
        assert!(order.is_sorted_by_key(|version| release_order(version).unwrap()));
        assert!(["", "r27", "27..1", "-beta1"].iter().all(|bad| release_order(bad).is_none()));
        let home = std::env::temp_dir().join(format!("xtask-ndk-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        assert_eq!(found(&[("HOME", &home), ("ANDROID_NDK_HOME", Path::new(""))]).unwrap(), None);
        let (sdk, old) = (home.join("Android/Sdk"), home.join("old"));
        let clangs = [
            "aarch64-linux-android35-clang",
            "aarch64-linux-android24-clang",
            "aarch64-linux-android21-clang",
        ];
        make(&sdk.join("ndk/9"), "26.3.11579264", &clangs);
        make(&sdk.join("ndk/10"), "27.2.12479018", &clangs);
        fs::create_dir_all(sdk.join("ndk/half-removed")).unwrap();
        let newest = found(&[("HOME", &home)]).unwrap().unwrap();
        assert_eq!((newest.version.as_str(), newest.api), ("27.2.12479018", 24));
        assert!(newest.clang.ends_with("linux-x86_64/bin/aarch64-linux-android24-clang"));
        let named =
            found(&[("ANDROID_NDK_HOME", &sdk.join("ndk/9")), ("ANDROID_HOME", &sdk)]).unwrap().unwrap();
        assert_eq!(named.version, "26.3.11579264");
        let error = |dir: &Path| found(&[("ANDROID_NDK_ROOT", dir)]).unwrap_err().to_string();
        assert!(error(&old).contains("ANDROID_NDK_ROOT") && error(&old).contains("source.properties"));
        make(&old, "22.1.7171670", &clangs);
        assert!(error(&old).contains("22.1.7171670 is too old"));
        make(&home.join("none"), "25.1.8937393", &[]);
        assert!(error(&home.join("none")).contains("aarch64-linux-android24-clang"));
        fs::remove_dir_all(&home).unwrap();
    }
}
