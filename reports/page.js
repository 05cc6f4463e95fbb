"use strict";
/* Colors and copying, on every page with a button for them. */
(() => {
  const theme = document.getElementById("theme");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("auditor-theme", next); } catch { /* a file:// page may have no storage */ }
  });

  function copyText(text) {
    if (navigator.clipboard && isSecureContext) return navigator.clipboard.writeText(text);
    const area = document.createElement("textarea");
    area.className = "sr";
    area.setAttribute("aria-hidden", "true");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done ? Promise.resolve() : Promise.reject(new Error("the browser refused to copy"));
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const say = (text) => { button.textContent = text; setTimeout(() => { button.textContent = "Copy"; }, 1600); };
      copyText(button.parentElement.querySelector("code").textContent).then(() => say("Copied"), () => say("Copying failed: select the code"));
    });
  }
})();
