/** A time axis on which long stretches without any processing are cut out. */
import { ticks } from "../zone";

export type Span = [from: number, to: number];
export type Cut = { from: number; to: number; x: number };
export type TimeScale = { x: (time: number) => number; time: (x: number) => number; cuts: Cut[]; pieces: Span[] };

const CUT_PIXELS = 22;
const PAD = 0.02; // of the drawn time, before and after what happened
const LONGEST_GAP = 0.2; // of the time in which something happened: a longer gap is cut

/**
 * Place times on `width` pixels. `busy` are the spans in which something happens; between them, gaps that would take too much of
 * the picture become cuts of a fixed width. With `isTrue`, nothing is cut.
 */
export function timeScale(busy: Span[], width: number, isTrue: boolean): TimeScale {
  const merged = merge(busy);
  const first = merged[0]?.[0] ?? 0;
  const last = merged.at(-1)?.[1] ?? 1;
  const work = merged.reduce((sum, [from, to]) => sum + to - from, 0);
  const longest = Math.max(work * LONGEST_GAP, 2000);
  const pieces: Span[] = [];
  for (const [from, to] of isTrue ? [[first, last] as Span] : merged) {
    const open = pieces.at(-1);
    if (open && from - open[1] <= longest) open[1] = to;
    else pieces.push([from, to]);
  }
  const shown = pieces.reduce((sum, [from, to]) => sum + to - from, 0);
  const pad = Math.max(shown * PAD, 200);
  const padded = pieces.map(([from, to]): Span => [from - pad, to + pad]);
  const total = shown + 2 * pad * padded.length;
  // At most a third of the width goes to cuts, however many there are.
  const cutWidth = Math.min(CUT_PIXELS, width / 3 / Math.max(1, padded.length - 1));
  const perMs = Math.max(1, width - cutWidth * (padded.length - 1)) / total;
  let left = 0;
  const starts = padded.map(([from, to]) => {
    const start = left;
    left += (to - from) * perMs + cutWidth;
    return start;
  });
  const x = (time: number): number => {
    const index = padded.findLastIndex(([from]) => time >= from);
    if (index < 0) return 0;
    const [from, to] = padded[index]!;
    if (time <= to || index === padded.length - 1) return Math.min(width, starts[index]! + (Math.min(time, to) - from) * perMs);
    const next = padded[index + 1]![0]; // within a cut
    return starts[index + 1]! - cutWidth * (1 - (time - to) / (next - to));
  };
  const time = (at: number): number => {
    const index = Math.max(
      0,
      starts.findLastIndex((start) => at >= start),
    );
    const [from, to] = padded[index]!;
    return Math.min(from + (at - starts[index]!) / perMs, to);
  };
  const cuts = padded
    .slice(1)
    .map(([from], index): Cut => ({ from: padded[index]![1], to: from, x: starts[index + 1]! - cutWidth / 2 }));
  return { x, time, cuts, pieces: padded };
}

function merge(spans: Span[]): Span[] {
  const merged: Span[] = [];
  for (const [from, to] of [...spans].sort((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last && from <= last[1]) last[1] = Math.max(last[1], to);
    else merged.push([from, to]);
  }
  return merged;
}

const HOUR = 3_600_000;
export function timeTicks(from: number, to: number, width: number): number[] {
  const most = Math.max(2, Math.floor(width / 90));
  const steps = [1 / 60, 1 / 12, 0.25, 1, 3, 6, 12, 24, 48, 168, 336].map((hours) => hours * HOUR);
  const step = steps.find((one) => (to - from) / one <= most) ?? to - from;
  return ticks(from, to, step);
}
