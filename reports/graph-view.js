"use strict";
/* Draws the graph of one module at a time; opening a module shows what is inside it. */
function GraphView(table, shape, show, changed) {
  const { SIZE } = ModuleGraph;
  const [LEAST, MOST, STEP, READABLE] = [0.15, 3, 1.25, 0.75];
  const box = document.getElementById("graph-box");
  const trail = document.getElementById("graph-trail");
  const choice = document.getElementById("measure");
  const find = document.getElementById("graph-find");
  let path = [ModuleGraph.descend(shape.root)];
  let zoom = 1;

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
    if (!item.child) return m.column === "plan" && table.dtypes(item.op) ? [table.dtypes(item.op).computes, table.shape(item.op)].filter(Boolean).join(" · ") : Measures.text(table, m, value);
    const size = `${item.ops.length.toLocaleString("en")} ops · `;
    if (m.kind !== "name") return size + Measures.text(table, m, value);
    const parts = Measures.parts(table, m, item.ops);
    const told = parts.length > 1 ? parts.map(([name, n]) => `${name} ${n.toLocaleString("en")}`).join(" · ") : Measures.text(table, m, value);
    return (size + told).length > 29 ? told : size + told;
  }

  /* How a module divides, as a strip below its name. */
  function strip(item, m) {
    const parts = item.child && m.kind === "name" ? Measures.parts(table, m, item.ops) : [];
    if (parts.length < 2) return [];
    const all = parts.reduce((sum, [, n]) => sum + n, 0);
    let x = 1;
    return parts.map(([name, n]) => {
      const width = ((SIZE.width - 2) * n) / all;
      const part = make("rect", { class: `part ${Measures.named(name)}`, x: x.toFixed(1), y: SIZE.height - 6, width: width.toFixed(1), height: 5 });
      x += width;
      return part;
    });
  }

  function tell(text) { document.getElementById("graph-note").textContent = text; }

  /* All that is known in a line or two, for whoever points at it. */
  function about(item) {
    if (item.child) return `${item.child.path} ${table.classOf(item.child)}`.trim();
    const told = table.dtypes(item.op);
    const why = table.why(item.op);
    const runs = told ? `reads ${told.reads || "no tensor"}, computes in ${told.computes}, returns ${told.gives}${why ? `: ${why}` : ""}` : "";
    return [`${table.owner(item.op) || "the model's forward"} ${table.op(item.op)}`, table.type(item.op), runs].filter(Boolean).join("\n");
  }

  function endElement(item, k, at) {
    const words = [make("text", { x: SIZE.width / 2, y: item.under ? 18 : 26, class: "name" }, clip(item.label, 25))];
    if (item.under) words.push(make("text", { x: SIZE.width / 2, y: 34, class: "under" }, clip(item.under, 30)));
    return make("g", { class: "end", transform: `translate(${at.x[k].toFixed(1)} ${at.y[k].toFixed(1)})` },
      make("rect", { width: SIZE.width, height: SIZE.height, rx: SIZE.height / 2 }), ...words,
      make("title", {}, `${item.end === "in" ? "input" : "output"}: ${item.label} ${item.under}`.trim()));
  }

  function nodeElement(item, k, at, m, top) {
    const value = Measures.all(table, m, item.ops);
    const colour = Measures.colour(table, m, value, top);
    const name = title(item);
    const own = item.child ? table.classOf(item.child) : "";
    const shown = clip(name, item.child ? 21 : 24);
    const group = make("g", {
      class: `node ${item.child ? "module" : "op"} ${value === null ? "unknown" : colour.class || ""}`.trim(), tabindex: "0", role: "button",
      transform: `translate(${at.x[k].toFixed(1)} ${at.y[k].toFixed(1)})`,
      "aria-label": `${name}${own ? `, ${own}` : ""}: ${m.label} ${Measures.text(table, m, value)}; ${item.child ? "open" : "show in the table"}`,
      ...(colour.t === undefined ? {} : { style: `--t:${colour.t.toFixed(3)}` }),
    },
    make("rect", { width: SIZE.width, height: SIZE.height, rx: 7 }), ...strip(item, m),
    make("text", { x: 11, y: 17, class: "name" }, shown),
    make("text", { x: 11, y: 32, class: "under" }, clip(under(item, m, value), 31)));
    if (item.child) {
      const room = 23 - shown.length;
      if (own && room > 4) group.append(make("text", { x: SIZE.width - 22, y: 17, class: "class" }, clip(own, room)));
      group.append(make("text", { x: SIZE.width - 16, y: 17, class: "open" }, "▸"));
    }
    group.append(make("title", {}, about(item)));
    group.holds = item.ops;
    for (const noticed of ["mouseenter", "focus"]) group.addEventListener(noticed, () => tell(about(item).replaceAll("\n", " · ")));
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
      const all = table.data.name.map((_, i) => i);
      const names = m.kind === "verdict" ? table.data.verdicts : [...Measures.parts(table, m, all).map(([name]) => name), "mixed"];
      holder.replaceChildren(...names.map((name) => {
        const chip = document.createElement("span");
        chip.className = `chip ${m.kind === "verdict" ? name : Measures.named(name)}`;
        chip.textContent = name;
        return chip;
      }));
      return;
    }
    const bar = document.createElement("span");
    bar.className = "ramp";
    bar.setAttribute("aria-hidden", "true");
    const [low, high] = m.kind === "effect" ? ["1/10,000 of the error budget", "the error budget or more"] : ["small", "the largest value of any operation"];
    holder.replaceChildren(low, bar, high);
  }

  function crumbs() {
    trail.replaceChildren(...path.map((node, k) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      button.type = "button";
      button.className = "quiet";
      button.textContent = `${node.path || "the model"} ${table.classOf(node)}`.trim();
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
    const drawing = make("svg", { width: at.width, height: at.height, viewBox: `0 0 ${at.width} ${at.height}`, role: "group", "aria-label": `Contents of ${path[path.length - 1].path || "the model"}` },
      ...at.edges.map((edge) => edgeElement(edge, at)),
      ...at.shown.map((item, k) => (item.end ? endElement(item, k, at) : nodeElement(item, k, at, m, top))));
    box.replaceChildren(drawing);
    size();
    box.scrollLeft = (drawing.clientWidth - box.clientWidth) / 2;
    tell(at.left ? `${at.left.toLocaleString("en")} more boxes are not drawn: see the layer table.` : "");
    legend(m);
    crumbs();
    search();
  }

  /* Outlines what is, or holds, an operation whose module, name or line has the text in it. */
  function search() {
    const wanted = find.value.trim().toLowerCase();
    const known = (i) => [table.owner(i), table.data.name[i], table.op(i), table.source(i)].join(" ").toLowerCase().includes(wanted);
    const hits = new Set(wanted ? table.data.name.map((_, i) => i).filter(known) : []);
    for (const node of box.querySelectorAll(".node")) node.classList.toggle("hit", node.holds.some((i) => hits.has(i)));
    if (wanted) tell(`${hits.size.toLocaleString("en")} matching operations: the boxes that contain them are outlined.`);
  }

  function size() {
    const drawing = box.firstElementChild;
    const { width, height } = drawing.viewBox.baseVal;
    drawing.style.width = `${width * zoom}px`;
    drawing.style.height = `${height * zoom}px`;
    document.getElementById("graph-zoom").textContent = `${Math.round(100 * zoom)}%`;
  }

  /* Another scale, with what lies at a point of the box staying where it is; its middle unless told. */
  function scale(to, x = box.clientWidth / 2, y = box.clientHeight / 2) {
    const before = zoom;
    zoom = Math.max(LEAST, Math.min(MOST, to));
    const [left, above] = [box.scrollLeft + x, box.scrollTop + y].map((at) => (at * zoom) / before);
    size();
    box.scrollLeft = left - x;
    box.scrollTop = above - y;
  }

  /* All of it in the box, and no larger than it is. */
  function fit() {
    const { width, height } = box.firstElementChild.viewBox.baseVal;
    const room = getComputedStyle(box);
    const wide = box.clientWidth - parseFloat(room.paddingLeft) - parseFloat(room.paddingRight);
    const around = ["paddingTop", "paddingBottom", "borderTopWidth", "borderBottomWidth"];
    const high = around.reduce((left, edge) => left - parseFloat(room[edge]), parseFloat(room.maxHeight));
    scale(Math.min(1, wide / width, high / height));
  }

  function open(to) {
    path = to;
    draw();
    box.scrollTop = 0;
    const first = box.querySelector(".node");
    if (first && document.activeElement !== document.body) first.focus({ preventScroll: true });
  }

  /* Zooming: buttons, keys, the wheel with Ctrl (which is what pinching a trackpad sends), two fingers; a mouse drags. */
  const steps = { "+": () => scale(zoom * STEP), "=": () => scale(zoom * STEP), "-": () => scale(zoom / STEP), 0: () => scale(1), f: fit };
  for (const [id, key] of [["zoom-in", "+"], ["zoom-out", "-"], ["zoom-fit", "f"], ["graph-zoom", "0"]]) {
    document.getElementById(id).addEventListener("click", steps[key]);
  }
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const frame = box.getBoundingClientRect();
    scale(zoom * Math.exp(-Math.max(-50, Math.min(50, event.deltaY)) / 150), event.clientX - frame.left, event.clientY - frame.top);
  }, { passive: false });

  const fingers = new Map();
  let dragged = 0;
  const apart = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.x - b.x, a.y - b.y); };
  box.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button !== 0) return;
    fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    dragged = 0;
  });
  addEventListener("pointermove", (event) => {
    const from = fingers.get(event.pointerId);
    if (!from) return;
    const before = fingers.size === 2 ? apart() : 0;
    fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    if (fingers.size === 2) {
      const frame = box.getBoundingClientRect();
      const [a, b] = [...fingers.values()];
      if (before) scale((zoom * apart()) / before, (a.x + b.x) / 2 - frame.left, (a.y + b.y) / 2 - frame.top);
      return;
    }
    dragged += Math.abs(event.clientX - from.x) + Math.abs(event.clientY - from.y);
    if (event.pointerType !== "mouse" || dragged < 5) return;
    box.scrollLeft -= event.clientX - from.x;
    box.scrollTop -= event.clientY - from.y;
  });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, (event) => fingers.delete(event.pointerId));
  box.addEventListener("click", (event) => { if (dragged >= 5) event.stopPropagation(); dragged = 0; }, true);

  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if ((event.key === "Escape" || event.key === "Backspace") && path.length > 1) { event.preventDefault(); open(path.slice(0, -1)); }
    else if (event.key in steps) { event.preventDefault(); steps[event.key](); }
  });
  choice.replaceChildren(...table.data.measures.map((m) => {
    const option = document.createElement("option");
    option.textContent = m.label;
    return option;
  }));
  find.addEventListener("input", search);
  choice.addEventListener("change", () => { draw(); changed(measure()); });
  draw();
  if (box.firstElementChild.viewBox.baseVal.width > box.clientWidth) fit();
  if (zoom < READABLE) scale(READABLE);
  box.scrollTop = 0;
  return { measure };
}
