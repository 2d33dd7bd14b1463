// A touch screen and a keyboard show no titles: a tap or focus shows them. Arrow keys move in heat
// maps. The page is whole without this script.
"use strict";
const tip = document.getElementById("tip");

function show(event) {
  const element = event.target.closest?.("[title]");
  tip.textContent = element?.title ?? "";
  tip.hidden = !element;
}
document.addEventListener("click", show);
document.addEventListener("focusin", show);

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const table of document.querySelectorAll("table.heat")) {
  table.querySelector("td[title]")?.setAttribute("tabindex", "0");
  table.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    const cell = event.target.closest("td");
    if (!step || !cell) return;
    event.preventDefault();
    table.rows[cell.parentNode.rowIndex + step[0]]?.cells[cell.cellIndex + step[1]]?.focus();
  });
}
