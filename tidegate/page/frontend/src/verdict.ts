/** How all pipelines are, in one sentence. */
import { capitalized, count, plural } from "./format";
import type { PipelineRow } from "./server_types";
import type { Severity } from "./types";

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
