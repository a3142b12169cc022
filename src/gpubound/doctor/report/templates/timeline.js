"use strict";
// The steps over time: what each device did and why it did not, its streams, the host's threads, and how far the host was ahead.
// Names from the tape are set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const LABEL = 96, LANE = 18, SPACE = 6, CURVE = 84, AXIS = 22; // pixels
const APART = 24; // pixels between two marks of steps: closer ones hatch the curve
const STREAMS = 6, THREADS = 4; // more lanes than this no screen holds

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function inWords(us) {
  const [size, unit] = Math.abs(us) >= 1e6 ? [1e6, "s"] : Math.abs(us) >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  return `${Number((us / size).toPrecision(3))} ${unit}`;
}

// The smallest of 1, 2, 5, 10, 20, ... that is at least `raw`.
function rounded(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map(m => m * power).find(size => size >= raw);
}

// The `most` largest groups of events, by name.
function grouped(events, key, most) {
  const found = new Map();
  for (const event of events) {
    if (!found.has(key(event))) found.set(key(event), []);
    found.get(key(event)).push(event);
  }
  const largest = [...found].sort((a, b) => b[1].length - a[1].length).slice(0, most);
  return largest.sort((a, b) => String(a[0]).localeCompare(String(b[0]), undefined, { numeric: true }));
}

// What is drawn, lane below lane: {label, items: [{start, end, style, title, place}]}, each sorted by its start.
function lanesOf(doctor) {
  const { tape, gaps, places, causes, named } = doctor, lanes = [];
  const at = event => ({ start: event.start, end: event.end });
  for (const [device, works] of grouped(tape.work, w => w.device, 8)) {
    const idle = gaps.filter(gap => gap.device === device).map(gap => ({
      ...at(gap), style: gap.cause, title: `idle: ${causes[gap.cause]}`, place: places[gap.place],
    }));
    const busy = works.map(w => ({ ...at(w), style: w.kind === "comm" ? "comm" : "busy", title: w.name }));
    lanes.push({ label: `GPU ${device}`, items: [...busy, ...idle].sort((a, b) => a.start - b.start), tall: true });
    const streams = grouped(works, w => w.stream, STREAMS);
    for (const [stream, some] of streams.length > 1 ? streams : []) {
      lanes.push({ label: `stream ${stream}`, items: some.map(w => ({ ...at(w), style: `w-${w.kind}`, title: w.name })) });
    }
  }
  const calls = tape.calls.map((call, index) => ({ ...call, place: places[doctor.located[index]] }));
  grouped(calls, c => c.thread, THREADS).forEach(([thread, some], nth) => {
    const style = c => (c.kind === "sync" || c.blocks ? "w-wait" : c.kind === "launch" || c.kind === "graph" ? "w-launch" : "w-other");
    const name = `thread ${nth + 1}`;
    lanes.push({ label: `${name}: calls`, items: some.map(c => ({ ...at(c), style: style(c), title: c.name, place: c.place })) });
    const spans = tape.spans.filter(s => s.thread === thread);
    const items = spans.map(s => ({ ...at(s), style: s.kind in causes ? s.kind : "", title: s.name === s.kind ? s.name : `${s.kind}: ${s.name}`, place: places[named[s.name]] }));
    if (items.length) lanes.push({ label: `${name}: work`, items });
  });
  return lanes;
}

// How long each launch's first work waited after its call began. Near 0 the GPU waits for the host.
function leadOf(tape) {
  const first = new Map(), points = [];
  for (const work of tape.work) if (work.correlation && !first.has(work.correlation)) first.set(work.correlation, work.start);
  for (const call of tape.calls) if (first.has(call.correlation)) points.push([call.start, Math.max(0, first.get(call.correlation) - call.start)]);
  return points;
}

class Timeline {
  constructor(box, doctor) {
    this.doctor = doctor;
    this.lanes = lanesOf(doctor);
    this.lead = leadOf(doctor.tape);
    const events = [...doctor.tape.calls, ...doctor.tape.work, ...doctor.gaps];
    this.whole = [Math.min(...edges(events, "start", Math.min)), Math.max(...edges(events, "end", Math.max))];
    this.view = this.whole;
    this.svg = box.appendChild(drawn("svg", { class: "timeline", tabindex: 0, role: "img", "aria-label": "the steps over time" }));
    this.tip = box.appendChild(document.createElement("div"));
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(box);
    this.draw();
  }

  listen() {
    const svg = this.svg;
    svg.addEventListener("pointermove", event => {
      if (this.grip) this.show(...this.grip.view.map(time => time + (this.grip.x - event.clientX) / this.scale));
      else if (this.from === undefined) this.point(event);
      else this.select(event);
    });
    svg.addEventListener("pointerleave", () => (this.tip.hidden = true));
    svg.addEventListener("pointerdown", event => {
      if (event.pointerType !== "mouse") this.grip = { x: event.clientX, view: this.view };
      else if (event.button === 0) this.from = this.time(event);
    });
    addEventListener("pointercancel", () => (this.grip = this.from = undefined));
    addEventListener("pointerup", event => {
      const [from, to] = [this.from, this.from === undefined ? 0 : this.time(event)];
      this.from = this.grip = undefined;
      if (from !== undefined && Math.abs(to - from) * this.scale > 4) this.show(Math.min(from, to), Math.max(from, to));
    });
    svg.addEventListener("dblclick", () => this.show(...this.whole));
    svg.addEventListener("keydown", event => {
      const moves = { "+": [0.5, 0], "-": [2, 0], ArrowLeft: [1, -0.25], ArrowRight: [1, 0.25], "0": null };
      if (!(event.key in moves)) return;
      event.preventDefault();
      if (moves[event.key]) this.move(...moves[event.key]);
      else this.show(...this.whole);
    });
  }

  // Zoom by `factor` about the middle, and go on by a share of what is seen.
  move(factor, share) {
    const [from, to] = this.view, middle = (from + to) / 2 + share * (to - from), half = ((to - from) / 2) * factor;
    this.show(middle - half, middle + half);
  }

  show(from, to) {
    const [first, last] = this.whole, width = Math.min(Math.max(to - from, 2), last - first);
    const start = Math.min(Math.max(from, first), last - width);
    this.view = [start, start + width];
    this.draw();
  }

  get scale() {
    return (this.width - LABEL) / (this.view[1] - this.view[0] || 1);
  }

  x(time) {
    return LABEL + (time - this.view[0]) * this.scale;
  }

  time(event) {
    return this.view[0] + (event.clientX - this.svg.getBoundingClientRect().left - LABEL) / this.scale;
  }

  draw() {
    const box = this.svg.parentNode, { paddingLeft, paddingRight } = getComputedStyle(box);
    this.width = Math.max(box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight), 200);
    this.hits = [];
    const parts = [];
    let y = AXIS;
    for (const lane of this.lanes) {
      const height = lane.tall ? LANE * 1.7 : LANE;
      parts.push(drawn("text", { x: 0, y: y + height / 2 + 4 }, lane.label), this.drawLane(lane, y, height));
      y += height + SPACE;
    }
    this.bottom = y + CURVE + SPACE;
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("height", this.bottom);
    this.svg.replaceChildren(...this.axis(), ...parts, ...this.curve(y));
    this.hand = this.svg.appendChild(drawn("rect", { class: "hand", y: AXIS, height: y - AXIS, width: 0 }));
  }

  // What is narrower than a pixel is drawn together, in the style that has most of the time: a step may have 20,000 events,
  // and a gap of 1 µs must not look as wide as a kernel of 20.
  drawLane(lane, y, height) {
    const group = drawn("g", {}), [from, to] = this.view;
    let pile = null, last = null;
    const close = () => {
      if (!last) return;
      const left = Math.max(this.x(last.start), LABEL), right = Math.min(this.x(last.end), this.width);
      const box = { class: last.style, x: left.toFixed(2), y, width: Math.max(right - left, 0.7).toFixed(2), height };
      box["data-hit"] = this.hits.push(last) - 1;
      group.append(drawn("rect", box));
      last = null;
    };
    const draw = item => {
      const joins = last && last.small && item.small && last.style === item.style && (item.start - last.end) * this.scale < 0.5;
      if (joins) return Object.assign(last, { end: Math.max(last.end, item.end), count: last.count + item.count });
      close();
      last = item;
    };
    const level = () => {
      if (!pile) return;
      const most = [...pile.sums].reduce((a, b) => (b[1].us > a[1].us ? b : a))[1];
      draw({ ...most.item, start: pile.start, end: pile.end, small: true, count: pile.count });
      pile = null;
    };
    for (const item of lane.items) {
      if (item.end < from || item.start > to) continue;
      if ((item.end - item.start) * this.scale >= 1) {
        level();
        draw({ ...item, small: false, count: 1 });
        continue;
      }
      if (pile && (item.end - pile.start) * this.scale >= 1) level();
      pile = pile || { start: item.start, end: item.end, sums: new Map(), count: 0 };
      const sum = pile.sums.get(item.style) || { us: 0, item };
      pile.sums.set(item.style, { us: sum.us + item.end - item.start, item: sum.item });
      pile.end = Math.max(pile.end, item.end);
      pile.count += 1;
    }
    level();
    close();
    return group;
  }

  axis() {
    const parts = [], [from, to] = this.view, step = rounded(((to - from) / this.width) * 110), zero = this.whole[0];
    for (let t = Math.ceil((from - zero) / step) * step; t <= to - zero; t += step) {
      const x = this.x(t + zero), last = x > this.width - 40;
      parts.push(drawn("line", { class: "grid", x1: x, x2: x, y1: AXIS - 4, y2: this.bottom }));
      parts.push(drawn("text", { x: last ? this.width : x, y: 12, "text-anchor": last ? "end" : "middle" }, inWords(Math.round(t * 1e3) / 1e3)));
    }
    const steps = this.doctor.tape.steps, seen = steps.filter(([start]) => start > from && start < to).length;
    const every = rounded(Math.max(1, (APART * seen) / (this.width - LABEL)));
    for (let nth = 0; nth < steps.length; nth += every) {
      const [start] = steps[nth];
      if (start > from && start < to) parts.push(drawn("line", { class: "mark", x1: this.x(start), x2: this.x(start), y1: AXIS - 4, y2: this.bottom }));
    }
    return parts;
  }

  // The lowest lead of each pixel: it is the one that lets the GPU wait.
  curve(y) {
    const [from, to] = this.view, lowest = new Map();
    for (const [at, lead] of this.lead) {
      const x = Math.round(this.x(at));
      if (at >= from && at <= to) lowest.set(x, Math.min(lead, lowest.has(x) ? lowest.get(x) : Infinity));
    }
    const most = Math.max(...lowest.values(), 1), floor = y + CURVE;
    const points = [...lowest].map(([x, lead]) => `${x},${(floor - (lead / most) * (CURVE - 14)).toFixed(1)}`).join(" ");
    return [
      drawn("text", { x: 0, y: y + 26 }, "host ahead"), drawn("text", { x: 0, y: y + 42 }, `up to ${inWords(most)}`),
      drawn("line", { class: "grid", x1: LABEL, x2: this.width, y1: floor, y2: floor }), drawn("polyline", { class: "lead s0", points }),
    ];
  }

  select(event) {
    const [a, b] = [this.x(this.from), this.x(this.time(event))].map(x => Math.min(Math.max(x, LABEL), this.width));
    this.hand.setAttribute("x", Math.min(a, b));
    this.hand.setAttribute("width", Math.abs(b - a));
    this.tip.hidden = true;
  }

  point(event) {
    const hit = this.hits[event.target.dataset ? event.target.dataset.hit : undefined];
    this.tip.hidden = !hit;
    if (!hit) return;
    const many = hit.count > 1 ? ` and ${hit.count - 1} more` : "";
    const lines = [["b", `${hit.title}${many}, ${inWords(hit.end - hit.start)}`]];
    if (hit.place) lines.push(["span", hit.place.at], ["pre", hit.place.code]);
    this.tip.replaceChildren(...lines.map(([name, text]) => Object.assign(document.createElement(name), { textContent: text })));
    const box = this.svg.parentNode.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    this.tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${y + 16}px`;
  }
}

// Math.min(...list) fails beyond some 100,000 arguments.
function edges(events, name, best) {
  return events.length ? [events.reduce((found, event) => best(found, event[name]), events[0][name])] : [0];
}
