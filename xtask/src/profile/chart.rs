//! Charts as SVG: lines and stacked bars over time, all with the same time axis, so that they can be compared.

use super::trace::{Kind, Mark};
use std::fmt::Write;

/// A chart's size in its own units, which are about a phone's pixels, and the margins for labels.
const WIDTH: f64 = 372.0;
const HEIGHT: f64 = 232.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 32.0;
const BOTTOM: f64 = 50.0;
/// Points of a line; more cannot be seen.
const POINTS: usize = 240;
/// Marks drawn; more would hide the lines.
const MARKS: usize = 200;

/// The charts' measures, for the page's script.
pub fn measures() -> String {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    format!("const WIDTH = {WIDTH}, LEFT = {LEFT}, RIGHT = {right}, TOP = {TOP}, BOTTOM = {bottom};\n")
}

/// The colours of lines, fills and legends, which the page's style defines as `--c0` to `--c11`.
pub fn colours() -> String {
    let rule =
        |i| format!(".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.k{i}{{background:var(--c{i})}}\n");
    (0..12).map(rule).collect()
}

/// What all charts of a page have in common.
pub struct Scene<'a> {
    /// Seconds shown.
    pub span: f64,
    /// Shaded: from, to and what it is.
    pub bands: Vec<(f64, f64, &'static str)>,
    pub marks: &'a [Mark],
}

/// A line; its colour follows from its place.
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// A column of the stacked chart: from, to, and the height of each part.
pub struct Column {
    pub from: f64,
    pub to: f64,
    pub parts: Vec<f64>,
}

/// What the vertical axis holds beside the values.
#[derive(Clone, Copy, PartialEq)]
pub enum Floor {
    Zero,
    Data,
}

/// Text as HTML and XML have it, in elements and in attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if c.is_control() && c != '\n' => {}
            c => out.push(c),
        }
    }
    out
}

/// The values on an axis.
#[derive(Debug, PartialEq)]
struct Ticks {
    from: f64,
    to: f64,
    step: f64,
}

impl Ticks {
    /// About `count` round values around `from` to `to`.
    fn around(from: f64, to: f64, count: f64) -> Ticks {
        let raw = ((to - from) / count).max(1e-9);
        let unit = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|m| m * unit).find(|s| *s >= raw * 0.999);
        let step = step.unwrap_or(10.0 * unit);
        Ticks { from: (from / step + 1e-9).floor() * step, to: (to / step - 1e-9).ceil() * step, step }
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        let count = ((self.to - self.from) / self.step).round().clamp(0.0, 20.0) as u32;
        (0..=count).map(|i| self.from + f64::from(i) * self.step)
    }

    /// With as many digits as tell them apart.
    fn label(&self, value: f64) -> String {
        let digits = [0, 1, 2, 3].into_iter().find(|d| {
            let scaled = self.step * 10f64.powi(*d);
            (scaled - scaled.round()).abs() < 1e-6
        });
        format!("{value:.*}", digits.unwrap_or(3) as usize)
    }
}

/// From values to places in the chart.
struct Frame {
    span: f64,
    y: Ticks,
}

impl Frame {
    fn x(&self, t: f64) -> f64 {
        LEFT + (t / self.span).clamp(0.0, 1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, v: f64) -> f64 {
        let share = ((v - self.y.from) / (self.y.to - self.y.from).max(1e-12)).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
    }

    /// The chart around its contents. The attributes say how places become values again, for the cursor.
    fn wrap(&self, scene: &Scene<'_>, unit: &str, name: &str, inside: &str) -> String {
        let (name, unit, span, Ticks { from, to, .. }) = (escape(name), escape(unit), self.span, &self.y);
        let mut svg = format!(
            "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{name}\" \
             data-span=\"{span}\" data-y=\"{from} {to}\">"
        );
        for (from, to, what) in &scene.bands {
            let (x, width) = (self.x(*from), (self.x(*to) - self.x(*from)).max(0.5));
            let _ = write!(
                svg,
                "<rect class=\"band\" x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{:.1}\">\
                 <title>{what}</title></rect>",
                HEIGHT - BOTTOM - TOP
            );
        }
        svg += &self.axes(&unit);
        svg += inside;
        scene.marks.iter().take(MARKS).for_each(|m| svg += &self.mark(m));
        svg + "<path class=\"cursor\" d=\"\"/></svg>"
    }

    /// Lines and labels of both axes.
    fn axes(&self, unit: &str) -> String {
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        let mut svg = String::new();
        for v in self.y.values() {
            let (y, label, x) = (self.y(v), self.y.label(v), LEFT - 7.0);
            let _ = write!(
                svg,
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
                y + 5.0
            );
        }
        let time = Ticks::around(0.0, self.span, 5.0);
        for t in time.values().filter(|t| *t <= self.span) {
            let (x, y, label) = (self.x(t), bottom + 21.0, time.label(t));
            let _ = write!(
                svg,
                "<path class=\"tick\" d=\"M{x:.1} {bottom}v5\"/>\
                 <text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{label}</text>"
            );
        }
        let (middle, below) = ((LEFT + right) / 2.0, HEIGHT - 8.0);
        let _ = write!(
            svg,
            "<text class=\"unit\" x=\"4\" y=\"16\">{unit}</text>\
             <text class=\"unit\" x=\"{middle}\" y=\"{below}\" text-anchor=\"middle\">seconds</text>\
             <path class=\"axis\" d=\"M{LEFT} {bottom}H{right}\"/>"
        );
        svg
    }

    fn mark(&self, mark: &Mark) -> String {
        let (x, class, bottom) = (self.x(mark.at), class(mark.kind), HEIGHT - BOTTOM);
        // A flag for a switch, a triangle for an eviction: they differ without their colours.
        let head = match mark.kind {
            Kind::Switch => format!("M{x:.1} {TOP}v-12h10l-3 4 3 4h-10"),
            Kind::Evict => format!("M{:.1} {}h12l-6 11z", x - 6.0, TOP - 12.0),
        };
        format!(
            "<g class=\"{class}\"><path class=\"line\" d=\"M{x:.1} {TOP}V{bottom}\"/>\
             <path class=\"head\" d=\"{head}\"/><title>{:.2} s: {}</title></g>",
            mark.at,
            escape(&mark.text)
        )
    }
}

/// The CSS class of a kind of marks.
pub fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Switch => "switch",
        Kind::Evict => "evict",
    }
}

/// Lines, with their legend. Empty where there is nothing to show.
pub fn lines(scene: &Scene<'_>, (title, unit): (&str, &str), floor: Floor, series: &[Series]) -> String {
    let values = || series.iter().flat_map(|s| &s.points).map(|p| p.1).filter(|v| v.is_finite());
    let (Some(least), Some(most)) = (values().min_by(f64::total_cmp), values().max_by(f64::total_cmp)) else {
        return String::new();
    };
    let (from, most) = match floor {
        Floor::Zero => (least.min(0.0), most.max(0.0)),
        Floor::Data => (least, most),
    };
    let to = if most > from { most } else { from + 1.0 };
    let frame = Frame { span: scene.span, y: Ticks::around(from, to, 4.0) };
    let mut inside = String::new();
    for (i, s) in series.iter().enumerate() {
        let mut points = String::new();
        let thin = thinned(&s.points, scene.span);
        // A line of one point is drawn as a dot only if it has two.
        let again = thin.first().filter(|_| thin.len() == 1);
        for (t, v) in thin.iter().chain(again) {
            let _ = write!(points, "{:.1},{:.1} ", frame.x(*t), frame.y(*v));
        }
        let _ = write!(inside, "<polyline class=\"s{}\" points=\"{}\"/>", i % 8, points.trim_end());
    }
    let names: Vec<&str> = series.iter().map(|s| s.name.as_str()).collect();
    figure(title, &names, &frame.wrap(scene, unit, title, &inside))
}

/// The mean of what lies too near together to be seen apart.
fn thinned(points: &[(f64, f64)], span: f64) -> Vec<(f64, f64)> {
    let mut found: Vec<(usize, f64, f64, f64)> = Vec::new();
    for (t, v) in points.iter().filter(|(t, v)| t.is_finite() && v.is_finite()) {
        let at = (t / span * POINTS as f64).clamp(0.0, POINTS as f64) as usize;
        match found.last_mut() {
            Some((last, sum_t, sum_v, n)) if *last == at => {
                (*sum_t, *sum_v, *n) = (*sum_t + t, *sum_v + v, *n + 1.0);
            }
            _ => found.push((at, *t, *v, 1.0)),
        }
    }
    found.into_iter().map(|(_, t, v, n)| (t / n, v / n)).collect()
}

/// Stacked columns, with their legend.
pub fn columns(scene: &Scene<'_>, (title, unit): (&str, &str), names: &[&str], all: &[Column]) -> String {
    let most = all.iter().map(|c| c.parts.iter().sum::<f64>()).max_by(f64::total_cmp);
    let Some(most) = most.filter(|m| *m > 0.0 && m.is_finite()) else { return String::new() };
    let frame = Frame { span: scene.span, y: Ticks::around(0.0, most, 4.0) };
    let mut inside = String::new();
    for c in all {
        let (x, end) = (frame.x(c.from), frame.x(c.to));
        let (mut sum, width) = (0.0, (end - x - 0.6).max(0.4));
        let _ = write!(inside, "<g>");
        for (i, part) in c.parts.iter().enumerate().filter(|(_, p)| **p > 0.0) {
            let (low, high) = (frame.y(sum), frame.y(sum + part));
            let class = i % 12;
            let _ = write!(
                inside,
                "<rect class=\"f{class}\" x=\"{x:.1}\" y=\"{high:.1}\" width=\"{width:.1}\" height=\"{:.1}\"/>",
                low - high
            );
            sum += part;
        }
        let parts = names.iter().zip(&c.parts).map(|(n, p)| format!("{n} {p:.2}"));
        let told = format!("{:.2} s: {sum:.2} {unit}\n{}", c.from, parts.collect::<Vec<_>>().join("\n"));
        let _ = write!(inside, "<title>{}</title></g>", escape(&told));
    }
    figure(title, names, &frame.wrap(scene, unit, title, &inside)).replace("<ul>", "<ul class=\"fills\">")
}

/// A chart under its title and legend.
fn figure(title: &str, names: &[&str], svg: &str) -> String {
    let entry =
        |(i, name): (usize, &&str)| format!("<li><i class=\"k{}\"></i>{} <b></b></li>", i % 12, escape(name));
    let legend: String = names.iter().enumerate().map(entry).collect();
    format!("<figure><figcaption>{}</figcaption><ul>{legend}</ul>{svg}</figure>\n", escape(title))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scene(marks: &[Mark]) -> Scene<'_> {
        Scene { span: 10.0, bands: vec![(0.0, 2.0, "loading")], marks }
    }

    #[test]
    fn text_is_escaped() {
        assert_eq!(escape("<a href='x'>&\"\u{1b}\0é"), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;é");
    }

    #[test]
    fn ticks_are_round() {
        let labels = |from, to| {
            let t = Ticks::around(from, to, 4.0);
            t.values().map(|v| t.label(v)).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(labels(0.0, 19.3), "0 5 10 15 20");
        assert_eq!(labels(0.0, 0.9), "0.00 0.25 0.50 0.75 1.00");
        assert_eq!(labels(33.0, 62.0), "30 40 50 60 70");
        assert_eq!(labels(0.0, 3480.0), "0 1000 2000 3000 4000");
        assert_eq!(labels(0.0, 1e-6), labels(0.0, 1e-6));
        assert!(labels(-5.0, 5.0).starts_with("-5"));
        for (from, to) in [(0.0, 0.0), (5.0, 5.0), (0.0, 1e300), (-1e12, 1e12)] {
            assert!(Ticks::around(from, to, 4.0).values().count() <= 21);
        }
    }

    #[test]
    fn everything_stays_in_the_chart() {
        let marks = [Mark { at: 99.0, kind: Kind::Evict, text: "<x>".into() }];
        let series = [
            Series { name: "a<b".into(), points: vec![(-5.0, 1.0), (5.0, f64::NAN), (50.0, 7.0)] },
            Series { name: "none".into(), points: Vec::new() },
        ];
        let svg = lines(&scene(&marks), ("t", "u"), Floor::Zero, &series);
        assert!(svg.contains("a&lt;b") && svg.contains("&lt;x&gt;") && !svg.contains("NaN"), "{svg}");
        let points = svg.split("points=\"").nth(1).and_then(|s| s.split('"').next()).unwrap();
        let places: Vec<f64> = points.split([' ', ',']).map(|n| n.parse().unwrap()).collect();
        assert_eq!(places.len(), 4);
        assert!(
            places.chunks(2).all(|p| p[0] >= LEFT && p[0] <= WIDTH - RIGHT && p[1] >= TOP && p[1] <= HEIGHT)
        );
    }

    #[test]
    fn nothing_to_show_is_no_chart() {
        let empty = Series { name: "x".into(), points: vec![(1.0, f64::NAN)] };
        assert_eq!(lines(&scene(&[]), ("t", "u"), Floor::Data, &[empty]), "");
        assert_eq!(columns(&scene(&[]), ("t", "u"), &["a"], &[]), "");
        let flat = Series { name: "x".into(), points: vec![(1.0, 40.0)] };
        assert!(lines(&scene(&[]), ("t", "u"), Floor::Data, &[flat]).contains("<polyline"));
    }

    #[test]
    fn columns_are_stacked() {
        let column = Column { from: 1.0, to: 2.0, parts: vec![1.0, 0.0, 3.0] };
        let svg = columns(&scene(&[]), ("t", "ms"), &["a", "b", "c"], &[column]);
        assert_eq!((svg.matches("<rect class=\"f").count(), svg.matches("<li>").count()), (2, 3));
        assert!(svg.contains("1.00 s: 4.00 ms\na 1.00\nb 0.00\nc 3.00"), "{svg}");
    }

    #[test]
    fn long_lines_are_thinned() {
        let points: Vec<(f64, f64)> =
            (0..10_000).map(|i| (f64::from(i) / 1000.0, f64::from(i % 2))).collect();
        let thin = thinned(&points, 10.0);
        assert!(thin.len() <= POINTS + 1 && thin.iter().all(|p| (p.1 - 0.5).abs() < 0.1));
    }
}
