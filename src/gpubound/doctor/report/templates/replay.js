"use strict";
// The replay of doctor/price/simulator.py, step for step, so that a price in the page is the doctor's. `program` holds a list for each
// name, with an entry a call. `picks` are the numbers of what is left out.

function played(program, picks, host = true) {
  const { before, previous, after, gap, tail, times } = program, size = before.length;
  let { pause, cost, waits_for, room, latency, run } = program;
  if (picks.length) {
    [cost, waits_for, room, latency, run] = [[...cost], [...waits_for], [...room], [...latency], [...run]];
    for (const pick of picks) {
      for (const [position, left, soon, short] of program.picks[pick]) {
        [cost[position], latency[position], run[position]] = [left, soon, short];
        waits_for[position] = [];
        room[position] = -1;
      }
    }
    pause = pausesWithout(program, new Set(picks));
  }
  if (!host) [pause, cost, waits_for, room] = [0, 0, [], -1].map(value => Array(size).fill(value));
  const ends = host ? [...program.ends] : Array(size).fill(0);
  const begun = Array(size).fill(-Infinity), done = Array(size).fill(-Infinity);
  let latest = 0;
  for (let time = 0; time < times; time++) {
    for (let at = 0; at < size; at++) {
      const start = Math.max(ends[before[at]] + pause[at], ends[previous[at]]);
      if (after[at].length) {
        let begin = start + latency[at];
        for (const other of after[at]) begin = Math.max(begin, done[other] + gap[at]);
        begun[at] = begin;
        done[at] = begin + run[at];
        latest = Math.max(latest, done[at]);
      }
      let end = start + cost[at];
      for (const other of waits_for[at]) end = Math.max(end, done[other] + tail[at]);
      if (room[at] >= 0) end = Math.max(end, begun[room[at]] + tail[at]);
      ends[at] = end;
    }
  }
  return ends.reduce((found, end) => Math.max(found, end), latest) / program.steps / 1e3;
}

// A stall belongs to every pick that covers it, and goes with any of them.
function pausesWithout(program, picks) {
  const pause = [...program.pause];
  for (const [position, us, covering] of program.stalls) if (covering.some(pick => picks.has(pick))) pause[position] -= us;
  return pause.map(us => Math.max(us, 0));
}
