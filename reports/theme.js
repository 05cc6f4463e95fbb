"use strict";
(() => {
  let stored = null;
  try { stored = localStorage.getItem("auditor-theme"); } catch { /* a file:// page may have no storage */ }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = stored === "light" || stored === "dark" ? stored : dark ? "dark" : "light";
})();
