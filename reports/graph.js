"use strict";
/* The graph of one module: what is directly inside it, what comes in and goes out, who reads whom, and where each is drawn. */
const ModuleGraph = (() => {
  const MOST = 200;
  const SIZE = { width: 196, height: 42, across: 18, down: 30, edge: 22 };

  function opsOf(node) {
    return [...node.ops, ...node.children.flatMap(opsOf)];
  }

  /* Items in the order they first run. A module around a single operation is shown as that operation. */
  function items(table, node) {
    const inside = [
      ...node.ops.map((op) => ({ at: op, ops: [op], op, label: null })),
      ...node.children.map((child) => {
        const ops = opsOf(child).sort((a, b) => a - b);
        return ops.length === 1 ? { at: ops[0], ops, op: ops[0], label: child.label } : { at: ops[0], ops, child, label: child.label };
      }),
    ].filter((item) => item.ops.length);
    inside.sort((a, b) => a.at - b.at);
    return { shown: inside.slice(0, MOST), left: Math.max(0, inside.length - MOST) };
  }

  /* Goes down for as long as there is but one module to open. */
  function descend(node) {
    let inside = node;
    while (!inside.ops.length && inside.children.length === 1) inside = inside.children[0];
    return inside;
  }

  /* Operations that read each operation. */
  function readers(table) {
    const found = table.data.reads.map(() => []);
    table.data.reads.forEach((distances, i) => distances.forEach((distance) => found[i - distance].push(i)));
    return found;
  }

  /* What comes in stands before the items, what goes out behind them: the model's own by name, all else as one. */
  function ends(table, shown) {
    const home = new Map();
    shown.forEach((item, k) => item.ops.forEach((i) => home.set(i, k)));
    const within = (ops) => [...new Set(ops.map((i) => home.get(i)).filter((k) => k !== undefined))];
    const reading = shown.map((item, k) => k).filter((k) => shown[k].ops.some((i) => table.data.reads[i].some((d) => !home.has(i - d))));
    table.readers = table.readers || readers(table);
    const read = shown.map((item, k) => k).filter((k) => shown[k].ops.some((i) => table.readers[i].some((r) => !home.has(r))));
    const before = table.data.inputs.map(({ name, shape, into }) => ({ end: "in", label: name, under: shape, ops: [], with: within(into) }));
    const after = table.data.outputs.map((i, n) => ({
      end: "out", label: table.data.outputs.length > 1 ? `output ${n}` : "output", under: table.shape(i), ops: [], with: within([i]),
    }));
    before.push({ end: "in", label: "from outside", under: "", ops: [], with: reading });
    after.push({ end: "out", label: "to outside", under: "", ops: [], with: read });
    return { before: before.filter((item) => item.with.length), after: after.filter((item) => item.with.length) };
  }

  /* Edges between items, [from, to, how many]. */
  function edges(table, shown) {
    const home = new Map();
    shown.forEach((item, k) => item.ops.forEach((i) => home.set(i, k)));
    const found = new Map();
    shown.forEach((item, to) => item.ops.forEach((i) => table.data.reads[i].forEach((distance) => {
      const from = home.get(i - distance);
      if (from === undefined || from === to) return;
      const key = `${from} ${to}`;
      found.set(key, (found.get(key) || 0) + 1);
    })));
    return [...found].map(([key, n]) => [...key.split(" ").map(Number), n]);
  }

  /* Longest path from the top gives the row, and what reads nothing stands right above its first reader. */
  function place(shown, list) {
    const rank = shown.map(() => 0);
    const sources = shown.map(() => []);
    for (const [from, to] of list) if (from < to) sources[to].push(from);
    sources.forEach((from, to) => { rank[to] = Math.max(0, ...from.map((k) => rank[k] + 1)); });
    const readers = shown.map(() => []);
    for (const [from, to] of list) if (from < to) readers[from].push(to);
    sources.forEach((from, k) => { if (!from.length && readers[k].length) rank[k] = Math.min(...readers[k].map((r) => rank[r])) - 1; });
    const rows = [];
    rank.forEach((r, k) => { (rows[r] = rows[r] || []).push(k); });
    const x = shown.map(() => 0);
    const step = SIZE.width + SIZE.across;
    const widest = Math.max(...rows.map((row) => row.length), 1);
    rows.forEach((row) => {
      const wish = (k) => (sources[k].length ? sources[k].reduce((sum, s) => sum + x[s], 0) / sources[k].length : 0);
      row.sort((a, b) => wish(a) - wish(b) || a - b);
      row.forEach((k, n) => { x[k] = SIZE.edge + ((widest - row.length) / 2 + n) * step; });
    });
    const y = rank.map((r) => SIZE.edge + r * (SIZE.height + SIZE.down));
    return { x, y, width: widest * step - SIZE.across + 2 * SIZE.edge, height: rows.length * (SIZE.height + SIZE.down) - SIZE.down + 2 * SIZE.edge };
  }

  function layout(table, node) {
    const { shown: inside, left } = items(table, node);
    const { before, after } = ends(table, inside);
    const shown = [...before, ...inside, ...after];
    const [first, last] = [before.length, before.length + inside.length];
    const list = [
      ...edges(table, shown),
      ...before.flatMap((item, k) => item.with.map((to) => [k, first + to, 1])),
      ...after.flatMap((item, k) => item.with.map((from) => [first + from, last + k, 1])),
    ];
    return { shown, left, edges: list, ...place(shown, list) };
  }

  return { layout, descend, SIZE };
})();
