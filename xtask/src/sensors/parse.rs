//! Parses the output of `read.sh`, which comes from a device and may contain anything.

use super::{Battery, Cooling, Core, Reading, Temperature, sanitize_name};

/// Maximum number of cores, temperatures and cooling devices; the rest is dropped.
const MAX_ITEMS: usize = 512;

pub fn parse_reading(text: &str) -> Reading {
    let mut r = Reading::default();
    let (mut zones, mut thermal, mut battery) = (Vec::new(), Vec::new(), Vec::new());
    for line in text.lines() {
        let (key, rest) = line.trim_end().split_once(' ').unwrap_or((line, ""));
        let mut words = rest.split_whitespace();
        match key {
            "uptime" => r.uptime = words.next().and_then(seconds),
            "core" => r.cores.extend(core(&mut words)),
            "zone" => zones.extend(zone(rest)),
            "cooling" => r.cooling.extend(cooling(rest)),
            "total" => r.total = words.next().and_then(kilobytes),
            "available" => r.available = words.next().and_then(kilobytes),
            "battery" => r.battery = battery_files(&mut words),
            "thermalservice" => thermal.push(rest),
            "batteryservice" => battery.push(rest),
            _ => {}
        }
    }
    let service = parse_thermal(&thermal);
    r.thermal_status = service.status;
    r.temperatures = if zones.is_empty() { service.temperatures } else { zones };
    add_battery(&battery, &mut r.battery);
    r.cores.sort_by_key(|c| c.number);
    r.cores.dedup_by_key(|c| c.number);
    r.cores.truncate(MAX_ITEMS);
    r.temperatures.truncate(MAX_ITEMS);
    r.cooling.truncate(MAX_ITEMS);
    r
}

/// Parses a finite time that is not negative.
pub fn seconds(word: &str) -> Option<f64> {
    word.parse().ok().filter(|s: &f64| s.is_finite() && *s >= 0.0)
}

fn kilobytes(word: &str) -> Option<u64> {
    word.parse::<u64>().ok()?.checked_mul(1024)
}

/// Parses a temperature of the kernel in thousandths of a degree, or in whole degrees as a few drivers have it. `None`
/// for impossible values, which sensors that are off report.
pub fn celsius(word: &str) -> Option<f64> {
    let raw: i64 = word.parse().ok()?;
    let celsius = if (10..=150).contains(&raw) { raw as f64 } else { raw as f64 / 1000.0 };
    (celsius > -40.0 && celsius < 150.0 && raw != 0).then_some(celsius)
}

/// Parses a clock in kHz; `None` if it is impossible.
pub fn khz(word: &str) -> Option<u64> {
    word.parse().ok().filter(|k| (1..100_000_000).contains(k))
}

fn core<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Core> {
    let number = words.next()?.parse().ok()?;
    let capacity = words.next().and_then(|w| w.parse().ok());
    let mut clock = || words.next().and_then(khz);
    Some(Core { number, capacity, max_khz: clock(), allowed_khz: clock(), khz: clock() })
}

fn zone(rest: &str) -> Option<Temperature> {
    let mut words = rest.splitn(3, ' ');
    let (number, celsius) = (words.next()?.parse().ok()?, celsius(words.next()?)?);
    let name = sanitize_name(words.next().unwrap_or(""));
    let name = if name.is_empty() { format!("zone {number}") } else { name };
    Some(Temperature { name, celsius, zone: Some(number) })
}

fn cooling(rest: &str) -> Option<Cooling> {
    let mut words = rest.splitn(3, ' ');
    let mut number = || words.next()?.parse().ok();
    let (state, most) = (number()?, number()?);
    Some(Cooling { kind: sanitize_name(words.next().unwrap_or("")), state, most })
}

fn battery_files<'a>(words: &mut impl Iterator<Item = &'a str>) -> Battery {
    let mut number = || words.next()?.parse::<i64>().ok();
    let microamps = number().filter(|a| a.abs() < 100_000_000).map(|a| a as f64);
    let percent = number().filter(|p| (0..=100).contains(p)).map(|p| p as f64);
    let celsius = number().filter(|t| (-400..1500).contains(t)).map(|t| t as f64 / 10.0);
    Battery { microamps, percent, celsius, by_file: microamps.is_some() }
}

/// The output of the thermal service.
#[derive(Debug, Default, PartialEq)]
pub struct Thermal {
    pub status: Option<u64>,
    pub temperatures: Vec<Temperature>,
}

/// Reads the thermal service. It lists cached and current temperatures; the last one of a name counts.
pub fn parse_thermal(lines: &[&str]) -> Thermal {
    let mut found = Thermal::default();
    for line in lines {
        if let Some(status) = line.trim().strip_prefix("Thermal Status:") {
            found.status = status.trim().parse().ok().filter(|s| *s <= 6);
        }
        if let Some(warm) = parse_temperature(line) {
            match found.temperatures.iter_mut().find(|t| t.name == warm.name) {
                Some(old) => *old = warm,
                None => found.temperatures.push(warm),
            }
        }
    }
    found
}

/// Parses `Temperature{mValue=38.4, mType=0, mName=CPU0, mStatus=0}`.
pub fn parse_temperature(line: &str) -> Option<Temperature> {
    let inner = line.trim().strip_prefix("Temperature{")?.split('}').next()?;
    let field = |name: &str| inner.split(", ").find_map(|f| f.strip_prefix(name)?.strip_prefix('='));
    let celsius: f64 = field("mValue")?.parse().ok()?;
    let name = sanitize_name(field("mName")?);
    let real = celsius > -40.0 && celsius < 150.0 && celsius != 0.0 && !name.is_empty();
    real.then_some(Temperature { name, celsius, zone: None })
}

/// Adds values that the files lack: `level: 83`, `temperature: 315` (tenths of a degree).
pub fn add_battery(lines: &[&str], battery: &mut Battery) {
    let number = |key: &str| {
        let value = |l: &&str| l.trim().strip_prefix(key)?.strip_prefix(':')?.trim().parse::<i64>().ok();
        lines.iter().find_map(value)
    };
    let level = number("level").filter(|p| (0..=100).contains(p));
    let tenths = number("temperature").filter(|t| (-400..1500).contains(t));
    battery.percent = battery.percent.or(level.map(|p| p as f64));
    battery.celsius = battery.celsius.or(tenths.map(|t| t as f64 / 10.0));
}

#[cfg(test)]
mod tests {
    use super::*;

    const PHONE: &str = "uptime 24081.91\ncore 4 1024 2841600 2841600 1804800\ncore 0 250 1804800 1804800 300000\n\
        zone 3 41200 cpu-1-0-usr\nzone 4 38000 skin therm\nzone 5 - modem\nzone 6 -274000 off\nzone 7 36 whole\n\
        cooling 2 10 thermal-cpufreq-4\ntotal 7654321\navailable 3456789\nbattery -412000 83 315\n\
        thermalservice Thermal Status: 1\nbatteryservice level: 82\n";

    #[test]
    fn a_phone_is_read_and_nonsense_is_left_out() {
        let r = parse_reading(PHONE);
        assert_eq!(r.uptime, Some(24081.91));
        assert_eq!(
            r.cores.iter().map(|c| (c.number, c.capacity, c.khz)).collect::<Vec<_>>(),
            [(0, Some(250), Some(300_000)), (4, Some(1024), Some(1_804_800))]
        );
        let warm: Vec<(&str, f64)> = r.temperatures.iter().map(|t| (t.name.as_str(), t.celsius)).collect();
        assert_eq!(warm, [("cpu-1-0-usr", 41.2), ("skin therm", 38.0), ("whole", 36.0)]);
        assert_eq!((r.cooling.len(), r.cooling[0].state, r.thermal_status), (1, 2, Some(1)));
        assert_eq!((r.total, r.available), (Some(7_654_321 << 10), Some(3_456_789 << 10)));
        let battery =
            Battery { percent: Some(83.0), celsius: Some(31.5), microamps: Some(-412_000.0), by_file: true };
        assert_eq!(r.battery, battery);
        for line in [
            "",
            " ",
            "core",
            "core x 1 2 3 4",
            "core -1",
            "core 99999999999 1",
            "zone",
            "zone 1",
            "zone 1 99999999999999999999 x",
            "zone 1 0 off",
            "zone \u{1b}[2J 1 x",
            "cooling 1",
            "uptime -5",
            "uptime NaN",
            "uptime inf",
            "total 18446744073709551615",
            "battery 9999999999 101 99999",
            "thermalservice",
            "thermalservice Temperature{",
            "batteryservice level: x",
            "\0\0\0",
        ] {
            assert_eq!(parse_reading(line), Reading::default(), "{line:?}");
        }
        let r = parse_reading("zone 1 40000 \u{1b}[2J<script>\u{7}\n");
        assert_eq!(r.temperatures[0].name, "[2J<script>");
        let many: String = (0..2000).map(|i| format!("core {i} 1 1 1 1\n")).collect();
        assert_eq!(parse_reading(&many).cores.len(), MAX_ITEMS);
    }

    const THERMAL: &str = "IsStatusOverride: false\nThermalEventListeners:\n\tcallbacks: 2\nThermal Status: 2\n\
        Cached temperatures:\n\tTemperature{mValue=30.1, mType=3, mName=skin, mStatus=0}\nHAL Ready: true\n\
        Current temperatures from HAL:\n\tTemperature{mValue=44.5, mType=0, mName=CPU0, mStatus=0}\n\
        \tTemperature{mValue=36.25, mType=3, mName=skin, mStatus=0}\n\
        \tTemperature{mValue=NaN, mType=9, mName=x, mStatus=0}\n\
        Current cooling devices from HAL:\n\tCoolingDevice{mValue=0, mType=2, mName=cpu}\n";

    #[test]
    fn androids_services_are_read_and_nonsense_is_left_out() {
        let found = parse_thermal(&THERMAL.lines().collect::<Vec<_>>());
        let warm: Vec<(&str, f64)> = found.temperatures.iter().map(|t| (&*t.name, t.celsius)).collect();
        assert_eq!((found.status, &warm[..]), (Some(2), &[("skin", 36.25), ("CPU0", 44.5)][..]));
        for line in [
            "Thermal Status: 7",
            "Temperature{",
            "Temperature{mValue=1e9, mName=a}",
            "Temperature{mName=a, mValue=}",
        ] {
            assert_eq!(parse_thermal(&[line]), Thermal::default(), "{line}");
        }
        let mut battery = Battery { percent: Some(50.0), ..Battery::default() };
        add_battery(&["  level: 83", "  temperature: 287"], &mut battery);
        assert_eq!((battery.percent, battery.celsius), (Some(50.0), Some(28.7)));
    }
}
