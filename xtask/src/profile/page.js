// A cursor through all charts: the values at a moment stand in the legends.
const charts = [...document.querySelectorAll("svg[data-span]")];
function point(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const x = Math.min(RIGHT, Math.max(LEFT, (event.clientX - box.left) * WIDTH / box.width));
  for (const svg of charts) {
    svg.querySelector(".cursor").setAttribute("d", `M${x} ${TOP}V${BOTTOM}`);
    const [from, to] = svg.dataset.y.split(" ").map(Number);
    const values = svg.parentNode.querySelectorAll("li b");
    svg.querySelectorAll("polyline").forEach((line, i) => {
      let best = null;
      for (const p of line.points) if (!best || Math.abs(p.x - x) < Math.abs(best.x - x)) best = p;
      if (!best || !values[i]) return;
      const v = from + (BOTTOM - best.y) / (BOTTOM - TOP) * (to - from);
      values[i].textContent = v.toFixed(Math.abs(v) < 10 ? 2 : Math.abs(v) < 100 ? 1 : 0);
    });
  }
}
for (const svg of charts) for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, point);
