//! The page: one file without a network, legible on a phone, light or dark as the reader has it.

use super::chart::{Column, Floor, Scene, Series, class, colours, columns, escape, lines, measures};
use super::record::Profile;
use super::trace::Kind;
use crate::sensors::sampler::{Sample, cores_used};
use crate::sensors::{layout, ranges};
use std::fmt::Write;

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const MIB: f64 = (1 << 20) as f64;
/// Marks listed; what follows is counted.
const LISTED: usize = 100;

/// The whole page.
pub fn html(p: &Profile) -> String {
    let title = escape(&format!("{} on {}", p.model, p.device));
    let command = escape(&p.args.join(" "));
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{title}</title>\n\
         <style>{STYLE}{}</style></head>\n<body><main>\n\
         <h1>{title}</h1>\n<p class=\"soft\">{} · {}{}</p>\n<p><code>{command}</code></p>\n",
        colours(),
        escape(&p.target),
        escape(&day(&p.time)),
        match layout(&p.clusters) {
            cores if cores.is_empty() => String::new(),
            cores => format!(" · {}", escape(&cores)),
        },
    );
    page += &tiles(p);
    page += &key(p);
    page += "<div class=\"charts\">\n";
    page += &charts(p);
    page += "</div>\n";
    page += &steps(p);
    page += &marks(p);
    let notes = p.notes();
    if !notes.is_empty() {
        let _ = write!(page, "<h2>Not known</h2>\n<p class=\"soft\">{}</p>\n", escape(&notes.join(" ")));
    }
    let interval = p.plan.interval.as_millis();
    let _ = write!(
        page,
        "<p class=\"soft\">{} samples, {interval} ms apart or more. Beside this page: \
         profile.json has the numbers, trace.json every step (open it in ui.perfetto.dev).</p>\n\
         </main>\n<script>{}{SCRIPT}</script></body></html>\n",
        p.samples.len(),
        measures(),
    );
    page
}

/// `20261121-170559` -> `2026-11-21 17:05 UTC`; other text as it is.
fn day(time: &str) -> String {
    match time.split_once('-') {
        Some((d, t))
            if d.len() == 8 && t.len() == 6 && (d.to_owned() + t).bytes().all(|b| b.is_ascii_digit()) =>
        {
            format!("{}-{}-{} {}:{} UTC", &d[..4], &d[4..6], &d[6..], &t[..2], &t[2..4])
        }
        _ => time.into(),
    }
}

fn tiles(p: &Profile) -> String {
    let mut all: Vec<(&str, String, String)> = Vec::new();
    let number = |x: Option<f64>, digits: usize| x.map_or("–".into(), |x| format!("{x:.digits$}"));
    let pace = |r: f64| if r < 100.0 { format!("{r:.1}") } else { format!("{r:.0}") };
    let change = match (p.rate(0.0, 0.2), p.rate(0.8, 1.0)) {
        (Some(a), Some(b)) => {
            format!("first fifth {}, last {} ({:+.0} %)", pace(a), pace(b), 100.0 * (b / a - 1.0))
        }
        _ => "no token was decoded".into(),
    };
    all.push(("Decode, tokens/s", p.rate(0.0, 1.0).map_or("–".into(), pace), change));
    let prompt = p.prompt();
    let rate = prompt.map(|(n, s)| n as f64 / s.max(1e-9));
    let told = prompt.map_or("no prompt".into(), |(n, s)| format!("{n} tokens in {:.0} ms", s * 1e3));
    all.push(("Prompt, tokens/s", rate.map_or("–".into(), pace), told));
    let first = p.trace.split().0.last().map(|pass| pass.to);
    let load = p.trace.passes.first().map(|pass| format!("loading until {:.2} s", pass.from));
    all.push(("First token after, s", number(first, 2), load.unwrap_or_default()));
    let start = p.before.hottest().map_or("not readable there".into(), |c| format!("{c:.1} at the start"));
    all.push(("Hottest, °C", number(p.hottest(), 1), start));
    let start = p.before.throttling().map_or("not told there".into(), |t| format!("{t} at the start"));
    all.push(("Throttling", p.after.throttling().unwrap_or("–".into()), start));
    let mib = |of: fn(&Sample) -> Option<u64>| p.peak(move |s| of(s).map(|b| b as f64 / MIB));
    let least = p.samples.iter().filter_map(|s| s.available).min().map(|b| b as f64 / MIB);
    all.push(("Memory, MiB", number(mib(|s| s.rss), 0), format!("{} left to the system", number(least, 0))));
    let used = cores_used(&p.samples);
    if !used.is_empty() {
        all.push(("Cores used", ranges(&used), format!("of {}", p.before.cores.len())));
    }
    if let Some(percent) = p.after.battery.percent.or(p.before.battery.percent) {
        let current = p.peak(|s| s.microamps.map(f64::abs)).map(|a| format!("up to {:.0} mA", a / 1e3));
        all.push(("Battery, %", format!("{percent:.0}"), current.unwrap_or("current not readable".into())));
    }
    let tile = |(name, value, note): &(&str, String, String)| {
        format!("<div><dt>{name}</dt><dd>{}<small>{}</small></dd></div>\n", escape(value), escape(note))
    };
    format!("<dl>\n{}</dl>\n", all.iter().map(tile).collect::<String>())
}

/// Shaded: until the first pass, and the prompt.
fn bands(p: &Profile) -> Vec<(f64, f64, &'static str)> {
    let (prompt, _) = p.trace.split();
    let Some((first, last)) = prompt.first().zip(prompt.last()) else { return Vec::new() };
    let all = [(0.0, first.from, "loading"), (first.from, last.to, "prompt")];
    all.into_iter().filter(|b| b.1 > b.0).collect()
}

/// What shades and marks mean; only those that are there.
fn key(p: &Profile) -> String {
    let mut text = String::from("<ul>");
    if !bands(p).is_empty() {
        text += "<li><span class=\"key band\"></span>loading and prompt</li>";
    }
    for (kind, name, head) in [
        (Kind::Switch, "switch of backends", "M2 14v-12h10l-3 4 3 4h-10"),
        (Kind::Evict, "eviction", "M1 2h12l-6 11z"),
    ] {
        let count = p.trace.marks.iter().filter(|m| m.kind == kind).count();
        if count > 0 {
            let class = class(kind);
            let _ = write!(
                text,
                "<li><svg class=\"key {class}\" viewBox=\"0 0 14 14\">\
                 <path class=\"head\" d=\"{head}\"/></svg>{name} ({count})</li>"
            );
        }
    }
    text + "</ul>\n"
}

fn charts(p: &Profile) -> String {
    let scene = Scene { span: p.span(), bands: bands(p), marks: &p.trace.marks };
    let line = |name: String, of: &dyn Fn(&Sample) -> Option<f64>| Series {
        name,
        points: p.samples.iter().filter_map(|s| Some((s.uptime - p.zero, of(s)?))).collect(),
    };
    let decode = p.bins(120).iter().map(|b| ((b.from + b.to) / 2.0, b.rate())).collect();
    let speed = [Series { name: "decode".into(), points: decode }];
    let mut text = lines(&scene, ("Speed", "tokens/s"), Floor::Zero, &speed);
    let warm = p.plan.temperatures.iter().enumerate();
    let warm: Vec<Series> = warm.map(|(i, t)| line(t.name.clone(), &|s| *s.celsius.get(i)?)).collect();
    text += &lines(&scene, ("Temperature", "°C"), Floor::Data, &warm);
    text += &lines(&scene, ("Clock", "GHz"), Floor::Zero, &clocks(p));
    let bins = p.bins(40);
    let column = |b: &super::record::Bin| Column {
        from: b.from,
        to: b.to,
        parts: b.steps.iter().map(|s| s * 1e3 / b.tokens.max(1) as f64).collect(),
    };
    let names: Vec<&str> = p.trace.steps.iter().map(String::as_str).collect();
    let bars: Vec<Column> = bins.iter().map(column).collect();
    text += &columns(&scene, ("Time per step", "ms/token"), &names, &bars);
    let mib = |of: fn(&Sample) -> Option<u64>| move |s: &Sample| of(s).map(|b| b as f64 / MIB);
    let memory = [line("RSS".into(), &mib(|s| s.rss)), line("PSS".into(), &mib(|s| s.pss))];
    text += &lines(&scene, ("Memory of the program", "MiB"), Floor::Zero, &memory);
    let available = [line("available".into(), &mib(|s| s.available))];
    text += &lines(&scene, ("Memory left to the system", "MiB"), Floor::Zero, &available);
    let current = [line("current".into(), &|s| s.microamps.map(|a| a / 1e3))];
    text + &lines(&scene, ("Battery current", "mA"), Floor::Zero, &current)
}

/// One line a kind of cores: cores that share a clock would hide each other.
fn clocks(p: &Profile) -> Vec<Series> {
    let mean = |s: &Sample, cores: &[u32]| {
        let of = p.plan.cores.iter().zip(&s.khz).filter(|(n, _)| cores.contains(n)).filter_map(|(_, k)| *k);
        let all: Vec<f64> = of.map(|k| k as f64 / 1e6).collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    };
    let line = |c: &crate::sensors::Cluster| Series {
        name: c.name(),
        points: p.samples.iter().filter_map(|s| Some((s.uptime - p.zero, mean(s, &c.cores)?))).collect(),
    };
    p.clusters.iter().rev().map(line).filter(|s| !s.points.is_empty()).collect()
}

fn steps(p: &Profile) -> String {
    let steps = p.steps();
    let all: f64 = steps.iter().map(|(_, ms)| ms).sum();
    if all <= 0.0 {
        return String::new();
    }
    let most = steps.iter().map(|(_, ms)| *ms).fold(0.0, f64::max);
    let mut text = String::from(
        "<h2>Steps of a decoded token</h2>\n<div class=\"scroll\"><table>\
         <tr><th>step</th><th>ms</th><th>%</th><th></th></tr>\n",
    );
    for (i, (name, ms)) in steps.iter().enumerate() {
        let _ = writeln!(
            text,
            "<tr><td>{}</td><td>{ms:.3}</td><td>{:.1}</td><td class=\"share\">\
             <span style=\"width:{:.1}%;background:var(--c{})\"></span></td></tr>",
            escape(name),
            100.0 * ms / all,
            100.0 * ms / most,
            i % 12
        );
    }
    text + &format!("<tr><td>all</td><td>{all:.3}</td><td>100.0</td><td></td></tr>\n</table></div>\n")
}

fn marks(p: &Profile) -> String {
    let marks = &p.trace.marks;
    if marks.is_empty() {
        return String::new();
    }
    let row = |m: &super::trace::Mark| {
        format!("<tr><td>{:.2}</td><td class=\"wide\">{}</td></tr>\n", m.at, escape(&m.text))
    };
    let rows: String = marks.iter().take(LISTED).map(row).collect();
    let more = match marks.len().saturating_sub(LISTED) {
        0 => String::new(),
        n => format!("<p class=\"soft\">and {n} more</p>\n"),
    };
    format!(
        "<h2>Switches and evictions</h2>\n<div class=\"scroll\"><table><tr><th>s</th>\
         <th style=\"text-align:left\">what</th></tr>\n{rows}</table></div>\n{more}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::{nothing, phone};
    use super::*;

    #[test]
    fn a_phones_page_has_every_chart_and_mark() {
        let page = html(&phone());
        // For looking at it: ANTIGRAVITY_PAGE=FILE cargo test -p xtask page
        if let Some(file) = std::env::var_os("ANTIGRAVITY_PAGE") {
            std::fs::write(file, &page).unwrap();
        }
        for title in
            ["Speed", "Temperature", "Clock", "Time per step", "Memory of the program", "Battery current"]
        {
            assert!(page.contains(&format!("<figcaption>{title}</figcaption>")), "{title}");
        }
        assert_eq!(page.matches("<figure>").count(), 7);
        assert_eq!(page.matches("<g class=\"switch\">").count(), 7);
        assert_eq!(page.matches("<g class=\"evict\">").count(), 7);
        assert!(page.contains("switch of backends (1)") && page.contains("eviction (1)"));
        assert!(
            page.contains("cpu 4-7") && page.contains("moderate") && page.contains("2026-11-21 17:00 UTC")
        );
        assert!(page.contains("name=\"viewport\"") && page.contains("prefers-color-scheme:dark"));
    }

    #[test]
    fn hostile_names_are_text_and_nothing_is_fetched() {
        let page = html(&phone());
        assert!(page.contains("cpu-1-0 &lt;b&gt;&amp;&quot;&#39;&lt;/script&gt;"));
        assert!(page.contains("R58M &lt;1&gt;") && page.contains("&lt;i&gt;opencl&lt;/i&gt;"));
        assert_eq!((page.matches("<script>").count(), page.matches("</script>").count()), (1, 1));
        assert!(!page.contains("alert(1)</script>"));
        for fetch in ["src=", "href=", "http:", "https:", "url(", "@import"] {
            assert!(!page.contains(fetch), "{fetch}");
        }
        // Every element that is opened is closed.
        for tag in ["svg", "g", "figure", "ul", "li", "dl", "div", "table", "tr", "td", "main", "title", "p"]
        {
            let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        assert!(!page.contains("NaN") && !page.contains("inf\""));
    }

    #[test]
    fn a_page_about_nothing_says_so() {
        let page = html(&nothing());
        assert_eq!(page.matches("<figure>").count(), 0);
        assert!(page.contains("No temperature can be read there.") && page.contains("no token was decoded"));
        assert_eq!(day("x<y"), "x<y");
    }
}
