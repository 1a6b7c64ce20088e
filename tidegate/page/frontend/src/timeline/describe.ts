/** The timeline in words: of one batch, and as a whole. */
import { count, duration, plural } from "../format";
import type { Timeline, TimelineBatch } from "../server_types";
import { ending, isOpen, sealedAt } from "./picture";

const seconds = (from: number, to: number): string => duration((to - from) / 1000);
const codeOf = (error: string | null): string => (error ? `: ${error.split(":")[0]}` : "");

/** What happened to a batch, in one line. */
export function story(batch: TimelineBatch, now: number): string {
  const parts = [`txid ${batch.txid}`];
  const total = batch.attempts.length;
  batch.attempts.slice(-3).forEach((attempt) => {
    const { ending: how, end } = ending(batch, batch.attempts.indexOf(attempt));
    const took = seconds(Date.parse(attempt.started_at), end ?? now);
    const name = total > 1 ? `attempt ${attempt.attempt} ` : "";
    if (how === "failed") parts.push(`${name}failed after ${took}${codeOf(attempt.error)}`);
    else if (how === "fenced") parts.push(`${name}fenced after ${took}`);
    else if (how === "running") parts.push(`${name}in work for ${took}`);
    else parts.push(`${name}processed in ${took}`);
  });
  if (!total && isOpen(batch)) parts.push("planned, not begun");
  const sealed = sealedAt(batch);
  if (batch.commit) {
    if (sealed !== null) parts.push(`waited ${seconds(sealed, Date.parse(batch.commit.committed_at))}`);
    parts.push(batch.commit.skipped ? "skipped" : "committed");
  } else if (sealed !== null) parts.push(`waits for its turn for ${seconds(sealed, now)}`);
  else if (batch.phase === "halted") parts.push("halted");
  return parts.join(", ");
}

/** The picture's alternative: what somebody would see at a glance. */
export function overall({ batches, cursor }: Timeline, now: number): string {
  const of = (phase: string) => batches.filter((batch) => batch.phase === phase).length;
  const named = (["halted", "failed", "processing", "processed", "planned"] as const)
    .filter(of)
    .map((phase) => `${count(of(phase))} ${phase}`);
  const longest = batches
    .filter((batch) => isOpen(batch) && sealedAt(batch) !== null)
    .map((batch) => (now - (sealedAt(batch) ?? 0)) / 1000);
  return [
    `${plural(batches.length, "batch", "batches")}. The cursor is at txid ${cursor}.`,
    named.length ? `Not committed: ${named.join(", ")}.` : "All have committed.",
    longest.length ? `The longest wait for a turn is ${duration(Math.max(...longest))}.` : "",
  ].join(" ");
}
