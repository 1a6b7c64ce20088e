/** Processing and commit of each batch over time, with the cursor. */
import { useState } from "preact/hooks";
import { path } from "../api";
import { useLive } from "../live";
import { Answer } from "../parts/answer";
import { Empty } from "../parts/basics";
import { href, pipelineHref } from "../route";
import { Drawing } from "../timeline/drawing";
import { Legend } from "../timeline/legend";
import type { Timeline } from "../server_types";

const SIZES = [25, 50, 100, 200, 500] as const;

export function TimelineTab({ name, query }: { name: string; query: URLSearchParams }) {
  const size = SIZES.find((one) => String(one) === query.get("last")) ?? 50;
  const to = Number(query.get("to")) || null;
  const [isTrue, setTrue] = useState(false);
  const range = to === null ? { last: size } : { from: Math.max(1, to - size + 1), to };
  const live = useLive<Timeline>(path(["pipelines", name, "timeline"], range));
  const { data } = live;
  const here = (changed: Record<string, string | number | null>) =>
    href(["pipelines", name, "timeline"], { last: size === 50 ? null : size, to, ...changed });
  const oldest = data?.batches.length ? Math.min(...data.batches.map((batch) => batch.txid)) : null;
  const newest = data?.batches.length ? Math.max(...data.batches.map((batch) => batch.txid)) : null;
  return (
    <section aria-labelledby="timeline">
      <h2 id="timeline" class="spoken">
        Timeline
      </h2>
      <div class="row spread">
        <div class="row">
          <label class="inline">
            batches
            <select value={size} onChange={(event) => (location.hash = here({ last: event.currentTarget.value }))}>
              {SIZES.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
          <label class="inline">
            <input type="checkbox" checked={isTrue} onChange={(event) => setTrue(event.currentTarget.checked)} /> keep idle time
          </label>
          <a href={pipelineHref(name, "batches")}>as a table</a>
        </div>
        <nav class="pages" aria-label="Older and newer batches">
          {oldest !== null && oldest > 1 && <a href={here({ to: oldest - 1 })}>&larr; older</a>}
          {to !== null && newest !== null && <a href={here({ to: newest + size })}>newer &rarr;</a>}
          {to !== null && <a href={here({ to: null })}>newest</a>}
        </nav>
      </div>
      <Answer live={live} what="the timeline">
        {(data) =>
          !data.batches.length ? (
            <Empty title={to === null ? "No batch has been planned yet." : "There are no batches in this range."}>
              <p>
                {to === null ? (
                  <>
                    A run plans batches when the source has something new: <code>tidegate trigger {name} --wait</code>
                  </>
                ) : (
                  <a href={here({ to: null })}>The newest batches</a>
                )}
              </p>
            </Empty>
          ) : (
            <>
              <Legend />
              <Drawing name={name} timeline={data} isTrue={isTrue} />
            </>
          )
        }
      </Answer>
    </section>
  );
}
