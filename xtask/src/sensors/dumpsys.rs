//! Android's services: `dumpsys thermalservice` and `dumpsys battery`, whose text differs from version to
//! version.

use super::reading::{Battery, Temperature, tame};

/// What the thermal service says.
#[derive(Debug, Default, PartialEq)]
pub struct Thermal {
    pub status: Option<u64>,
    pub temperatures: Vec<Temperature>,
}

/// Temperatures are listed once as cached and once as the hardware gives them now; the last of a name counts.
pub fn thermal(lines: &[&str]) -> Thermal {
    let mut found = Thermal::default();
    for line in lines {
        if let Some(status) = line.trim().strip_prefix("Thermal Status:") {
            found.status = status.trim().parse().ok().filter(|s| *s <= 6);
        }
        if let Some(warm) = temperature(line) {
            match found.temperatures.iter_mut().find(|t| t.name == warm.name) {
                Some(old) => *old = warm,
                None => found.temperatures.push(warm),
            }
        }
    }
    found
}

/// `Temperature{mValue=38.4, mType=0, mName=CPU0, mStatus=0}`
pub fn temperature(line: &str) -> Option<Temperature> {
    let inner = line.trim().strip_prefix("Temperature{")?.split('}').next()?;
    let field = |name: &str| inner.split(", ").find_map(|f| f.strip_prefix(name)?.strip_prefix('='));
    let celsius: f64 = field("mValue")?.parse().ok()?;
    let name = tame(field("mName")?);
    let real = celsius > -40.0 && celsius < 150.0 && celsius != 0.0 && !name.is_empty();
    real.then_some(Temperature { name, celsius, zone: None })
}

/// Fills in what the files did not tell: `level: 83`, `temperature: 315` (tenths of a degree).
pub fn battery(lines: &[&str], battery: &mut Battery) {
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
    fn the_thermal_service_is_read() {
        let found = thermal(&THERMAL.lines().collect::<Vec<_>>());
        assert_eq!(found.status, Some(2));
        let warm: Vec<(&str, f64)> = found.temperatures.iter().map(|t| (&*t.name, t.celsius)).collect();
        assert_eq!(warm, [("skin", 36.25), ("CPU0", 44.5)]);
    }

    #[test]
    fn hostile_services_are_left_out() {
        for line in [
            "Thermal Status: 7",
            "Thermal Status: -1",
            "Temperature{",
            "Temperature{}",
            "Temperature{mValue=1e9, mName=a}",
            "Temperature{mValue=40.0, mName=}",
            "Temperature{mName=a, mValue=}",
        ] {
            assert_eq!(thermal(&[line]), Thermal::default(), "{line}");
        }
        let named = temperature("Temperature{mValue=40.0, mName=<b>\u{1b}x, mType=1}").unwrap();
        assert_eq!(named.name, "<b>x");
    }

    #[test]
    fn the_battery_service_fills_gaps_only() {
        let lines: Vec<&str> =
            "Current Battery Service state:\n  AC powered: false\n  level: 83\n  scale: 100\n  \
            temperature: 287\n  voltage: 4123\n"
                .lines()
                .collect();
        let mut found = Battery::default();
        battery(&lines, &mut found);
        assert_eq!((found.percent, found.celsius, found.microamps), (Some(83.0), Some(28.7), None));
        let mut known = Battery { percent: Some(50.0), ..Battery::default() };
        battery(&["level: 83", "temperature: 99999"], &mut known);
        assert_eq!((known.percent, known.celsius), (Some(50.0), None));
    }
}
