// Draws a page with a stand-in for the browser's document, and checks what it then shows.
// node page.test.js PAGE phone|nothing
"use strict";
const assert = require("node:assert");
const page = require("node:fs").readFileSync(process.argv[2], "utf8");
const scripts = [...page.matchAll(/<script[^>]*>(.*?)<\/script>/gs)].map(match => match[1]);

class Element {
  constructor(tag) { Object.assign(this, { tag, attributes: {}, children: [], parent: null }); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) {
    for (const child of children) {
      if (child instanceof Element) child.parent = this;
      this.children.push(child instanceof Element ? child : String(child));
    }
  }
  remove() { this.parent.children = this.parent.children.filter(child => child !== this); }
  addEventListener(kind, listener) { this.listener = listener; }
  getBoundingClientRect() { return { left: 0, width: 372 }; }
  get firstElementChild() { return this.children.find(child => child instanceof Element); }
  get textContent() { return this.children.map(child => child.textContent ?? child).join(""); }
  set textContent(text) { this.children = [text]; }
  all(tag) { return this.children.flatMap(c => c instanceof Element ? [...(c.tag === tag ? [c] : []), ...c.all(tag)] : []); }
  querySelector(tag) { return this.all(tag)[0]; }
  querySelectorAll(tag) { return this.all(tag); }
  get clientWidth() { return 1480; }
}

// The elements of the template, read as far as this template goes.
const root = new Element("document"), ids = {};
let open = root;
const body = page.slice(page.indexOf("<body>"), page.indexOf("<script"));
for (const [, end, tag, attributes, text] of body.matchAll(/<(\/?)(\w+)([^>]*)>([^<]*)/g)) {
  if (end) {
    assert.equal(open.tag, tag, "an element is closed that is not open");
    open = open.parent;
  } else {
    const element = new Element(tag);
    open.append(element);
    open = element;
    const id = attributes.match(/id="(\w+)"/)?.[1];
    if (id) ids[id] = element;
  }
  if (text.trim()) open.append(text);
}
assert.equal(open.tag, "body");
ids.profile = new Element("script");
ids.profile.append(scripts[0]);
const document = {
  getElementById: id => ids[id],
  querySelector: tag => root.querySelector(tag),
  createElement: tag => new Element(tag),
  createElementNS: (_, tag) => new Element(tag),
};
const code = `${scripts[1]}; return { P, ticks, thinned, ranges };`;
const inside = new Function("document", "addEventListener", code)(document, () => {});

const text = root.textContent, figures = root.all("figure").filter(f => f.all("svg").length);
const classes = name => root.all("g").filter(g => g.attributes.class === name).length;
assert(!/NaN|Infinity|undefined|null/.test(text), text);
for (const name of ["points", "d", "x", "y", "width", "height"])
  for (const tag of ["polyline", "path", "rect", "text"])
    for (const element of root.all(tag))
      assert(!/NaN|Infinity|undefined/.test(element.attributes[name] ?? ""), `${tag} ${name}`);

if (process.argv[3] === "phone") {
  assert.equal(figures.length, 7);
  assert.equal(classes("switch"), 7);
  assert.equal(classes("evict"), 7);
  for (const part of ["switch of backends (1)", "eviction (1)", "cpu 4-7", "moderate", "2026-11-21 17:00 UTC",
    "R58M <1>", "cpu-1-0 <b>&\"'</script>", "to <i>opencl</i>", "first fifth 19.6, last 12.5 (-36 %)",
    "40 tokens in 1000 ms", "position", "ended after 23.5 of 30 s: the context is full", "Hottest", "loading until 1.50 s", "120 samples, 200 ms", "loading and prompt"])
    assert(text.includes(part), `${part} is not in ${text.slice(0, 700)}`);
  // Seven charts are rows of four and three, and the position in the cache grows along the axis of the first.
  assert.deepEqual(figures.map(f => f.attributes.style.match(/[\d.]+(?=%)/)[0]), [..."2222333"].map(n => n === "2" ? "25.0" : "33.3"));
  // However wide a chart is drawn, its labels are smaller than its title.
  const scales = figures.map(f => Number(f.attributes.style.match(/--scale:([\d.]+)/)[1]) * 372 + 14);
  assert.deepEqual(scales.map(Math.round), [...Array(4).fill((1480 - 3 * 8) / 4), ...Array(3).fill((1480 - 2 * 8) / 3)]);
  const size = selector => Number(page.match(`\n${selector}\\{[^}]*font-size:\\D*(\\d+)px`)[1]);
  assert(size("svg text") < size("figcaption"));
  const positions = figures[0].all("text").filter(t => t.attributes.y === "224" && /^\d+$/.test(t.textContent));
  const grown = positions.map(t => Number(t.textContent));
  assert(grown.length > 2 && grown[0] > 40 && grown.every((p, i) => i === 0 || p > grown[i - 1]), grown);
  // Everything stays in its chart.
  for (const line of root.all("polyline")) {
    const places = line.attributes.points.split(" ").filter(Boolean).map(p => p.split(",").map(Number));
    assert(places.length <= 241);
    assert(places.every(([x, y]) => x >= 56 && x <= 362 && y >= 32 && y <= 182), line.attributes.points);
  }
  // Columns are stacked: each part begins where the one below it ends, and they fill what their sum says.
  const columns = figures[3].all("g").filter(g => g.attributes.class === undefined);
  assert(columns.length > 30 && columns.length <= 40, columns.length);
  for (const column of columns) {
    const parts = column.all("rect").map(r => r.attributes);
    assert.equal(parts.length, 8);
    for (let i = 1; i < parts.length; i++)
      assert(Math.abs(Number(parts[i].y) + Number(parts[i].height) - Number(parts[i - 1].y)) < 0.11);
  }
  assert.match(columns[0].textContent, /^2\.50 s: \d\d\.\d\d ms\/token\nembed 0\.\d\d\n/);
  // The cursor tells the values at a moment.
  const drawing = figures[0].all("svg")[0];
  drawing.listener({ currentTarget: drawing, clientX: 362 });
  assert.match(figures[0].all("b")[0].textContent, /^12\.\d$/);
  assert.equal(figures[2].all("b").length, 2);
} else {
  assert.equal(figures.length, 0);
  assert.equal(root.all("figure").length, 0);
  for (const part of ["No temperature could be read on the device.", "no token was decoded", "no prompt", "m on d"])
    assert(text.includes(part), `${part} is not in ${text.slice(0, 700)}`);
  for (const part of ["Hottest", "Throttling", "ended"]) assert(!text.includes(part), part);
}

const labels = (from, to) => {
  const t = inside.ticks(from, to, 4);
  return t.values.map(t.label).join(" ");
};
assert.equal(labels(0, 19.3), "0 5 10 15 20");
assert.equal(labels(0, 0.9), "0.00 0.25 0.50 0.75 1.00");
assert.equal(labels(33, 62), "30 40 50 60 70");
assert.equal(labels(0, 3480), "0 1000 2000 3000 4000");
assert(labels(-5, 5).startsWith("-5"));
for (const [from, to] of [[0, 0], [5, 5], [0, 1e300], [-1e12, 1e12]])
  assert(inside.ticks(from, to, 4).values.length <= 21);
const long = Array.from({ length: 10000 }, (_, i) => [i / 10000 * inside.P.seconds, i % 2]);
assert(inside.thinned(long).length <= 241 && inside.thinned(long).every(p => Math.abs(p[1] - 0.5) < 0.1));
assert.equal(inside.ranges([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
