/** The geometry of the timeline: one path per kind of bar, however many batches there are. */
import type { Attempt, TimelineBatch } from "../server_types";
import { timeScale, type Span, type TimeScale } from "./scale";

export const ROW = 24;
const THICK = 12;
const THIN = 4;
const NARROWEST = 2;

/** What an attempt came to. */
export type Ending = "sealed" | "failed" | "fenced" | "running";

export type Picture = {
  scale: TimeScale;
  height: number;
  rows: TimelineBatch[];
  paths: Record<string, string>;
  now: number;
  nowX: number;
  isLive: boolean;
};

const ms = (iso: string): number => Date.parse(iso);

/** An attempt is over when it sealed, failed, or a newer one took the fence. */
export function ending(batch: TimelineBatch, index: number): { ending: Ending; end: number | null } {
  const attempt = batch.attempts[index]!;
  const newer = batch.attempts[index + 1];
  const isFenced = attempt.error?.startsWith("ATTEMPT_FENCED");
  if (attempt.failed_at) return { ending: isFenced ? "fenced" : "failed", end: ms(attempt.failed_at) };
  if (newer) return { ending: "fenced", end: ms(attempt.sealed_at ?? attempt.seen_at ?? newer.started_at) };
  if (attempt.sealed_at) return { ending: "sealed", end: ms(attempt.sealed_at) };
  if (batch.commit) return { ending: "fenced", end: ms(attempt.seen_at ?? attempt.started_at) };
  return { ending: "running", end: null };
}

/** When the newest attempt had sealed, so that from then on the batch waits for its turn. */
export const sealedAt = (batch: TimelineBatch): number | null => {
  const newest: Attempt | undefined = batch.attempts.at(-1);
  return newest?.sealed_at ? ms(newest.sealed_at) : null;
};

export const isOpen = (batch: TimelineBatch): boolean => batch.commit === null;

/** Draw batches, the newest on top, on so many pixels. */
export function picture(batches: TimelineBatch[], cursor: number, now: number, width: number, isTrue: boolean): Picture {
  const rows = [...batches].sort((a, b) => b.txid - a.txid);
  const isLive = rows.some((batch) => batch.attempts.some((_, index) => ending(batch, index).ending === "running"));
  const waits = rows.some(isOpen);
  const scale = timeScale(busySpans(rows, now, waits), width, isTrue);
  const paths: Record<string, string> = {};
  const add = (kind: string, path: string) => (paths[kind] = (paths[kind] ?? "") + path);
  const bar = (kind: string, row: number, from: number, to: number, thickness: number) => {
    const [left, right] = [scale.x(from), scale.x(to)];
    const top = row * ROW + (ROW - thickness) / 2;
    add(kind, `M${left.toFixed(1)} ${top}h${Math.max(NARROWEST, right - left).toFixed(1)}v${thickness}H${left.toFixed(1)}z`);
  };
  rows.forEach((batch, row) => {
    const middle = row * ROW + ROW / 2;
    const began = batch.attempts[0] ? ms(batch.attempts[0].started_at) : batch.commit ? ms(batch.commit.committed_at) : now;
    add("planned", `M${scale.x(ms(batch.opened_at)).toFixed(1)} ${middle}H${scale.x(began).toFixed(1)}`);
    batch.attempts.forEach((attempt, index) => {
      const { ending: how, end } = ending(batch, index);
      const [from, to] = [ms(attempt.started_at), end ?? now];
      bar(how, row, from, to, THICK);
      if (how === "failed") add("cross", cross(scale.x(to), middle));
    });
    const sealed = sealedAt(batch);
    const commit = batch.commit;
    if (sealed !== null) bar("wait", row, sealed, commit ? ms(commit.committed_at) : now, THIN);
    if (commit) {
      const kind = commit.skipped ? "skipped" : "commit";
      const right = Math.max(scale.x(ms(commit.merged_at)), scale.x(ms(commit.committed_at)) + 3);
      const left = scale.x(ms(commit.committed_at));
      add(kind, `M${left.toFixed(1)} ${row * ROW + 2}H${right.toFixed(1)}v${ROW - 4}H${left.toFixed(1)}z`);
    }
  });
  paths["cursor"] = staircase(rows, scale);
  const nowX = scale.x(now);
  paths["cursor-now"] = cursorNow(rows, cursor, scale, nowX);
  return { scale, height: rows.length * ROW, rows, paths, now, nowX, isLive: isLive || waits };
}

const LONGEST_RUNNING = 2; // times everything that is over: the rest of an attempt in work is cut

/** When something was done: attempts, commits, and now if something is still open. */
function busySpans(rows: TimelineBatch[], now: number, waits: boolean): Span[] {
  const over = rows.flatMap((batch) =>
    batch.attempts.map((attempt, index) => (ending(batch, index).end ?? ms(attempt.started_at)) - ms(attempt.started_at)),
  );
  const most = rows.length < 4 ? Infinity : LONGEST_RUNNING * over.reduce((sum, time) => sum + time, 0);
  const spans = rows.flatMap((batch) => [
    ...batch.attempts.map((attempt, index): Span => {
      const from = ms(attempt.started_at);
      return [from, ending(batch, index).end ?? Math.min(now, from + most)];
    }),
    ...(batch.commit ? [[ms(batch.commit.committed_at), ms(batch.commit.merged_at)] as Span] : []),
    ...(batch.attempts.length || batch.commit ? [] : [[ms(batch.opened_at), ms(batch.opened_at)] as Span]),
  ]);
  return waits || !spans.length ? [...spans, [now, now]] : spans;
}

/** The last committed txid over time, in steps: up to a batch's row when its commit is done. */
function staircase(rows: TimelineBatch[], scale: TimeScale): string {
  const commits = rows
    .flatMap((batch, row) => (batch.commit ? [{ x: scale.x(ms(batch.commit.merged_at)), y: row * ROW + ROW / 2 }] : []))
    .reverse();
  return commits.map(({ x, y }, index) => (index ? `H${x.toFixed(1)}V${y}` : `M${x.toFixed(1)} ${y}`)).join("");
}

/** From the cursor's last step to now. */
function cursorNow(rows: TimelineBatch[], cursor: number, scale: TimeScale, nowX: number): string {
  const row = rows.findIndex((batch) => batch.txid === cursor);
  const commit = rows[row]?.commit;
  if (!commit) return "";
  return `M${scale.x(ms(commit.merged_at)).toFixed(1)} ${row * ROW + ROW / 2}H${nowX.toFixed(1)}`;
}

const cross = (x: number, y: number): string => `M${(x - 4).toFixed(1)} ${y - 4}l8 8m0-8l-8 8`;
