"use strict";
/* The layer table without the page: columns of data become a tree of modules and a list of visible rows. */
const LayerTable = (() => {
  const SAFE = 0;
  const UNTESTED = 3;
  const WORST_FIRST = [0, 2, 3, 1]; /* verdict code -> rank: safe, untested, sensitive, unsafe */

  const number = (value) => (typeof value === "string" ? (value === "-inf" ? -Infinity : Infinity) : value);

  function read(data) {
    const text = (column) => (i) => data.strings[data[column][i]];
    const columns = { op: text("op"), owner: text("owner"), source: text("source"), type: text("type"), shape: text("shape"), why: text("why") };
    const told = text("dtypes");
    const dtypes = (i) => { const [reads, computes, gives] = told(i).split("|"); return computes ? { reads: reads.replace(/ /g, ", "), computes, gives } : null; };
    const owners = new Map(data.owner.map((owner, i) => [data.strings[owner], data.strings[data.type[i]]]));
    const classAt = (path) => owners.get(path) || data.classes[path] || "";
    const classOf = (node) => classAt(node.times ? node.children[0].path : node.path);
    const verdict = (format, i) => (data.cells[format].verdict[i] === "-" ? UNTESTED : Number(data.cells[format].verdict[i]));
    const effect = (format, i) => number(data.cells[format].effect[i]);
    const rules = (i) => data.rules[i] || [];
    return { data, count: data.name.length, formats: data.formats.map((f) => f.key), verdict, effect, rules, dtypes, classOf, ...columns };
  }

  function branch(path, label) {
    return { path, label, children: [], ops: [], open: false, order: Infinity, total: null };
  }

  /* Modules by path, in the order they first run; runs of identical numbered blocks get one parent of their own. */
  function tree(table) {
    const root = branch("", "");
    const modules = new Map([["", root]]);
    const folded = new Map();
    for (const run of table.data.folds) {
      const [first, last] = [run[0], run[run.length - 1]];
      const fold = branch(`${first} … ${last}`, `${first.split(".").pop()} … ${last.split(".").pop()}`);
      fold.times = run.length;
      for (const path of run) folded.set(path, fold);
    }
    const module = (path) => {
      const known = modules.get(path);
      if (known) return known;
      const cut = path.lastIndexOf(".");
      let parent = module(cut < 0 ? "" : path.slice(0, cut));
      const made = branch(path, path.slice(cut + 1));
      modules.set(path, made);
      const fold = folded.get(path);
      if (fold) {
        if (!fold.children.length) parent.children.push(fold);
        parent = fold;
      }
      parent.children.push(made);
      return made;
    };
    for (let i = 0; i < table.count; i++) module(table.owner(i)).ops.push(i);
    summarise(table, root);
    root.open = true;
    return { root, modules, folded };
  }

  /* Worst verdict, largest effect and largest magnitude of everything inside a module. */
  function summarise(table, node) {
    const total = { count: 0, first: Infinity, max: null, flops: 0, rules: 0, plans: new Set(), formats: {} };
    for (const format of table.formats) total.formats[format] = { verdict: SAFE, effect: null };
    const larger = (a, b) => (a === null || (b !== null && b > a) ? b : a);
    const add = (format, verdict, effect) => {
      const into = total.formats[format];
      if (WORST_FIRST[verdict] > WORST_FIRST[into.verdict]) into.verdict = verdict;
      into.effect = larger(into.effect, effect);
    };
    for (const i of node.ops) {
      total.count += 1;
      total.first = Math.min(total.first, i);
      total.max = larger(total.max, number(table.data.max[i]));
      total.flops += table.data.flops[i];
      total.rules += table.rules(i).length;
      total.plans.add(table.data.plan[i]);
      for (const format of table.formats) add(format, table.verdict(format, i), table.effect(format, i));
    }
    for (const child of node.children) {
      const inner = summarise(table, child);
      total.count += inner.count;
      total.first = Math.min(total.first, inner.first);
      total.max = larger(total.max, inner.max);
      total.flops += inner.flops;
      total.rules += inner.rules;
      inner.plans.forEach((plan) => total.plans.add(plan));
      for (const format of table.formats) add(format, inner.formats[format].verdict, inner.formats[format].effect);
    }
    node.total = total;
    return total;
  }

  const allSafe = (table, node) => table.formats.every((f) => node.total.formats[f].verdict === SAFE);
  const opSafe = (table, i) => table.formats.every((f) => table.verdict(f, i) === SAFE);

  function matches(table, words, i) {
    if (!words.length) return true;
    const hay = [table.owner(i), table.op(i), table.source(i), table.type(i), table.data.name[i], ...table.rules(i)].join(" ").toLowerCase();
    return words.every((word) => hay.includes(word));
  }

  const KEYS = {
    layer: (table, i) => `${table.owner(i)} ${table.op(i)}`,
    measure: (table, i) => Measures.op(table, table.measure, i) ?? -1,
    rules: (table, i) => table.rules(i).length,
    plan: (table, i) => table.data.strings[table.data.plan[i]],
  };

  function key(table, column) {
    if (KEYS[column]) return (i) => KEYS[column](table, i);
    return (i) => table.effect(column, i) ?? (table.verdict(column, i) === UNTESTED ? -1 : -2);
  }

  /* Rows to show: the open part of the tree in execution order, or a flat list once it is filtered or sorted. */
  function rows(table, shape, view) {
    const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length || view.sort) {
      const found = [];
      for (let i = 0; i < table.count; i++) if (!(view.hideSafe && opSafe(table, i)) && matches(table, words, i)) found.push(i);
      if (view.sort) {
        const of = key(table, view.sort.column);
        const sign = view.sort.down ? -1 : 1;
        const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
        found.sort((a, b) => sign * compare(of(a), of(b)) || a - b);
      }
      return { flat: true, ops: found.length, rows: found.map((op) => ({ op, depth: 0 })) };
    }
    const shown = [];
    let ops = 0;
    const walk = (node, depth) => {
      const inside = [
        ...node.ops.filter((i) => !(view.hideSafe && opSafe(table, i))).map((op) => ({ at: op, op })),
        ...node.children.filter((c) => !(view.hideSafe && allSafe(table, c))).map((child) => ({ at: child.total.first, child })),
      ].sort((a, b) => a.at - b.at);
      for (const { op, child } of inside) {
        if (child === undefined) { shown.push({ op, depth }); continue; }
        if (child.total.count === 1 && child.ops.length === 1) { shown.push({ op: child.ops[0], depth, name: child.label }); continue; }
        shown.push({ module: child, depth });
        if (child.open) walk(child, depth + 1);
      }
    };
    walk(shape.root, 0);
    for (let i = 0; i < table.count; i++) if (!(view.hideSafe && opSafe(table, i))) ops += 1;
    return { flat: false, ops, rows: shown };
  }

  /* Opens every module on the way to an operation. */
  function reveal(table, shape, i) {
    let path = table.owner(i);
    while (path) {
      const node = shape.modules.get(path);
      node.open = true;
      const fold = shape.folded.get(path);
      if (fold) fold.open = true;
      const cut = path.lastIndexOf(".");
      path = cut < 0 ? "" : path.slice(0, cut);
    }
  }

  /* Opens modules from the outside in, for as long as the rows stay few. */
  function unfold(table, shape, most) {
    const waiting = [...shape.root.children];
    let shown = waiting.length + shape.root.ops.length;
    for (const node of waiting) {
      const inside = node.children.length + node.ops.length;
      if (shown + inside > most || node.total.count === 1) continue;
      node.open = true;
      shown += inside;
      waiting.push(...node.children);
    }
  }

  function histogram(text) {
    const cut = text.indexOf(":");
    if (cut < 0) return null;
    return { first: Number(text.slice(0, cut)), heights: [...text.slice(cut + 1)].map((digit) => parseInt(digit, 36) / 35) };
  }

  /* The chosen measure over all operations inside a module. */
  function measured(table, node) {
    const inside = (part) => [...part.ops, ...part.children.flatMap(inside)];
    return Measures.all(table, table.measure, inside(node));
  }

  return { measured, read, tree, rows, reveal, unfold, histogram, number, SAFE };
})();
