//! `cargo xtask deploy`: copies the program, the packed model and the tokenizer to a device, or one file with all of
//! them.

use crate::command::print_next_step;
use crate::device::files::{Item, find_existing, install};
use crate::device::{Device, DeviceArgs, shell};
use crate::error::{AtPath, Error, Result};
use crate::run::deployed_program;
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
    /// Leave the OpenCL kernels to the first start on the GPU, which compiles and times them
    #[arg(long)]
    no_tune: bool,
}

pub fn run(args: &DeployArgs) -> Result<()> {
    let device = args.device.open()?;
    let model = args.model.dir()?;
    let (dir, new) =
        if args.bundle { deploy_bundle(&*device, &model) } else { deploy_files(&*device, &model, &[]) }?;
    if new > 0 && !args.no_tune {
        tune_kernels(&*device, &dir)?;
    }
    println!("{dir}");
    let run = format!("cargo xtask run{}{}", args.device.words(), args.model.words());
    print_next_step("now a text", &run);
    if build::has_template(&model) {
        print_next_step("a chat", &format!("{run} -- chat"));
    }
    print_next_step("in a browser", &format!("{run} --open -- serve"));
    Ok(())
}

/// Lets the program compile and time the OpenCL kernels of a device that has OpenCL. A failure is a warning.
fn tune_kernels(device: &dyn Device, dir: &str) -> Result<()> {
    let run = |words: &[&str]| {
        let words = words.iter().map(|word| word.to_string()).collect();
        shell::capture_program(device, &deployed_program(device, dir, words))
    };
    let facts = run(&["doctor"])?.stdout;
    let Some(gpu) = find_opencl_device(&facts) else { return Ok(()) };
    let name = device.name();
    eprintln!("{name}: compiling and timing the OpenCL kernels of {gpu}, once; --no-tune leaves it out");
    let tuned = run(&["doctor", "--tune"])?;
    if tuned.code != 0 {
        let why = command::last_line(&tuned.stderr).unwrap_or(format!("exit code {}", tuned.code));
        eprintln!("warning: {name}: `doctor --tune` fails ({why}); the CPU works without");
    }
    Ok(())
}

/// The OpenCL device that the program would use, in the output of `doctor`.
fn find_opencl_device(facts: &str) -> Option<&str> {
    let choice = facts.lines().find_map(|line| line.trim_end().strip_prefix("opencl choice"))?;
    Some(choice.split_once("uses device ")?.1.split_once(", ")?.1)
}

/// Builds the program, packs the model and copies them, and `more`, to the device; returns the directory there.
pub fn deploy(device: &dyn Device, model: &Path, more: &[Item]) -> Result<String> {
    Ok(deploy_files(device, model, more)?.0)
}

/// Deploys like [`deploy`]; returns also the number of files that were new.
fn deploy_files(device: &dyn Device, model: &Path, more: &[Item]) -> Result<(String, usize)> {
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
/// copied; returns the directory there, and the number of files that were new.
fn deploy_bundle(device: &dyn Device, model: &Path) -> Result<(String, usize)> {
    let program = build_program(device, model)?;
    let dir = build::target_dir().join("device/bundle").join(device.target()).join(device_dir_name(model));
    let bundle = make_once(&dir.join(PROGRAM), &build_id(model, &program)?, |out| {
        build::write_bundle(device.target(), model, &program, out)
    })?;
    let (dir, new) = install_all(device, model, &[Item::new(bundle, PROGRAM)])?;
    let names = [&[PACKED], TEXT_FILES].concat().join(" ");
    shell::capture(device, &format!("cd {} && rm -f {names}", shell::quote(&dir)))?.ok(device)?;
    Ok((dir, new))
}

/// Builds the program for a device; an error if the model has no weights.
fn build_program(device: &dyn Device, model: &Path) -> Result<PathBuf> {
    match fetch::find_fetch_command(model) {
        Some(remedy) => Err(Error::at(model, format!("has no weights; {remedy}"))),
        None => build::build_for_target(device.target(), Some(model)),
    }
}

/// Installs files in the directory of the model on the device; returns it, and the number of files that were new.
fn install_all(device: &dyn Device, model: &Path, items: &[Item]) -> Result<(String, usize)> {
    let dir = deployment_dir(device, model);
    let new = install(device, &dir, items)?;
    match new {
        0 => eprintln!("{}: {dir} is up to date", device.name()),
        n => eprintln!("{}: {dir}: {n} of {} files were new, all are verified", device.name(), items.len()),
    }
    Ok((dir, new))
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
    let own = || model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let name = to_file_name(&if is_gguf(model) { own() } else { build::model_name(model) });
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
    fn kernels_are_tuned_where_doctor_finds_opencl_and_a_failure_is_no_error() {
        let facts = "opencl device 0  Adreno, it is\nopencl choice    --backend opencl uses device 0, Adreno, it is\n";
        assert_eq!(find_opencl_device(facts), Some("Adreno, it is"));
        assert_eq!(find_opencl_device("opencl choice    none: no OpenCL library"), None);
        let dir = std::env::temp_dir().join(format!("xtask-tune-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let body = format!("echo \"$*\" >> runs; [ $# = 2 ] && exit 5; echo '{facts}'");
        command::write_script(&dir.join(PROGRAM), &body);
        tune_kernels(&crate::device::local::Local::open(), dir.to_str().unwrap()).unwrap();
        assert_eq!(fs::read_to_string(dir.join("runs")).unwrap(), "doctor\ndoctor --tune\n");
        fs::remove_dir_all(&dir).unwrap();
    }

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
