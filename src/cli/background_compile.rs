//! Compilation of OpenCL programs in a process of its own, which goes on when a text has ended before its device was
//! ready: the next start then finds all programs in the cache.

use super::args::{FlagWarnings, ModelArgs};
use super::load;
use super::signal;
use super::terminal::{Verbosity, write_stdout};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::placement::{CacheLock, UnfinishedPrograms};
use crate::run::plan::OpenedModel;
use crate::run::session::Notice;
use clap::Args;
use files::{Error, Result};
use opencl_runtime::program_cache::{LONG_TRIAL, mark_as_background_process, remove_own_markers};
use rustix::process::{nice, setsid};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Time after which the process ends, whatever the driver does.
const TIME_LIMIT: Duration = Duration::from_secs(20 * 60);
/// Steps of priority below that of a text.
const NICENESS: i32 = 10;
/// Line that says that the process has left the terminal.
const READY: &str = "ready\n";

/// Flags of the process in the background. Its stdin is the locked file of the program cache.
#[derive(Args, Clone)]
pub struct CompileArgs {
    #[command(flatten)]
    model: ModelArgs,
}

/// Compiles what a text with these flags needs. Says nothing but [`READY`], as nobody is there to read it.
pub fn run(args: &CompileArgs) -> Result<()> {
    // It survives the terminal. Fails only if it has done so already.
    let _ = setsid();
    let _ = nice(NICENESS);
    write_stdout(READY)?;
    mark_as_background_process();
    let limit = || {
        thread::sleep(TIME_LIMIT);
        remove_own_markers(LONG_TRIAL);
        signal::exit_process(1);
    };
    let limited = thread::Builder::new().stack_size(signal::SIGNAL_STACK).spawn(limit);
    limited.map_err(|e| Error::Other(format!("cannot start a thread: {e}")))?;
    let options =
        EngineOptions { notice: Notice::default(), ..device_options(args.model.resolve_options()?) };
    let opened = OpenedModel::new(&options)?;
    let loaded = load::load_engine(opened, Verbosity::Quiet, &FlagWarnings::default())?;
    loaded.engine.device_cache(loaded.engine.options()).map(drop)
}

/// Options of the OpenCL device that computes with these, alone or with the CPU.
pub fn device_options(o: EngineOptions) -> EngineOptions {
    // Two devices always compute attention where the rest is computed.
    let gpu_attn = o.gpu_attn || matches!(o.backend, BackendKind::Hybrid | BackendKind::Auto);
    EngineOptions { backend: BackendKind::OpenCl, gpu_attn, wait_for_gpu: true, ..o }
}

/// Lets another process compile the programs that are not ready when a text has ended, and says so.
/// `options` are those of the flags, `given` is the path of `--model-path`.
pub fn continue_compiling(engine: &Engine, options: &EngineOptions, given: Option<&Path>) {
    let Some(UnfinishedPrograms { lock, stats }) = engine.leave_unfinished() else { return };
    let lock = match lock {
        CacheLock::Own(lock) => lock,
        CacheLock::OfAnother => {
            return options.notice.warn("OpenCL: another process is compiling programs in the background");
        }
        CacheLock::Unavailable => return,
    };
    let flags = list_flags(options, given);
    if start_process(&flags, lock).is_err() {
        return;
    }
    let mut line = "OpenCL: compiling the remaining programs in the background".to_string();
    if stats.needed > 0 {
        line += &format!(" ({} of {} are ready)", stats.count_built().min(stats.needed), stats.needed);
    }
    if cfg!(feature = "tools") {
        let flags: String = flags.iter().map(|flag| format!(" {}", flag.display())).collect();
        line += &format!("; `antigravity doctor --tune{flags}` does it now");
    }
    options.notice.warn(&line);
}

/// Starts the process and waits until it has left the terminal. It inherits the lock, and holds it until it ends.
fn start_process(flags: &[OsString], lock: File) -> io::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("compile").args(flags).stdin(lock).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut stdout = command.spawn()?.stdout.take().expect("piped");
    stdout.read_exact(&mut [0; READY.len()])
}

/// The flags on which programs depend, where they are not the defaults.
fn list_flags(o: &EngineOptions, given: Option<&Path>) -> Vec<OsString> {
    let default = EngineOptions::new(PathBuf::new());
    let mut flags = Vec::new();
    let mut add = |differs: bool, flag: &str, value: OsString| {
        if differs {
            flags.push(flag.into());
            flags.extend(Some(value).filter(|value| !value.is_empty()));
        }
    };
    let gpu_attn = device_options(o.clone()).gpu_attn;
    add(given.is_some(), "--model-path", o.model.clone().into());
    add(o.weight_type != default.weight_type, "--weight-type", o.weight_type.to_string().into());
    add(o.cl_device.is_some(), "--cl-device", o.cl_device.clone().unwrap_or_default().into());
    add(gpu_attn, "--gpu-attn", OsString::new());
    add(o.zero_copy, "--zero-copy", OsString::new());
    let (k, v) = (o.kv_types.k, o.kv_types.v);
    add(k == v && k != default.kv_types.k, "--kv-type", k.name().into());
    add(k != v, "--cache-type-k", k.name().into());
    add(k != v, "--cache-type-v", v.name().into());
    add(o.draft > 0, "--draft", o.draft.to_string().into());
    add(o.eviction.policy != Policy::None, "--eviction-policy", o.eviction.policy.name().into());
    flags
}
