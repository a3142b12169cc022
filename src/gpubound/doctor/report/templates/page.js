"use strict";
// What the page does: tabs, the what-if, the timeline.

const find = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];
const ms = value => `${value.toFixed(Math.abs(value) >= 9.95 || Math.abs(value) < 0.005 ? 1 : 2)} ms`;

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const doctor = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const { fields, names } = doctor, tape = { steps: doctor.tape.steps };
  for (const [kind, columns] of Object.entries(fields)) {
    tape[kind] = doctor.tape[kind].map(row => Object.fromEntries(columns.map((name, nth) => [name, nth ? row[nth] : doctor.tape.names[row[0]]])));
  }
  return { ...doctor, tape };
}

function tabs() {
  for (const button of all("[role=tab]")) {
    button.addEventListener("click", () => {
      for (const other of all("[role=tab]")) {
        other.setAttribute("aria-selected", other === button);
        find(`#${other.getAttribute("aria-controls")}`).hidden = other !== button;
      }
    });
  }
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, or a page that is not trusted
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

function copies() {
  for (const button of all("[data-copy]")) {
    const words = button.textContent;
    button.addEventListener("click", async () => {
      await copied(button.dataset.copy);
      button.textContent = "copied";
      setTimeout(() => (button.textContent = words), 1500);
    });
  }
}

function whatIf({ program, scale }) {
  const step = picks => scale * played(program, picks);
  const said = find("#whatif"), base = step([]), boxes = all("input[data-pick]");
  const tell = () => {
    const picks = boxes.filter(box => box.checked).map(box => Number(box.dataset.pick));
    const left = step(picks), gain = left > 0 ? base / left : 1;
    find("b", said).textContent = picks.length ? `${ms(base)} → ${ms(left)} a step (${gain.toFixed(2)}x)` : `${ms(base)} a step`;
    find("span", said).textContent = picks.length ? "with the checked ones fixed" : "check what you would fix";
  };
  for (const box of boxes) box.addEventListener("change", tell);
  find("#every").addEventListener("click", () => {
    const some = boxes.some(box => !box.checked && box.dataset.pick > 0);
    for (const box of boxes) box.checked = some && box.dataset.pick > 0;
    tell();
  });
  said.hidden = false;
  tell();
}

function watch(doctor) {
  const timeline = new Timeline(find("#time"), doctor);
  const moves = { in: [0.5, 0], out: [2, 0], left: [1, -0.5], right: [1, 0.5] };
  for (const button of all("[data-move]")) {
    button.addEventListener("click", () => (button.dataset.move === "all" ? timeline.show(...timeline.whole) : timeline.move(...moves[button.dataset.move])));
  }
  for (const button of all("[data-zoom]")) {
    const mine = gap => gap.cause === button.dataset.zoom || String(gap.place) === button.dataset.zoom;
    const gaps = doctor.gaps.filter(mine).sort((a, b) => b.end - b.start - (a.end - a.start));
    button.hidden = !gaps.length;
    button.addEventListener("click", () => {
      const room = (gaps[0].end - gaps[0].start) * 2;
      timeline.show(gaps[0].start - room, gaps[0].end + room);
      find("#time").scrollIntoView({ block: "center" });
    });
  }
  return timeline;
}

tabs();
copies();
const packed = find("#doctor");
const ready = packed ? unpacked(packed.textContent).then(doctor => {
  if (doctor.program) whatIf(doctor);
  watch(doctor);
  return doctor;
}) : Promise.resolve(null);
