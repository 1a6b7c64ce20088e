/** How all pipelines are, in one sentence, and the order in which they need somebody. */
import { count, plural } from "./format";
import type { PipelineRow } from "./server_types";
import type { Severity } from "./types";

const RANK: Record<Severity, number> = { error: 0, warning: 1, info: 2, ok: 3 };

/** A pipeline that stands still by a person's wish comes after those that need one. */
const rank = (row: PipelineRow): number => (row.paused && row.why.severity !== "error" ? 1.5 : RANK[row.why.severity]);

export const byTrouble = (rows: PipelineRow[]): PipelineRow[] =>
  [...rows].sort((a, b) => rank(a) - rank(b) || (b.lag_seconds ?? -1) - (a.lag_seconds ?? -1) || a.name.localeCompare(b.name));

/** The verdict about `total` pipelines, of which the server sent those with most trouble, in this order; null about none. */
export function summary(total: number, rows: PipelineRow[]): { severity: Severity; text: string } | null {
  const last = rows.at(-1);
  if (!last) return null;
  const broken = rows.filter((row) => row.why.severity === "error");
  const waiting = rows.filter((row) => row.why.severity === "warning" && !row.paused);
  const paused = rows.filter((row) => row.paused && row.why.severity !== "error");
  const others = [
    waiting.length && `${plural(waiting.length, "pipeline waits", "pipelines wait")}`,
    paused.length && `${plural(paused.length, "pipeline is", "pipelines are")} paused`,
  ].filter(Boolean);
  const said = [...(broken.length ? [`${plural(broken.length, "pipeline needs", "pipelines need")} a person`] : []), ...others];
  // Those that were left out have no more trouble than the last that was sent.
  const isAll = total === rows.length || last.why.severity === "ok";
  const among = isAll ? "" : `Of ${plural(total, "pipeline")}, the ${count(rows.length)} with most trouble: `;
  if (said.length) return { severity: broken.length ? "error" : "warning", text: `${among}${said.join(", ")}.` };
  if (!isAll) return { severity: "info", text: `${among}none needs a person or waits.` };
  return { severity: "ok", text: total === 1 ? "The pipeline flows." : `All ${count(total)} pipelines flow.` };
}
