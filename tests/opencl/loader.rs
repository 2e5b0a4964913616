//! Finding a library and choosing a device, and the errors if that fails.

use crate::device::{device, skip};
use crate::support::command::binary;
use crate::support::process::{child, ended, job};
use crate::support::test_dir::TestDir;
use antigravity::opencl::{Access, Cache, Device, DeviceType, FailureKind, Place, Program, Source};
use opencl_runtime::device::{list_devices, select_device};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Opens the device that the job names and runs something on it; says how that went.
#[test]
fn child_opens_a_device() {
    let Some(select) = job() else { return };
    let device =
        match Device::open(Some(&select).filter(|s| *s != "any").map(String::as_str), Cache::disabled()) {
            Ok(device) => device,
            Err(failure) => return println!("FAILURE {:?} {failure} END", failure.kind),
        };
    let text = "kernel void f(global int *p) { p[get_global_id(0)] = 5 + get_global_id(0); }";
    let program = Program::build(&device, &Source { name: "f", text, options: "" }).unwrap();
    let out = device.allocate_buffer(16, Access::ReadWrite, Place::Device).unwrap();
    out.fill(0..16, 0).unwrap();
    let mut kernel = program.create_kernel("f").unwrap();
    device.launch(kernel.set_buffer(0, &out).unwrap(), &[4], &[2]).unwrap();
    let mut bytes = [0; 16];
    out.read(0, &mut bytes).unwrap();
    let values: Vec<u8> = bytes.iter().step_by(4).copied().collect();
    println!("RAN {values:?} through {} on {} END", device.library_name(), device.info().name);
}

/// Runs a child with these settings, and returns its result line.
fn opened(select: &str, settings: &[(&str, &str)]) -> String {
    let pocl = TestDir::new();
    let mut command = child("loader::child_opens_a_device", select);
    for variable in ["ANTIGRAVITY_OPENCL_LIB", "ANTIGRAVITY_OPENCL_CPU", "OCL_ICD_VENDORS"] {
        command.env_remove(variable);
    }
    command.env("POCL_CACHE_DIR", &pocl.0).envs(settings.iter().copied());
    let (code, said) = ended(&mut command);
    assert_eq!(code, Some(0), "{said}");
    let line = said.lines().find(|l| l.ends_with(" END")).unwrap_or_else(|| panic!("{said}"));
    line[line.find("RAN").or(line.find("FAILURE")).unwrap()..].into()
}

fn doctor(settings: &[(&str, &str)], args: &[&str]) -> String {
    let mut command = Command::new(binary());
    command
        .arg("doctor")
        .args(args)
        .env_remove("ANTIGRAVITY_OPENCL_LIB")
        .env_remove("ANTIGRAVITY_OPENCL_CPU");
    command.env("ANTIGRAVITY_OPENCL_CACHE", "off").envs(settings.iter().copied());
    let output = command.output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0));
    String::from_utf8(output.stdout).expect("text")
}

#[track_caller]
fn holds(text: &str, parts: &[&str]) {
    parts.iter().for_each(|p| assert!(text.contains(p), "{p:?} is not in {text}"));
}

/// The first of these that exists, or a loud skip.
fn library(what: &str, places: &[&str]) -> Option<PathBuf> {
    let is_it = |dir: &Path| {
        let entries = std::fs::read_dir(dir).ok()?;
        let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
        files.sort();
        files.into_iter().find(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with(what)))
    };
    let found = places.iter().find_map(|place| is_it(Path::new(place)));
    if found.is_none() {
        skip(&format!("{what} is not installed"));
    }
    found
}

const LIBS: &[&str] = &["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];

#[test]
fn a_library_that_is_not_there_is_named() {
    let missing = [("ANTIGRAVITY_OPENCL_LIB", "/nowhere/libOpenCL.so.9")];
    let said = opened("any", &missing);
    holds(&said, &["FAILURE Unsupported", "/nowhere/libOpenCL.so.9 (cannot open", "ANTIGRAVITY_OPENCL_LIB"]);
    let said = doctor(&missing, &[]);
    holds(
        &said,
        &[
            "opencl library",
            "/nowhere/libOpenCL.so.9: cannot open shared object file",
            "opencl choice",
            "none: ",
        ],
    );
    // A model that is to run there does not, and the exit code says why.
    let mut command = Command::new(binary());
    let output =
        command.args(["generate", "-b", "opencl", "-p", "x", "-n", "1"]).envs(missing).output().unwrap();
    assert_eq!(output.status.code(), Some(5));
    holds(
        &String::from_utf8_lossy(&output.stderr),
        &["/nowhere/libOpenCL.so.9 (cannot open", "--backend cpu"],
    );
    // It is the only one that is tried.
    assert_eq!(said.matches("opencl library").count(), 1, "{said}");
}

#[test]
fn a_library_without_the_symbols_is_named() {
    let said = opened("any", &[("ANTIGRAVITY_OPENCL_LIB", "libc.so.6")]);
    holds(&said, &["FAILURE Unsupported", "libc.so.6 (symbol clGetPlatformIDs is missing)"]);
}

#[test]
fn a_loader_without_platforms_is_passed_over() {
    let Some(loader) = library("libOpenCL.so.1", LIBS) else { return };
    let empty = TestDir::new();
    let vendors = ("OCL_ICD_VENDORS", empty.0.to_str().unwrap());
    let said = opened("any", &[("ANTIGRAVITY_OPENCL_LIB", loader.to_str().unwrap()), vendors]);
    holds(&said, &["FAILURE Unsupported", "no driver is registered with it"]);
    // Without the variable every candidate is tried and listed.
    let said = doctor(&[vendors], &[]);
    holds(&said, &["libOpenCL.so.1: it loads but", "libnvidia-opencl.so.1"]);
}

#[test]
fn a_vendors_library_is_used_without_a_loader() {
    let Some(pocl) = library("libpocl.so.2.", LIBS) else { return };
    let said = opened("0", &[("ANTIGRAVITY_OPENCL_LIB", pocl.to_str().unwrap())]);
    holds(&said, &["RAN [5, 6, 7, 8] through", "libpocl.so.2."]);
    let said = doctor(&[("ANTIGRAVITY_OPENCL_LIB", pocl.to_str().unwrap())], &[]);
    holds(&said, &["used directly, without a loader, platforms: 1", "opencl device 0"]);
}

#[test]
fn oclgrind_serves_as_a_library() {
    let Some(grind) = library("liboclgrind-rt.so", &["/usr/lib/oclgrind", "/usr/lib/x86_64-linux-gnu"])
    else {
        return;
    };
    let said = opened("oclgrind", &[("ANTIGRAVITY_OPENCL_LIB", grind.to_str().unwrap())]);
    holds(&said, &["RAN [5, 6, 7, 8] through", "liboclgrind-rt.so"]);
}

#[test]
fn devices_are_chosen_by_number_and_name() {
    let Some(device) = device() else { return };
    let found = list_devices().unwrap();
    assert!(found.windows(2).all(|w| w[0].facts.device_type <= w[1].facts.device_type));
    assert_eq!(select_device(found, Some("0")).unwrap(), 0);
    let failure = select_device(found, Some("99")).unwrap_err();
    assert_eq!(failure.kind, FailureKind::Unsupported);
    holds(&failure.message, &["`EngineOptions::cl_device` 99", &found[0].facts.name]);
    for unknown in ["no such device", ""] {
        let failure = select_device(found, Some(unknown)).unwrap_err();
        holds(&failure.message, &["no device has this name", &found[0].facts.name]);
    }
    if found.len() == 1 {
        let name = &device.info().name;
        assert_eq!(select_device(found, Some(&name.to_uppercase())).unwrap(), 0);
        assert_eq!(select_device(found, Some(&name[1..])).unwrap(), 0);
        let twice: Vec<_> = found.iter().chain(found).cloned().collect();
        let failure = select_device(&twice, Some(name)).unwrap_err();
        holds(&failure.message, &["more than one", "0: ", "1: "]);
    }
    assert_eq!(antigravity::Error::from(failure).exit_code(), 5);
}

#[test]
fn a_cpu_is_taken_only_when_asked_for() {
    if device().is_none() {
        return;
    }
    let only_cpus = list_devices().unwrap().iter().all(|f| f.facts.device_type == DeviceType::Cpu);
    if only_cpus {
        holds(
            &opened("any", &[]),
            &["FAILURE Unsupported", "no GPU", "`EngineOptions::cl_device` takes others", "devices: 0: "],
        );
        holds(&doctor(&[], &[]), &["none: no GPU"]);
        holds(&doctor(&[], &["--cl-device", "0"]), &["uses device 0"]);
    }
    holds(&opened("any", &[("ANTIGRAVITY_OPENCL_CPU", "1")]), &["RAN [5, 6, 7, 8]"]);
}
