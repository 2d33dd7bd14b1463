// Tips on hover, focus and tap; arrow keys in heat maps. The page is whole without it: what a tip
// says is a title until then.
"use strict";
const tip = document.createElement("div");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;
document.body.append(tip);

for (const element of document.querySelectorAll("[title]")) {
  element.dataset.tip = element.title;
  element.removeAttribute("title");
}
for (const title of document.querySelectorAll("svg title")) {
  title.parentNode.dataset.tip = title.textContent;
  title.remove();
}

function show(text, box) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const edge = document.documentElement.clientWidth - width - 8;
  const left = Math.max(8, Math.min(box.left + box.width / 2 - width / 2, edge));
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

function hide() {
  tip.hidden = true;
}

// A map is one drawing; which of its squares is meant, the pointer says.
function square(map, event) {
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(
    map.getScreenCTM().inverse(),
  );
  const [left, top] = [Math.floor(at.x), Math.floor(at.y)];
  const word = map.dataset.map.split("|")[top]?.split(" ")[left];
  if (word === undefined) return hide();
  const [down, across] = map.dataset.cell.split(" ").map(Number);
  const [first, second] = map.dataset.axes.split(" ");
  const of = (size, index) =>
    size === 1 ? `${index}` : `${index * size}–${index * size + size - 1}`;
  const box = { left: event.clientX, width: 0, top: event.clientY - 6, bottom: event.clientY + 12 };
  const ratio = word === "inf" ? "∞" : `${Number(word)}`;
  show(`${first} ${of(down, top)}, ${second} ${of(across, left)}\nerror/bound ${ratio}`, box);
}

document.addEventListener("pointermove", (event) => {
  const map = event.target.closest?.("[data-map]");
  if (map) return square(map, event);
  const element = event.target.closest?.("[data-tip]");
  if (element) show(element.dataset.tip, element.getBoundingClientRect());
  else if (!document.activeElement?.dataset.tip) hide();
});
document.addEventListener("pointerdown", (event) => {
  const element = event.target.closest?.("[data-tip]");
  if (element) show(element.dataset.tip, element.getBoundingClientRect());
  else hide();
});
document.addEventListener("scroll", hide, { capture: true, passive: true });
document.addEventListener("focusin", (event) => {
  const text = event.target.dataset?.tip;
  if (text) show(text, event.target.getBoundingClientRect());
});
document.addEventListener("focusout", hide);

const STEPS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
for (const table of document.querySelectorAll("table.heat")) {
  const cells = [...table.querySelectorAll("td[data-tip]")];
  for (const [index, cell] of cells.entries()) {
    cell.tabIndex = index ? -1 : 0;
    cell.setAttribute("aria-describedby", "tip");
  }
  table.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const step = STEPS[event.key];
    const cell = event.target.closest("td");
    if (!step || !cell) return;
    event.preventDefault();
    const row = table.rows[cell.parentNode.rowIndex + step[0]];
    row?.cells[cell.cellIndex + step[1]]?.focus();
  });
}
