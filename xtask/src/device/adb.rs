//! Phones and other devices with an adb daemon, through the `adb` program.

use super::{Device, Forward, shell};
use crate::command;
use crate::error::{Error, Result};
use std::io::IsTerminal;
use std::path::Path;
use std::process::{Command, Stdio};

const MISSING: &str = "adb is missing: sudo apt-get install adb";
const CONNECT: &str = "connect the phone by USB and allow USB debugging on it \
     (Settings > About phone: tap the build number seven times; then System > Developer options)";

/// One attached device.
#[derive(Debug)]
pub struct Adb {
    serial: String,
    info: DeviceInfo,
}

/// A device's target triple, and our directory there.
#[derive(Debug, Default, PartialEq)]
struct DeviceInfo {
    target: String,
    home: String,
}

impl Adb {
    /// The device with this serial number, or the only one.
    pub fn open(serial: Option<&str>) -> Result<Adb> {
        if !command::is_on_path("adb") {
            return Err(Error::Device(MISSING.into()));
        }
        // Started first, as a starting server prints a message into the list of devices.
        let _ = command::output(Command::new("adb").arg("start-server"));
        let out = command::output(Command::new("adb").arg("devices"))?;
        if !out.status.success() {
            let why = last_line(&out.stderr);
            return Err(Error::Device(format!("`adb devices` fails ({why}); try: adb kill-server")));
        }
        let serial = choose_serial(&parse_devices(&String::from_utf8_lossy(&out.stdout)), serial)?;
        let mut device = Adb { serial, info: DeviceInfo::default() };
        let answer = shell::capture(&device, PROBE)?.ok(&device)?;
        device.info =
            parse_info(&answer).map_err(|why| Error::Device(format!("{}: {why}", device.serial)))?;
        Ok(device)
    }

    fn command(&self) -> Command {
        let mut adb = Command::new("adb");
        adb.args(["-s", &self.serial]);
        adb
    }
}

impl Device for Adb {
    fn name(&self) -> String {
        self.serial.clone()
    }

    fn target(&self) -> &str {
        &self.info.target
    }

    fn home(&self) -> &str {
        &self.info.home
    }

    fn shell(&self, script: &str) -> Command {
        let mut adb = self.command();
        // One argument reaches the device's shell unchanged. -T: no terminal, which would mix stderr into stdout and
        // change newlines.
        adb.args(["shell", "-T", script]);
        adb
    }

    fn terminal(&self, script: &str) -> Command {
        let mut adb = self.command();
        adb.args(["shell", "-t", script]);
        adb
    }

    fn push(&self, from: &Path, to: &str) -> Result<()> {
        let mut adb = self.command();
        adb.arg("push").arg(from).arg(to).stdin(Stdio::null()).stderr(Stdio::piped());
        // adb shows its progress on a terminal; our stdout is for results.
        let terminal = std::io::stderr().is_terminal();
        adb.stdout(if terminal { Stdio::from(std::io::stderr()) } else { Stdio::piped() });
        let out = adb.spawn().and_then(|child| child.wait_with_output());
        let out = out.map_err(|e| Error::Device(format!("{}: adb push: {e}", self.serial)))?;
        // adb prints errors on stdout or stderr, depending on what failed, among transfer statistics.
        let said = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        let why = said.lines().rfind(|l| l.contains("error")).unwrap_or(&said);
        if out.status.success() {
            return Ok(());
        }
        let above = terminal && said.is_empty();
        let why = if above { "see adb's error above".into() } else { last_line(why.as_bytes()) };
        Err(Error::Device(format!("{}: cannot push {to}: {why}", self.serial)))
    }

    fn forward(&self, here: u16, there: u16) -> Result<Forward> {
        let local = format!("tcp:{here}");
        let mut adb = self.command();
        let out = command::output(adb.args(["forward", &local, &format!("tcp:{there}")]))?;
        if !out.status.success() {
            let why = last_line(&[out.stdout, out.stderr].concat());
            let remedy = "give --port another one, before --";
            return Err(Error::Device(format!("{}: port {here} here: {why}; {remedy}", self.serial)));
        }
        let mut end = self.command();
        end.args(["forward", "--remove", &local]);
        Ok(Forward(Some(end)))
    }
}

/// The last line that is not empty, without control characters.
fn last_line(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let line = text.lines().map(str::trim).rfind(|l| !l.is_empty()).unwrap_or("no reason given");
    let line = line.trim_start_matches("adb: ").trim_start_matches("error: ");
    command::one_line(line)
}

/// Serial numbers and states in the output of `adb devices`.
fn parse_devices(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter(|l| !l.starts_with('*'));
    let pair =
        |l: &str| l.split_once('\t').map(|(serial, state)| (serial.trim().into(), state.trim().into()));
    lines.filter_map(pair).collect()
}

/// The serial number to use, or an error with the remedy.
fn choose_serial(devices: &[(String, String)], wanted: Option<&str>) -> Result<String> {
    let unavailable = |text: String| Err(Error::Device(text));
    let all = || devices.iter().map(|(s, state)| format!("{s} ({state})")).collect::<Vec<_>>().join(", ");
    let found = match (wanted, devices) {
        (None, []) => return unavailable(format!("no device: {CONNECT}")),
        (Some(serial), []) => {
            return unavailable(format!("no device {serial}, and none is attached; {CONNECT}"));
        }
        (Some(serial), _) => match devices.iter().find(|(s, _)| s == serial) {
            Some(device) => device,
            None => return unavailable(format!("no device {serial}; attached: {}", all())),
        },
        (None, [device]) => device,
        (None, _) => match devices.iter().filter(|(_, s)| s == "device").collect::<Vec<_>>()[..] {
            [device] => device,
            _ => return unavailable(format!("several devices: {}; choose one with --serial", all())),
        },
    };
    match find_remedy(&found.1) {
        None => Ok(found.0.clone()),
        Some(remedy) => unavailable(format!("{}: {}: {remedy}", found.0, found.1)),
    }
}

/// The remedy for a device state; `None` if the device is ready.
fn find_remedy(state: &str) -> Option<&'static str> {
    Some(match state {
        "device" => return None,
        "unauthorized" | "authorizing" => {
            "unlock the phone and accept `Allow USB debugging`; if it does not ask, run `adb kill-server` and plug it in again"
        }
        "offline" | "connecting" => "plug the cable in again, or run `adb reconnect offline`",
        _ if state.starts_with("no permissions") => {
            "sudo apt-get install android-sdk-platform-tools-common, then plug the phone in again"
        }
        _ => "start the phone normally",
    })
}

/// The script whose output [`parse_info`] reads.
const PROBE: &str = "\
echo sdk=$(getprop ro.build.version.sdk 2>/dev/null)
echo abi=$(getprop ro.product.cpu.abi 2>/dev/null)
echo machine=$(uname -m)
echo tmp=${TMPDIR:-/tmp}";

/// Reads the output of [`PROBE`]. A system without an SDK level is a Linux board, which gets a static program.
fn parse_info(answer: &str) -> std::result::Result<DeviceInfo, String> {
    let field = |name: &str| {
        let value = answer.lines().find_map(|l| l.trim().strip_prefix(name)?.strip_prefix('='));
        value.unwrap_or("").trim()
    };
    let (sdk, abi, machine) = (field("sdk"), field("abi"), field("machine"));
    let (target, base) = match (sdk, abi, machine) {
        ("", _, "aarch64" | "x86_64") => (format!("{machine}-unknown-linux-musl"), field("tmp")),
        ("", _, other) => {
            return Err(format!("its CPU is {other:?}; only 64-bit Arm and x86-64 are supported"));
        }
        (level, "arm64-v8a", _) if level.parse::<u32>().is_ok_and(|n| n < 24) => {
            return Err(format!("it runs Android API level {level}; 24 (Android 7) is the oldest supported"));
        }
        (_, "arm64-v8a", _) => ("aarch64-linux-android".to_string(), "/data/local/tmp"),
        (_, other, _) => return Err(format!("its system is {other:?}; only arm64-v8a phones are supported")),
    };
    if !base.starts_with('/') {
        return Err(format!("its TMPDIR is {base:?}, not an absolute path"));
    }
    Ok(DeviceInfo { target, home: format!("{}/antigravity", base.trim_end_matches('/')) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = "* daemon not running; starting now at tcp:5037\n* daemon started successfully\n\
        List of devices attached\nR58M123\tdevice\n127.0.0.1:15557\toffline\n0123 45\tunauthorized\n\
        X1\tno permissions (missing udev rules? user is in the plugdev group); see [http://x]\n\n";

    fn error(devices: &str, serial: Option<&str>) -> String {
        let e = choose_serial(&parse_devices(devices), serial).unwrap_err();
        assert_eq!(e.exit_code(), 5);
        assert_eq!(e.to_string().lines().count(), 1);
        e.to_string()
    }

    #[test]
    fn devices_are_listed_and_the_ready_one_is_chosen() {
        let devices = parse_devices(LIST);
        assert_eq!(devices.len(), 4);
        assert_eq!(devices[1], ("127.0.0.1:15557".into(), "offline".into()));
        assert_eq!(devices[2], ("0123 45".into(), "unauthorized".into()));
        assert!(parse_devices("List of devices attached\n\n").is_empty());
        assert!(parse_devices("").is_empty());
        assert_eq!(
            choose_serial(&parse_devices("List of devices attached\nA\tdevice\n"), None).unwrap(),
            "A"
        );
        assert_eq!(choose_serial(&parse_devices(LIST), None).unwrap(), "R58M123");
        assert_eq!(choose_serial(&parse_devices(LIST), Some("R58M123")).unwrap(), "R58M123");
    }

    #[test]
    fn every_state_of_a_phone_but_ready_names_its_remedy() {
        assert!(error("", None).contains("USB debugging"));
        assert!(error("", Some("A")).contains("no device A"));
        assert!(error(LIST, Some("A")).contains("attached: R58M123 (device), "));
        assert!(error("A\tdevice\nB\tdevice\n", None).contains("--serial"));
        assert!(error("A\toffline\nB\toffline\n", None).contains("--serial"));
        assert!(error("A\tunauthorized\n", None).contains("Allow USB debugging"));
        assert!(error(LIST, Some("127.0.0.1:15557")).contains("cable"));
        assert!(error(LIST, Some("X1")).contains("apt-get"));
        assert!(error("A\trecovery\n", None).contains("normally"));
    }

    #[test]
    fn the_target_of_a_device_is_recognised() {
        let phone =
            parse_info("sdk=34\r\nabi=arm64-v8a\r\nmachine=aarch64\r\ntmp=/data/local/tmp\r\n").unwrap();
        assert_eq!(phone.target, "aarch64-linux-android");
        assert_eq!(phone.home, "/data/local/tmp/antigravity");
        let board = parse_info("sdk=\nabi=\nmachine=aarch64\ntmp=/var/tmp/\n").unwrap();
        assert_eq!(board.target, "aarch64-unknown-linux-musl");
        assert_eq!(board.home, "/var/tmp/antigravity");
        for (answer, word) in [
            ("sdk=34\nabi=armeabi-v7a\nmachine=armv8l\n", "armeabi-v7a"),
            ("sdk=21\nabi=arm64-v8a\n", "API level 21"),
            ("machine=mips\n", "mips"),
            ("machine=aarch64\ntmp=x\n", "TMPDIR"),
            ("\u{1b}[2J", "CPU"),
            ("", "CPU"),
        ] {
            assert!(parse_info(answer).unwrap_err().contains(word), "{answer:?}");
        }
        let said = b"adb: error: failed to copy 'a': no space\n\n";
        assert_eq!(last_line(said), "failed to copy 'a': no space");
        assert_eq!(last_line(b"\x1b[2Jx"), "\\u{1b}[2Jx");
        assert_eq!(last_line(b""), "no reason given");
    }
}
