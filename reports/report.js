"use strict";
(() => {
  const ROW = 31;
  const OPENED = 16;
  const GLYPHS = ["●", "▲", "■", "○"];
  const $ = (id) => document.getElementById(id);

  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  function svg(tag, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  const ratio = Measures.ratio;

  /* Keys that work anywhere: not while somebody writes, and not over the list of them. */
  const help = $("keys");
  const plainly = (event) => !(event.ctrlKey || event.metaKey || event.altKey || help.open || /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName));
  const showKeys = () => help.showModal();
  $("help").hidden = false;
  $("help").addEventListener("click", showKeys);
  addEventListener("keydown", (event) => {
    const act = { "?": showKeys, t: () => $("theme").click() }[event.key];
    if (!act || !plainly(event)) return;
    event.preventDefault();
    act();
  });

  function save(name, type, text) {
    const link = make("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  /* The layer table. */
  const holder = $("layer-table");
  if (!holder) return;

  /* Built right after the first paint: the verdict need not wait for thousands of rows. A link to a row cannot wait. */
  let built = false;
  function start() {
    if (!built) build();
    built = true;
  }
  addEventListener("beforeprint", start);
  if (location.hash) start();
  else requestAnimationFrame(() => setTimeout(start));

  function build() {
    const data = JSON.parse($("layer-data").textContent);
    const table = LayerTable.read(data);
    const shape = LayerTable.tree(table);
    const view = { filter: "", hideSafe: false, sort: null };
    const scroller = $("scroller");
    const body = $("rows");
    let list = { rows: [], flat: false, ops: 0 };
    let active = -1;
    holder.hidden = false;
    table.measure = data.measures.find((m) => m.column === "max");

    const columns = [
      { key: "layer", kind: "layer", title: "Module / operation" },
      ...data.formats.map((f) => ({ key: f.key, kind: "format", title: f.label })),
      { key: "measure", kind: "extra max", title: "Max |x|" },
      { key: "plan", kind: "ran", title: "Runs in" },
      { key: "rules", kind: "extra max", title: "Rules" },
    ];

    function heads() {
      $("head").replaceChildren(...columns.map((column) => {
        const sorted = view.sort && view.sort.column === column.key ? (view.sort.down ? "descending" : "ascending") : "none";
        const mark = { ascending: " ↑", descending: " ↓", none: "" }[sorted];
        const button = make("button", { type: "button", title: `Sort by ${column.title}` }, column.title + mark);
        button.addEventListener("click", () => {
          const first = column.key !== "layer" && column.key !== "plan";
          if (sorted === "none") view.sort = { column: column.key, down: first };
          else if (view.sort.down === first) view.sort = { column: column.key, down: !first };
          else view.sort = null;
          heads();
          refresh();
        });
        return make("th", { scope: "col", class: column.kind, "aria-sort": sorted }, button);
      }));
    }

    const either = (full, brief) => [make("span", { class: "in-full" }, full), make("span", { class: "in-brief" }, brief)];

    function verdictCell(code, effect, said) {
      const name = data.verdicts[code];
      const share = effect === null ? 0 : Math.max(0, Math.min(1, 1 + Math.log10(effect / data.budget) / 4));
      const bar = make("i", { class: name, style: `width:${Math.round(100 * (Number.isFinite(effect) ? share : 1))}%` });
      const glyph = make("span", { class: `v ${name}`, "aria-hidden": "true" }, GLYPHS[code]);
      return make("td", { title: `${name}; moves output ${ratio(effect)}` }, glyph,
        make("span", { class: "meter", "aria-hidden": "true" }, bar), make("span", { class: "sr" }, `${name} `), ...(said.length ? said : ratio(effect) === "non-finite" ? either("non-finite", "Inf/NaN") : [ratio(effect)]));
    }

    const ops = (n) => `${n.toLocaleString("en")} ${n === 1 ? "op" : "ops"}`;

    const short = (op) => op.replace(/^aten\./, "").replace(/\.default$/, "");

    function layerCell(row) {
      const indent = `--depth:${row.depth}`;
      if (row.module) {
        const times = row.module.times ? ` ×${row.module.times} ·` : "";
        const count = make("span", { class: "muted" }, `${times} ${ops(row.module.total.count)}`);
        return make("td", { style: indent, title: row.module.path },
          make("span", { class: "twist", "aria-hidden": "true" }, row.module.open ? "▾" : "▸"), row.module.label, count);
      }
      const op = short(table.op(row.op));
      const owner = table.owner(row.op);
      const twist = list.flat ? null : make("span", { class: "twist" });
      const name = list.flat ? owner || "the model's forward" : row.name;
      if (!name) return make("td", { style: indent, title: `${owner} ${op}` }, twist, op);
      return make("td", { style: indent, title: `${owner} ${op}` }, twist, make("b", {}, name), make("span", { class: "muted" }, `  ${op}`));
    }

    function rowElement(row, index) {
      const total = row.module && row.module.total;
      const cells = [layerCell(row)];
      for (const format of table.formats) {
        const cell = total ? total.formats[format] : { verdict: table.verdict(format, row.op), effect: table.effect(format, row.op) };
        const unsupported = !total && (data.cells[format].events[row.op] || [])[3];
        cells.push(verdictCell(cell.verdict, cell.effect, unsupported ? either("not supported", "n/a") : []));
      }
      const plans = total ? [...total.plans] : [data.plan[row.op]];
      const rules = total ? (total.rules ? String(total.rules) : "") : table.rules(row.op).join(" ");
      const extra = (text) => cells.push(make("td", { class: "extra", title: text }, text));
      const m = table.measure;
      extra(Measures.text(table, m, total ? LayerTable.measured(table, row.module) : Measures.op(table, m, row.op)));
      const known = plans.map((at) => data.strings[at]).filter(Boolean).sort();
      cells.push(make("td", { class: "ran", title: row.module ? known.join(" and ") : [known[0], table.why(row.op)].filter(Boolean).join(": ") }, known.length > 1 ? "mixed" : known[0] || "–"));
      extra(rules);
      return make("tr", {
        id: `row-${index}`, class: [row.module ? "module" : "", index === active ? "active" : ""].join(" ").trim(),
        "aria-rowindex": index + 2, "aria-level": row.depth + 1, "aria-selected": index === active ? "true" : "false",
        "aria-expanded": row.module ? String(row.module.open) : null,
      }, ...cells);
    }

    function pad(height) {
      return make("tr", { "aria-hidden": "true" }, make("td", { class: "pad", style: `height:${height}px` }));
    }

    function draw() {
      const from = Math.max(0, Math.floor(scroller.scrollTop / ROW) - 8);
      const to = Math.min(list.rows.length, Math.ceil((scroller.scrollTop + Math.max(scroller.clientHeight, 640)) / ROW) + 8);
      const drawn = [];
      for (let i = from; i < to; i++) drawn.push(rowElement(list.rows[i], i));
      body.replaceChildren(pad(from * ROW), ...drawn, pad((list.rows.length - to) * ROW));
      if (active >= 0 && active < list.rows.length) scroller.setAttribute("aria-activedescendant", `row-${active}`);
      else scroller.removeAttribute("aria-activedescendant");
    }

    function refresh() {
      list = LayerTable.rows(table, shape, view);
      active = Math.min(active, list.rows.length - 1);
      body.parentElement.setAttribute("aria-rowcount", list.rows.length + 1);
      $("shown").textContent = list.ops === table.count
        ? `${table.count.toLocaleString("en")} operations`
        : `${list.ops.toLocaleString("en")} of ${table.count.toLocaleString("en")} operations`;
      draw();
    }

    function select(index) {
      if (!list.rows.length) return;
      active = Math.max(0, Math.min(index, list.rows.length - 1));
      const top = active * ROW;
      const room = scroller.clientHeight - 2 * ROW;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top > scroller.scrollTop + room) scroller.scrollTop = top - room;
      draw();
      if (!list.rows[active].module) detail(list.rows[active].op);
    }

    function toggle(index, open) {
      const row = list.rows[index];
      if (!row || !row.module || row.module.open === open) return;
      row.module.open = open;
      refresh();
    }

    const power = (exponent) => `2${[...String(exponent)].map((c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]).join("")}`;

    /* Everything known about one operation. */
    function bars(i) {
      const parsed = LayerTable.histogram(data.histogram[i]);
      if (!parsed) return null;
      const drawing = svg("svg", { viewBox: "0 0 300 70", role: "img", "aria-label": "Histogram of the values by power of two; counts are logarithmic" });
      const step = 300 / parsed.heights.length;
      parsed.heights.forEach((h, k) => {
        drawing.append(svg("rect", { class: "value", x: (k * step).toFixed(1), y: (52 - 50 * h).toFixed(1), width: Math.max(1, step - 1).toFixed(1), height: (50 * h).toFixed(1) }));
      });
      const last = parsed.first + parsed.heights.length - 1;
      drawing.append(svg("text", { class: "tick", x: 0, y: 67 }, power(parsed.first)), svg("text", { class: "tick", x: 300, y: 67, "text-anchor": "end" }, power(last)));
      return drawing;
    }

    function measured(i) {
      const rows = [["Verdict", (f) => data.verdicts[table.verdict(f, i)]]];
      const fields = { effect: "Moves output", own: "Own rounding", local: "Local error", propagated: "Accumulated error" };
      const said = (f, field) => (field === "effect" && data.cells[f].predicted[i] === "1" ? ", predicted" : "");
      for (const [field, title] of Object.entries(fields)) rows.push([title, (f) => ratio(data.cells[f][field][i]) + said(f, field)]);
      const event = (f, k) => (data.cells[f].events[i] || [0, 0, 0, 0])[k];
      rows.push(["Overflow", (f) => String(event(f, 0))], ["NaN", (f) => String(event(f, 1))]);
      rows.push(["Underflow to zero", (f) => `${Number((100 * (event(f, 2) || 0)).toPrecision(2))}%`]);
      const largest = LayerTable.number(data.max[i]);
      rows.push(["Headroom", (f) => {
        const format = data.formats.find((known) => known.key === f);
        return largest > 0 && Number.isFinite(largest) ? `${Math.log2(format.largest / largest).toFixed(1)} bits` : "–";
      }]);
      const head = make("tr", {}, make("th", { scope: "col" }, make("span", { class: "sr" }, "Measure")), ...data.formats.map((f) => make("th", { scope: "col" }, f.label)));
      return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows.map(([title, of]) =>
        make("tr", {}, make("th", { scope: "row" }, title), ...table.formats.map((f) => make("td", {}, of(f)))))));
    }

    function ran(i) {
      const told = table.dtypes(i);
      if (!told) return [];
      const list = [["Reads", told.reads || "no tensor"], ["Computes in", told.computes], ["Returns", told.gives]];
      const why = table.why(i);
      return [
        make("h4", {}, "Under the recommended plan"),
        make("dl", { class: "ran" }, ...list.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)])),
        why ? make("p", { class: "muted" }, `FP32: ${why}.`) : null,
      ];
    }

    function detail(i) {
      const reasons = data.formats.map((f) => {
        const cell = data.cells[f.key];
        const unsupported = data.strings[(cell.events[i] || [0, 0, 0, 0])[3]];
        const reason = [data.strings[cell.reason[i]], unsupported].filter(Boolean).join("; ");
        return reason ? make("p", {}, make("b", {}, `${f.label}: `), reason) : null;
      });
      const code = data.strings[data.code[i]];
      $("detail").replaceChildren(...[
        make("h3", {}, table.op(i)),
        make("p", {}, make("code", {}, table.owner(i) || "the model's forward"), ` ${table.type(i)}`),
        make("p", { class: "muted" }, [table.source(i), data.strings[data.shape[i]], `${data.flops[i].toLocaleString("en", { notation: "compact" })} FLOPs`].filter(Boolean).join(" · ")),
        code ? make("pre", { class: "source", tabindex: "0" }, make("code", {}, code)) : null,
        ...ran(i),
        ...reasons,
        measured(i),
        bars(i),
        table.rules(i).length ? make("p", {}, make("b", {}, "Rules: "), table.rules(i).join(", ")) : null,
      ].filter(Boolean));
      try { history.replaceState(null, "", `#op=${encodeURIComponent(data.name[i])}`); } catch { /* not allowed in a srcdoc frame */ }
    }

    function show(i) {
      $("filter").value = view.filter = "";
      $("hide-safe").checked = view.hideSafe = false;
      view.sort = null;
      LayerTable.reveal(table, shape, i);
      heads();
      refresh();
      $("layers").scrollIntoView();
      scroller.scrollTop = Math.max(0, (list.rows.findIndex((row) => row.op === i) - 4) * ROW);
      select(list.rows.findIndex((row) => row.op === i));
      scroller.focus({ preventScroll: true });
    }

    function follow() {
      if (!location.hash.startsWith("#op=")) return;
      let name = location.hash.slice(4);
      try { name = decodeURIComponent(name); } catch { /* taken literally */ }
      const i = data.name.indexOf(name);
      if (i >= 0) show(i);
    }

    function csv() {
      const quote = (value) => `"${String(value ?? "").replace(/"/g, '""').replace(/^([=+\-@\t\r])/, "'$1")}"`;
      const fields = ["effect", "own", "local", "propagated"];
      const lines = [["node", "module", "op", "source", "reads", "computes in", "gives", "max", ...table.formats.flatMap((f) => ["verdict", ...fields].map((x) => `${f} ${x}`))]];
      for (let i = 0; i < table.count; i++) {
        const told = table.dtypes(i) || { reads: "", computes: "", gives: "" };
        lines.push([data.name[i], table.owner(i), table.op(i), table.source(i), told.reads, told.computes, told.gives, data.max[i],
          ...table.formats.flatMap((f) => [data.verdicts[table.verdict(f, i)], ...fields.map((x) => data.cells[f][x][i])])]);
      }
      return lines.map((line) => line.map(quote).join(",")).join("\r\n");
    }

    /* Events. */
    let waiting = false;
    scroller.addEventListener("scroll", () => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    });
    addEventListener("resize", draw);
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr[id]");
      if (!row) return;
      const index = Number(row.id.slice(4));
      select(index);
      if (list.rows[index].module) toggle(index, !list.rows[index].module.open);
    });
    scroller.addEventListener("keydown", (event) => {
      if (event.target.closest("button") || event.ctrlKey || event.metaKey || event.altKey) return;
      const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity };
      if (event.key in moves) select(Math.max(0, Math.min(list.rows.length - 1, active + moves[event.key])));
      else if (event.key === "ArrowRight") toggle(active, true);
      else if (event.key === "ArrowLeft") toggle(active, false);
      else if (event.key === "Enter" || event.key === " ") {
        const row = list.rows[active];
        if (row && row.module) toggle(active, !row.module.open);
      } else return;
      event.preventDefault();
      event.stopPropagation();
    });
    let pause = 0;
    $("filter").addEventListener("input", () => {
      clearTimeout(pause);
      pause = setTimeout(() => { view.filter = $("filter").value; scroller.scrollTop = 0; refresh(); }, 80);
    });
    $("hide-safe").addEventListener("change", (event) => { view.hideSafe = event.target.checked; scroller.scrollTop = 0; refresh(); });
    $("unfold").addEventListener("click", (event) => {
      const open = event.target.textContent === "Unfold all";
      const walk = (node) => { node.open = open; node.children.forEach(walk); };
      shape.root.children.forEach(walk);
      event.target.textContent = open ? "Fold all" : "Unfold all";
      refresh();
    });
    $("save-csv").addEventListener("click", () => save("layers.csv", "text/csv", csv()));
    addEventListener("keydown", (event) => {
      if (!plainly(event)) return;
      if (event.key === "/") $("filter").focus();
      else if (event.key === "j" || event.key === "k") {
        if (list.rows.length) $("layers").scrollIntoView({ block: "start" });
        select(active < 0 ? 0 : active + (event.key === "j" ? 1 : -1));
        scroller.focus({ preventScroll: true });
      } else return;
      event.preventDefault();
    });
    const chart = document.querySelector("svg[data-rows]");
    if (chart) {
      const first = chart.dataset.rows.split(",").map(Number);
      const [left, right] = [56, 1064]; /* where the curves begin and end */
      chart.addEventListener("click", (event) => {
        const box = chart.getBoundingClientRect();
        const x = (event.clientX - box.left) * (chart.viewBox.baseVal.width / box.width);
        const at = Math.round(((x - left) / (right - left)) * (first.length - 1));
        show(first[Math.max(0, Math.min(first.length - 1, at))]);
      });
    }
    addEventListener("hashchange", follow);

    /* The measure that colours the graph also takes the table's third column, unless a column shows it already. */
    $("graph-view").hidden = false;
    GraphView(table, shape, show, (m) => {
      table.measure = m.kind === "most" || m.kind === "total" ? m : data.measures.find((known) => known.column === "max");
      columns.find((column) => column.key === "measure").title = table.measure.short;
      heads();
      refresh();
    });

    LayerTable.unfold(table, shape, OPENED);
    heads();
    refresh();
    follow();
  }
})();
