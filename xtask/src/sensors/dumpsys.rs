//! Android's `dumpsys thermalservice` and `dumpsys battery`, whose output differs between versions.

use super::reading::{Battery, Temperature, sanitize_name};

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
