"use strict";
(() => {
  /* What a link goes to is opened, with the folds around it. */
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    for (let fold = target; fold; fold = fold.parentElement) if (fold.localName === "details") fold.open = true;
    const first = target?.querySelector(":scope > details.fold");
    if (first) first.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  /* Cards by severity, format, rule and module. Without this script all of them are there, in their folds. */
  const form = document.getElementById("finding-filter");
  if (!form) return;
  const cards = [...document.querySelectorAll("#findings .finding")];
  const folds = [...document.querySelectorAll("#findings .more")];
  const wasOpen = new Map(folds.map((fold) => [fold, fold.open]));
  let filtering = false;

  const words = (text) => text.toLowerCase().split(" ").filter(Boolean);

  /* `*` stands for the number of a block, in what is looked for as in the paths of a card. */
  function path(wanted) {
    const escaped = wanted.toLowerCase().replace(/[.+?^${}()|[\]\\]/g, "\\$&");
    return new RegExp(escaped.replace(/\*|\b\d+\b/g, "(?:\\*|\\d+)"));
  }

  function wants(card, wanted) {
    if (wanted.severity && card.dataset.severity !== wanted.severity) return false;
    if (wanted.formats && !words(card.dataset.formats).includes(wanted.formats)) return false;
    if (wanted.rules && !words(card.dataset.rules).some((rule) => rule.startsWith(wanted.rules.toLowerCase()))) return false;
    return !wanted.modules || path(wanted.modules).test(card.dataset.modules.toLowerCase());
  }

  function apply() {
    const wanted = Object.fromEntries([...new FormData(form)].map(([name, value]) => [name, value.trim()]));
    const any = Object.values(wanted).some(Boolean);
    for (const card of cards) card.hidden = any && !wants(card, wanted);
    if (any && !filtering) folds.forEach((fold) => wasOpen.set(fold, fold.open));
    for (const fold of folds) {
      fold.hidden = any && !fold.querySelector(".finding:not([hidden])");
      if (any || filtering) fold.open = any || wasOpen.get(fold);
    }
    filtering = any;
    const shown = cards.filter((card) => !card.hidden).length;
    document.getElementById("findings-shown").textContent = any ? `${shown} of ${cards.length} cards` : "";
  }

  form.hidden = false;
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
})();
