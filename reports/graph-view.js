"use strict";
/* Draws the graph of one module at a time; opening a module shows what is inside it. */
function GraphView(table, shape, show, changed) {
  const { SIZE } = ModuleGraph;
  const box = document.getElementById("graph-box");
  const trail = document.getElementById("graph-trail");
  const choice = document.getElementById("measure");
  let path = [ModuleGraph.descend(shape.root)];

  const measure = () => table.data.measures[choice.selectedIndex];

  function make(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const short = (name) => name.replace(/^aten\./, "").replace(/\.default$/, "");
  const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  function title(item) {
    if (!item.child) return item.label ? `${item.label} ${short(table.op(item.op))}` : short(table.op(item.op));
    return item.child.times ? `${item.label} ×${item.child.times}` : item.label;
  }

  function under(item, m, value) {
    const size = item.child ? `${item.ops.length.toLocaleString("en")} ops · ` : "";
    return size + Measures.text(table, m, value);
  }

  function nodeElement(item, k, at, m, top) {
    const value = Measures.all(table, m, item.ops);
    const colour = Measures.colour(table, m, value, top);
    const name = title(item);
    const group = make("g", {
      class: `node ${item.child ? "module" : "op"} ${colour.class || ""}`.trim(), tabindex: "0", role: "button",
      transform: `translate(${at.x[k].toFixed(1)} ${at.y[k].toFixed(1)})`,
      "aria-label": `${name}: ${m.label} ${Measures.text(table, m, value)}; ${item.child ? "open" : "show in the table"}`,
      ...(colour.t === undefined ? {} : { style: `--t:${colour.t.toFixed(3)}` }),
    },
    make("rect", { width: SIZE.width, height: SIZE.height, rx: 7 }),
    make("text", { x: 11, y: 18, class: "name" }, clip(name, item.child ? 21 : 23)),
    make("text", { x: 11, y: 34, class: "under" }, clip(under(item, m, value), 30)));
    if (item.child) group.append(make("text", { x: SIZE.width - 18, y: 26, class: "open" }, "▸"));
    group.append(make("title", {}, `${item.child ? item.child.path : `${table.owner(item.op) || "(whole model)"} ${table.op(item.op)}`}`));
    const act = () => (item.child ? open([...path, ModuleGraph.descend(item.child)]) : show(item.op));
    group.addEventListener("click", act);
    group.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act();
    });
    return group;
  }

  function edgeElement([from, to, n], at) {
    const middle = SIZE.width / 2;
    const [x0, y0, x1, y1] = [at.x[from] + middle, at.y[from] + SIZE.height, at.x[to] + middle, at.y[to]];
    const bend = Math.max(18, Math.abs(y1 - y0) / 2.2);
    const aside = y1 - y0 > SIZE.down + 2 && Math.abs(x0 - x1) < 4 ? middle + 12 : 0; /* around what stands between */
    const d = `M${x0} ${y0}C${x0 + aside * 1.4} ${y0 + bend} ${x1 + aside * 1.4} ${y1 - bend} ${x1} ${y1}`;
    return make("path", { class: "edge", d, "stroke-width": Math.min(3.5, 1 + Math.log2(n) / 2).toFixed(1) });
  }

  function legend(m) {
    const holder = document.getElementById("graph-legend");
    if (m.kind === "verdict" || m.kind === "name") {
      const names = m.kind === "verdict" ? table.data.verdicts : ["FP32", ...table.data.formats.map((f) => f.label), "mixed"];
      holder.replaceChildren(...names.map((name) => {
        const chip = document.createElement("span");
        chip.className = `chip ${m.kind === "verdict" ? name : `is-${name.toLowerCase()}`}`;
        chip.textContent = name;
        return chip;
      }));
      return;
    }
    const bar = document.createElement("span");
    bar.className = "ramp";
    bar.setAttribute("aria-hidden", "true");
    const [low, high] = m.kind === "effect" ? ["a ten-thousandth of the budget", "the budget and beyond"] : ["little", "the most of any operation"];
    holder.replaceChildren(low, bar, high);
  }

  function crumbs() {
    trail.replaceChildren(...path.map((node, k) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = node.path || "(whole model)";
      if (k === path.length - 1) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => open(path.slice(0, k + 1)));
      item.append(button);
      return item;
    }));
  }

  function draw() {
    const m = measure();
    const at = ModuleGraph.layout(table, path[path.length - 1]);
    const values = table.data.name.map((_, i) => Measures.op(table, m, i)).filter((v) => typeof v === "number" && Number.isFinite(v));
    const top = m.kind === "total" ? Math.max(1, ...at.shown.map((item) => Measures.all(table, m, item.ops) ?? 0)) : values.reduce((a, b) => Math.max(a, b), 0);
    const drawing = make("svg", { width: at.width, height: at.height, viewBox: `0 0 ${at.width} ${at.height}`, role: "group", "aria-label": `What is inside ${path[path.length - 1].path || "the model"}` },
      ...at.edges.map((edge) => edgeElement(edge, at)),
      ...at.shown.map((item, k) => nodeElement(item, k, at, m, top)));
    box.replaceChildren(drawing);
    box.scrollLeft = (at.width - box.clientWidth) / 2;
    document.getElementById("graph-note").textContent = at.left ? `${at.left.toLocaleString("en")} more are in the table.` : "";
    legend(m);
    crumbs();
  }

  function open(to) {
    path = to;
    draw();
    box.scrollTop = 0;
    const first = box.querySelector(".node");
    if (first && document.activeElement !== document.body) first.focus({ preventScroll: true });
  }

  box.addEventListener("keydown", (event) => {
    if ((event.key === "Escape" || event.key === "Backspace") && path.length > 1) { event.preventDefault(); open(path.slice(0, -1)); }
  });
  choice.replaceChildren(...table.data.measures.map((m) => {
    const option = document.createElement("option");
    option.textContent = m.label;
    return option;
  }));
  choice.addEventListener("change", () => { draw(); changed(measure()); });
  draw();
  return { measure };
}
