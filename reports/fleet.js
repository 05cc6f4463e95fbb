"use strict";
(() => {
  const table = document.getElementById("fleet");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => ({ row, state: row.dataset.state, text: row.textContent.toLowerCase() }));
  const search = document.getElementById("search");
  const state = document.getElementById("state");
  const shown = document.getElementById("shown");

  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const one of rows) {
      const kept = (!state.value || one.state === state.value) && words.every((word) => one.text.includes(word));
      one.row.hidden = !kept;
      count += kept;
    }
    shown.textContent = count === rows.length ? "" : `${count} of ${rows.length}`;
    document.getElementById("none").hidden = count > 0;
  }

  function sort(column, kind, head) {
    const down = head.getAttribute("aria-sort") === "ascending";
    const value = (row) => {
      const cell = row.cells[column];
      if (kind === "text") return cell.textContent.trim().toLowerCase();
      const number = parseFloat(cell.dataset.value ?? cell.textContent);
      return Number.isNaN(number) ? Infinity : number;
    };
    const order = rows.map((one) => [value(one.row), one.row]);
    order.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down && a !== Infinity && b !== Infinity ? -1 : 1));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...order.map(([, row]) => row));
  }

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sort(column, head.dataset.sort, head));
    head.replaceChildren(button);
  });
  search.addEventListener("input", filter);
  state.addEventListener("change", filter);
  document.querySelector(".fleet-tools").addEventListener("submit", (event) => event.preventDefault());
})();
