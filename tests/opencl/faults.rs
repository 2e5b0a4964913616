//! A driver whose calls fail or hang: the program continues on the CPU with the same text, or ends with one line.
//!
//! The driver is the real one behind a library that fails where it is told to (`faults/shim.rs`).

use crate::device::{PROMPT, cache_dir, device, generate, said, skip};
use crate::support::command::binary;
use crate::support::paths::root;
use crate::support::test_dir::TestDir;
use antigravity::dims::LAYERS;
use std::io::Read;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The library that fails; `None`, loudly, where there is no device or no compiler.
pub fn shim() -> Option<&'static str> {
    static SHIM: OnceLock<Option<String>> = OnceLock::new();
    device()?;
    let compile = || {
        let dir = Box::leak(Box::new(TestDir::new()));
        let (source, library) = (root().join("tests/opencl/faults/shim.rs"), dir.path("libOpenCL_shim.so"));
        let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
        rustc.args(["--edition", "2024", "--crate-type", "cdylib", "-C", "panic=abort", "-o", &library]);
        match rustc.arg(source).output() {
            Ok(out) if out.status.success() => Some(library),
            Ok(out) => panic!("{}", String::from_utf8_lossy(&out.stderr)),
            Err(e) => {
                skip(&format!("rustc: {e}"));
                None
            }
        }
    };
    SHIM.get_or_init(compile).as_deref()
}

/// The program with a backend and a fault: `CALL:FROM:CODE`, see the shim.
fn command(flags: &[&str], fault: &str) -> Command {
    let mut command = generate(cache_dir(), "24");
    command.args(flags);
    // Calls are counted: none are for timing kernels.
    command.env("ANTIGRAVITY_OPENCL_VARIANT", "tile");
    if !fault.is_empty() {
        command.env("ANTIGRAVITY_OPENCL_LIB", shim().expect("asked for")).env("SHIM_FAULT", fault);
    }
    command
}

fn run(flags: &[&str], fault: &str) -> Output {
    command(flags, fault).output().expect("the program starts")
}

/// Text that the CPU writes.
fn expected() -> &'static [u8] {
    static TEXT: OnceLock<Vec<u8>> = OnceLock::new();
    TEXT.get_or_init(|| run(&[], "").stdout)
}

const OPENCL: [&str; 4] = ["-b", "opencl", "--wait-for-gpu", "--gpu-attn"];

/// Runs, expects the CPU's text; what was said.
#[track_caller]
fn goes_on(flags: &[&str], fault: &str) -> String {
    let Output { status, stdout, stderr } = run(flags, fault);
    let said = said(&stderr);
    assert!(status.code() == Some(0), "{flags:?} {fault}: {status}: {said}");
    assert!(stdout == expected(), "{flags:?} {fault}: another text: {said}");
    said
}

#[test]
fn nothing_is_freed_that_a_failed_device_may_read() {
    if shim().is_none() {
        return;
    }
    goes_on(&OPENCL, "");
    for _ in 0..20 {
        let said = goes_on(&OPENCL, "clEnqueueReadBuffer:17:-5");
        assert!(said.lines().count() == 1 && said.contains("continuing on the CPU"), "{said}");
    }
}

#[test]
fn no_call_is_made_after_one_has_failed() {
    if shim().is_none() {
        return;
    }
    goes_on(&OPENCL, "");
    for fault in [
        "clEnqueueReadBuffer:9:-5",
        "clEnqueueNDRangeKernel:200:-4",
        "clFinish:2:-36",
        "clSetKernelArg:150:-5",
    ] {
        let out = command(&OPENCL, fault).env("SHIM_TELL", "1").output().unwrap();
        let said = said(&out.stderr);
        assert!(out.stdout == expected() && said.lines().count() == 1, "{fault}: {said}");
    }
}

/// Intel's runtime crashes in them where its threads are still at work.
#[test]
fn exit_handlers_of_a_driver_are_left_out() {
    if shim().is_some() {
        assert_eq!(goes_on(&OPENCL, "clGetPlatformIDs:1:exit:once"), "");
    }
}

/// One device of a split is lost: the text continues on the CPU alone, which computes the rows of all layers again.
#[test]
fn a_split_that_loses_a_device_continues_on_the_cpu() {
    if shim().is_none() {
        return;
    }
    for split in [format!("cl:0=1,cpu={}", LAYERS - 1), format!("cpu=1,cl:0={}", LAYERS - 1)] {
        let flags = ["--split", &split, "--wait-for-gpu"];
        assert_eq!(goes_on(&flags, ""), "");
        for fault in ["clEnqueueNDRangeKernel:60:-4", "clEnqueueReadBuffer:10:-5"] {
            let said = goes_on(&flags, fault);
            assert!(said.lines().count() == 1 && said.contains("continuing on the CPU"), "{fault}: {said}");
        }
    }
}

/// A text ends with one line if the CPU has no room for all layers. Its session is saved, from which it goes on.
#[test]
fn a_split_that_does_not_fit_the_cpu_ends_and_is_saved() {
    if shim().is_none() {
        return;
    }
    let (dir, split) = (TestDir::new(), format!("cl:0={},cpu=1", LAYERS - 1));
    let file = dir.path("text.session");
    // The cache of so many slots is what does not fit twice.
    let flags = ["generate", "--session", &file, "-n", "24", "--temp", "0", "-t", "2", "-c", "8000", "-q"];
    let on_split = |mib: &str, fault: &str| {
        let mut command = Command::new(binary());
        command.args(flags).args(["-p", PROMPT, "--split", &split]).env("ANTIGRAVITY_MEMORY_MIB", mib);
        command.env("ANTIGRAVITY_OPENCL_LIB", shim().unwrap()).env("ANTIGRAVITY_OPENCL_CACHE", cache_dir());
        command.env("SHIM_FAULT", fault).output().unwrap()
    };
    // The message names what the split needs.
    let need = said(&on_split("1", "").stderr);
    let need = need.split_once("needs ").and_then(|(_, rest)| rest.split_once(" MiB")).expect(&need).0;
    let need = need.parse::<f64>().unwrap().ceil().to_string();
    let whole = on_split(&need, "");
    assert!(whole.stdout == expected(), "{}", said(&whole.stderr));
    std::fs::remove_file(&file).unwrap();
    let Output { status, stdout, stderr } = on_split(&need, "clEnqueueReadBuffer:10:-5");
    let said = said(&stderr);
    assert!(status.code() == Some(5) && said.lines().count() == 1, "{status}: {said}");
    assert!(said.contains("the CPU cannot continue: all layers on the CPU need"), "{said}");
    let rest = Command::new(binary()).args(flags).output().unwrap().stdout;
    let [begun, all] = [&stdout, expected()].map(<[u8]>::trim_ascii_end);
    assert!(!begun.is_empty() && begun.len() < all.len(), "a part of the text was there: {begun:?}");
    let joined = [stdout.strip_suffix(b"\n").unwrap(), &rest].concat();
    assert!(joined.starts_with(all), "{}", String::from_utf8_lossy(&joined));
}

/// Every function fails at its first call, and some later.
const FAULTS: [&str; 14] = [
    "clGetPlatformIDs:1:-6",
    "clGetDeviceInfo:1:-5",
    "clCreateContext:1:-6",
    "clCreateCommandQueue:1:-5",
    "clCreateBuffer:1:-4",
    "clCreateBuffer:40:-6",
    "clEnqueueWriteBuffer:3:-4",
    "clCreateProgramWithBinary:1:-6",
    "clCreateKernel:2:-6",
    "clSetKernelArg:7:-6",
    "clEnqueueNDRangeKernel:30:-4",
    "clWaitForEvents:1:-14",
    "clEnqueueReadBuffer:2:-6",
    "*:300:-4",
];

#[test]
fn auto_always_ends_on_the_cpu() {
    if shim().is_none() {
        return;
    }
    goes_on(&OPENCL, "");
    for fault in FAULTS {
        auto(&TestDir::new(), fault);
    }
}

/// The program with a cache of its own: there it finds no verdict of a self-test, and no speeds that would keep `auto`
/// from the device.
fn with_cache(own: &TestDir, flags: &[&str], fault: &str) -> Command {
    let mut command = command(flags, fault);
    command.env("ANTIGRAVITY_OPENCL_CACHE", &own.0);
    command
}

/// Runs `auto` so, expects the CPU's text; what was said.
#[track_caller]
fn auto(own: &TestDir, fault: &str) -> String {
    let out = with_cache(own, &["-b", "auto", "--wait-for-gpu"], fault).output().unwrap();
    let said = said(&out.stderr);
    assert!(out.status.success() && out.stdout == expected(), "{fault}: {said}");
    said
}

#[test]
fn auto_opens_no_device_that_was_slower_before() {
    if shim().is_none() {
        return;
    }
    let (own, fault) = (TestDir::new(), "clCreateContext:1:-6");
    assert!(auto(&own, fault).contains("using the CPU"));
    assert!(auto(&own, "").contains("auto: using the CPU"));
    let said = auto(&own, fault);
    assert!(said.lines().count() == 1 && said.starts_with("auto: using the CPU"), "{said}");
}

#[test]
fn a_failure_while_loading_is_one_line_and_its_code() {
    if shim().is_none() {
        return;
    }
    for (fault, code) in [
        ("clGetPlatformIDs:1:-6", 5),
        ("clCreateContext:1:-5", 5),
        ("clCreateBuffer:1:-4", 4),
        ("clCreateBuffer:3:-5", 5),
        ("clEnqueueWriteBuffer:2:-6", 4),
        ("clFinish:1:-36", 5),
    ] {
        let Output { status, stdout, stderr } = run(&OPENCL, fault);
        let said = said(&stderr);
        assert!(status.code() == Some(code) && stdout.is_empty(), "{fault}: {status}: {said}");
        assert!(said.lines().count() == 1 && said.starts_with("error: OpenCL: "), "{fault}: {said}");
    }
}

#[test]
fn a_program_that_does_not_compile_is_one_line() {
    if shim().is_none() {
        return;
    }
    let own = TestDir::new();
    let build = |fault: &str| {
        let out = with_cache(&own, &OPENCL, fault).output().unwrap();
        assert!(out.status.success() && out.stdout == expected(), "{fault}");
        said(&out.stderr)
    };
    let said = build("clBuildProgram:1:-11:once");
    assert!(said.lines().count() == 1 && said.contains("using baseline kernels"), "{said}");
    let said = build("clBuildProgram:1:-11");
    assert!(said.lines().count() == 1 && said.contains("using the CPU"), "{said}");
}

#[test]
fn a_device_that_hangs_is_abandoned() {
    if shim().is_none() {
        return;
    }
    goes_on(&OPENCL, "");
    let is_left = |mut command: Command, fault: &str| {
        let out = command.env("ANTIGRAVITY_OPENCL_LIMIT", "0.5").output().unwrap();
        let said = said(&out.stderr);
        assert!(out.status.success() && out.stdout == expected(), "{fault}: {said}");
        assert!(said.contains("has not returned for") && said.lines().count() == 1, "{fault}: {said}");
    };
    for (flags, fault) in [
        (&OPENCL[..], "clEnqueueReadBuffer:17:hang"),
        (&OPENCL[..3], "clEnqueueReadBuffer:9:hang"),
        (&OPENCL, "clWaitForEvents:3:hang"),
    ] {
        is_left(command(flags, fault), fault);
    }
    let (own, fault) = (TestDir::new(), "clFinish:1:hang");
    is_left(with_cache(&own, &["-b", "auto", "--wait-for-gpu"], fault), fault);
}

#[test]
fn the_first_launch_of_a_kernel_may_take_longer() {
    if shim().is_none() {
        return;
    }
    // PoCL has compiled all from here on.
    goes_on(&OPENCL, "");
    // The self-test is made, as nothing is known of this device. Several sequences have kernels of their own; they come
    // after many tokens, two single ones and a few.
    let own = TestDir::new();
    let mut command = with_cache(&own, &OPENCL, "clEnqueueReadBuffer:5:slow:once");
    let out = command.env("ANTIGRAVITY_OPENCL_LIMIT", "1").output().unwrap();
    assert!(out.status.success() && out.stdout == expected());
    assert_eq!(said(&out.stderr), "");
}

/// Waits for the end of a child, for so long at most.
fn ends_within(child: &mut Child, most: Duration) -> Option<i32> {
    let began = Instant::now();
    while began.elapsed() < most {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    panic!("it does not end");
}

#[test]
fn ctrl_c_ends_the_answer_of_a_device_that_hangs() {
    if shim().is_none() {
        return;
    }
    goes_on(&OPENCL, "");
    // Calls that wait, and calls that only queue something.
    for fault in ["clEnqueueReadBuffer:12:hang", "clEnqueueNDRangeKernel:400:hang", "clSetKernelArg:800:hang"]
    {
        let mut command = command(&OPENCL, fault);
        command.env("ANTIGRAVITY_OPENCL_LIMIT", "600").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        // A piece of the text, after which it hangs before long.
        out.read_exact(&mut [0]).unwrap();
        // SAFETY: sends a signal to a child that is not waited for yet.
        unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
        assert_eq!(ends_within(&mut child, Duration::from_secs(60)), Some(130), "{fault}");
    }
}
