//! `cargo xtask deploy`: copies the program, the packed model and the tokenizer to a device, or one file with all of
//! them.

use crate::device::files::{Item, find_existing, install};
use crate::device::{Device, DeviceArgs, shell};
use crate::error::{AtPath, Error, Result};
use crate::{build, command, fetch};
use clap::Args;
use files::model_dir::TEXT_FILES;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The program's file name on a device.
pub const PROGRAM: &str = "antigravity";
/// The file that `antigravity pack` writes.
const PACKED: &str = "model.packed.safetensors";

#[derive(Args)]
pub struct DeployArgs {
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    /// Push one file: the program with packed model, tokenizer and template inside
    #[arg(long)]
    bundle: bool,
}

pub fn run(args: &DeployArgs) -> Result<()> {
    let device = args.device.open()?;
    let model = args.model.dir()?;
    let dir = if args.bundle { deploy_bundle(&*device, &model) } else { deploy(&*device, &model, &[]) }?;
    println!("{dir}");
    Ok(())
}

/// Builds the program, packs the model and copies them, and `more`, to the device; returns the directory there.
pub fn deploy(device: &dyn Device, model: &Path, more: &[Item]) -> Result<String> {
    let program = build_program(device, model)?;
    let packed = pack(model)?;
    let mut items = vec![Item::new(packed, PACKED)];
    items.extend(find_existing(model, TEXT_FILES));
    items.extend(more.iter().cloned());
    // Last, so that the program changes after the files that it reads.
    items.push(Item::new(program, PROGRAM));
    install_all(device, model, &items)
}

/// Copies one file to the device, under the program's name, and removes the other files that [`deploy`] may have
/// copied; returns the directory there.
fn deploy_bundle(device: &dyn Device, model: &Path) -> Result<String> {
    let program = build_program(device, model)?;
    let dir = build::target_dir().join("device/bundle").join(device.target()).join(device_dir_name(model));
    let bundle = make_once(&dir.join(PROGRAM), &build_id(model, &program)?, |out| {
        build::write_bundle(device.target(), model, &program, out)
    })?;
    let dir = install_all(device, model, &[Item::new(bundle, PROGRAM)])?;
    let names = [&[PACKED], TEXT_FILES].concat().join(" ");
    shell::capture(device, &format!("cd {} && rm -f {names}", shell::quote(&dir)))?.ok(device)?;
    Ok(dir)
}

/// Builds the program for a device; an error if the model has no weights.
fn build_program(device: &dyn Device, model: &Path) -> Result<PathBuf> {
    match fetch::find_fetch_command(model) {
        Some(remedy) => Err(Error::at(model, format!("has no weights; {remedy}"))),
        None => build::build_for_target(device.target(), Some(model)),
    }
}

/// Installs files in the directory of the model on the device; returns it.
fn install_all(device: &dyn Device, model: &Path, items: &[Item]) -> Result<String> {
    let dir = deployment_dir(device, model);
    match install(device, &dir, items)? {
        0 => eprintln!("{}: {dir} is up to date", device.name()),
        n => eprintln!("{}: {dir}: {n} of {} files were new, all are verified", device.name(), items.len()),
    }
    Ok(dir)
}

/// The directory on the device in which a model is deployed.
pub fn deployment_dir(device: &dyn Device, model: &Path) -> String {
    format!("{}/{}", device.home(), device_dir_name(model))
}

/// Replaces the characters that a file name should not have.
pub fn to_file_name(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    text.chars().map(plain).collect()
}

/// The name of a model's directory on a device, in plain characters.
pub fn device_dir_name(model: &Path) -> String {
    let name = to_file_name(&model.file_name().unwrap_or_default().to_string_lossy());
    if name.trim_matches('.').is_empty() { "model".into() } else { name }
}

/// Packs the model into cargo's target directory, unless that is done already.
fn pack(model: &Path) -> Result<PathBuf> {
    if !model.is_dir() && !is_gguf(model) {
        return Err(Error::Usage(format!("{}: give --model a directory or a .gguf file", model.display())));
    }
    let program = build::build_for_host(Some(model))?;
    let packed = build::target_dir().join("device/packed").join(device_dir_name(model)).join(PACKED);
    make_once(&packed, &build_id(model, &program)?, |out| {
        let mut pack = Command::new(&program);
        command::run(pack.args(["pack", "--model-path"]).arg(model).arg("--out").arg(out))
    })
}

/// Makes the file `out` unless it was made with this build id.
fn make_once(out: &Path, build_id: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let id_file = out.with_file_name("build-id");
    let dir = out.parent().expect("a file in a folder");
    fs::create_dir_all(dir).at(dir)?;
    if out.is_file() && fs::read_to_string(&id_file).is_ok_and(|text| text == build_id) {
        return Ok(out.into());
    }
    // Removed first, so that an id never stands beside another file.
    let _ = fs::remove_file(&id_file);
    make(out)?;
    fs::write(&id_file, build_id).at(&id_file)?;
    Ok(out.into())
}

/// True for a GGUF file, which packs without other files.
fn is_gguf(model: &Path) -> bool {
    model.is_file() && model.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Sizes and times of the program and of the checkpoint's files.
fn build_id(model: &Path, program: &Path) -> Result<String> {
    let facts = |path: &Path| -> Result<String> {
        let meta = fs::metadata(path).at(path)?;
        let time = meta.modified().ok().and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        Ok(format!("{} {} {:?}\n", path.display(), meta.len(), time.unwrap_or_default()))
    };
    let mut lines = vec![facts(program)?];
    if is_gguf(model) {
        return Ok(lines.concat() + &facts(model)?);
    }
    for entry in fs::read_dir(model).at(model)? {
        let path = entry.at(model)?.path();
        if path.extension().is_some_and(|e| ["safetensors", "json", "gguf"].iter().any(|kind| e == *kind)) {
            lines.push(facts(&path)?);
        }
    }
    lines.sort();
    Ok(lines.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hold_no_surprises_and_changed_checkpoints_have_other_ids() {
        for (model, expected) in [
            ("/m/Llama 3.2 (1B)", "Llama_3.2__1B_"),
            ("/m/$(reboot);'", "__reboot___"),
            ("/m/..", "model"),
            ("/", "model"),
        ] {
            assert_eq!(device_dir_name(Path::new(model)), expected, "{model}");
        }
        let dir = std::env::temp_dir().join(format!("xtask-build-id-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let program = std::env::current_exe().unwrap();
        fs::write(dir.join("model.gguf"), "a").unwrap();
        let before = build_id(&dir, &program).unwrap();
        assert_eq!(build_id(&dir, &program).unwrap(), before);
        fs::write(dir.join("model.gguf"), "ab").unwrap();
        assert_ne!(build_id(&dir, &program).unwrap(), before);
        fs::remove_dir_all(&dir).unwrap();
    }
}
