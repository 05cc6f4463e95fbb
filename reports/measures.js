"use strict";
/* What the graph and the table can be coloured by: the value of an operation or a module, its text, its colour. */
const Measures = (() => {
  const RANKS = [0, 2, 3, 1]; /* verdict code -> how bad */
  const DECADES = 5;

  function ratio(value) {
    if (value === null || value === undefined) return "–";
    if (value === "nan") return "NaN";
    const n = LayerTable.number(value);
    if (!Number.isFinite(n)) return "non-finite";
    if (n === 0) return "0";
    return Math.abs(n) >= 0.001 && Math.abs(n) < 1e6 ? String(Number(n.toPrecision(3))) : n.toExponential(1).replace("e+", "e");
  }

  const KINDS = {
    effect: { of: (table, m, i) => table.effect(m.format, i), join: larger, text: ratio },
    verdict: { of: (table, m, i) => table.verdict(m.format, i), join: worse, text: (value, table) => table.data.verdicts[value] },
    most: { of: column, join: larger, text: ratio },
    total: { of: column, join: (a, b) => (a ?? 0) + (b ?? 0), text: (value) => value.toLocaleString("en", { notation: "compact" }) },
    name: { of: (table, m, i) => table.data.strings[table.data[m.column][i]] || null, join: same, text: String },
  };

  function column(table, m, i) {
    const held = m.format ? table.data.cells[m.format][m.column] : table.data[m.column];
    return LayerTable.number(held[i]);
  }

  function larger(a, b) { return a === null || (b !== null && b > a) ? b : a; }
  function worse(a, b) { return a === null || RANKS[b] > RANKS[a] ? b : a; }
  function same(a, b) { return a === null || a === b ? b : "mixed"; }

  const op = (table, m, i) => KINDS[m.kind].of(table, m, i);
  const all = (table, m, ops) => ops.map((i) => op(table, m, i)).filter((v) => v !== null && v !== undefined).reduce((a, b) => KINDS[m.kind].join(a, b), null);
  const text = (table, m, value) => (value === null || value === undefined ? "–" : KINDS[m.kind].text(value, table));

  /* {class} for what has a name, {t} from 0 to 1 for what has a size, {} where nothing is known. */
  function colour(table, m, value, top) {
    if (value === null || value === undefined) return {};
    if (m.kind === "verdict") return { class: table.data.verdicts[value] };
    if (m.kind === "name") return { class: named(value) };
    if (!Number.isFinite(value)) return { t: 1 };
    if (m.kind === "effect") return { t: clamp(1 + Math.log10(value / table.data.budget) / 4) };
    return { t: value > 0 && top > 0 ? clamp(1 + Math.log10(value / top) / DECADES) : 0 };
  }

  /* [value, how many operations], the most frequent first. */
  function parts(table, m, ops) {
    const found = new Map();
    for (const i of ops) { const value = op(table, m, i); if (value) found.set(value, (found.get(value) || 0) + 1); }
    return [...found].sort((a, b) => b[1] - a[1]);
  }

  const named = (value) => `is-${value.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
  const clamp = (value) => Math.max(0, Math.min(1, value));

  return { op, all, text, colour, ratio, parts, named };
})();
