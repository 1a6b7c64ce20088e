/** How all pipelines are, in one sentence, and the order in which they need somebody. */
import { capitalized, count, plural } from "./format";
import type { PipelineRow } from "./server_types";
import type { Severity } from "./types";

const RANK: Record<Severity, number> = { error: 0, warning: 1, info: 2, ok: 3 };

/** A pipeline that stands still by a person's wish comes after those that need one. */
const rank = (row: PipelineRow): number => (row.paused && row.why.severity !== "error" ? 1.5 : RANK[row.why.severity]);

export const byTrouble = (rows: PipelineRow[]): PipelineRow[] =>
  [...rows].sort((a, b) => rank(a) - rank(b) || (b.lag_seconds ?? -1) - (a.lag_seconds ?? -1) || a.name.localeCompare(b.name));

/**
 * The verdict about `total` pipelines, of which the server sent those with most trouble, in this order; null about none. With a
 * `search`, the verdict is about those that were found.
 */
export function summary(total: number, rows: PipelineRow[], search = ""): { severity: Severity; text: string } | null {
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
  const found = search ? `With \u201c${search}\u201d in the name: ` : "";
  const among = isAll ? found : `${found}of ${plural(total, "pipeline")}, the ${count(rows.length)} with most trouble: `;
  const verdict = (severity: Severity, text: string) => ({ severity, text: capitalized(among + text) });
  if (said.length) return verdict(broken.length ? "error" : "warning", `${said.join(", ")}.`);
  if (!isAll) return verdict("info", "none needs a person or waits.");
  return verdict("ok", total === 1 ? "the pipeline flows." : `all ${count(total)} pipelines flow.`);
}
