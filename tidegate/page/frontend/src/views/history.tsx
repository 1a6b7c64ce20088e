/** Throughput and latency over days. */
import { path } from "../api";
import { compact, compactDuration, count, duration } from "../format";
import { useClock, useLive } from "../live";
import { Chart } from "../parts/chart";
import { Answer } from "../parts/answer";
import { Empty } from "../parts/basics";
import { href } from "../route";
import type { Bucket, History } from "../server_types";

const SPANS = [1, 7, 30] as const;
const DAY_MS = 86_400_000;
const EVERY_MS = 30_000; // the shortest bucket is longer

export function HistoryTab({ name, query }: { name: string; query: URLSearchParams }) {
  const days = SPANS.find((span) => String(span) === query.get("days")) ?? 7;
  const live = useLive<History>(path(["pipelines", name, "history"], { days }), EVERY_MS);
  return (
    <section aria-labelledby="history">
      <h2 id="history" class="spoken">
        History
      </h2>
      <nav class="chips" aria-label="Length of time">
        {SPANS.map((span) => (
          <a
            key={span}
            href={href(["pipelines", name, "history"], { days: span })}
            aria-current={span === days ? "page" : undefined}
          >
            {span === 1 ? "1 day" : `${span} days`}
          </a>
        ))}
      </nav>
      <Answer live={live} what="the history">
        {(history) =>
          history.buckets.length ? (
            <Charts history={history} days={days} />
          ) : (
            <Empty title={`Nothing has committed in ${days === 1 ? "the last day" : `the last ${days} days`}.`}>
              {days < 30 && (
                <p>
                  <a href={href(["pipelines", name, "history"], { days: 30 })}>Look at 30 days</a>
                </p>
              )}
            </Empty>
          )
        }
      </Answer>
    </section>
  );
}

function Charts({ history, days }: { history: History; days: number }) {
  const now = useClock(60_000);
  const bucketMs = history.bucket_seconds * 1000;
  const shared = {
    rows: history.buckets,
    at: (bucket: Bucket) => Date.parse(bucket.at),
    bucketMs,
    from: now - days * DAY_MS,
    to: now + bucketMs / 2,
  };
  const per = `per ${duration(history.bucket_seconds).replace(/^1 /, "")}`;
  return (
    <div class="charts">
      <Chart
        {...shared}
        title="Rows"
        note={`source rows that committed, ${per}`}
        show={count}
        tick={compact}
        series={[{ name: "rows", kind: "bar", style: "fill-processing", value: (b) => b.rows }]}
      />
      <Chart
        {...shared}
        title="Batches"
        note={`that committed, ${per}`}
        show={count}
        tick={compact}
        series={[
          { name: "batches", kind: "bar", style: "fill-committed", value: (b) => b.batches },
          { name: "of these skipped", kind: "bar", style: "fill-halted", value: (b) => b.skipped },
        ]}
      />
      <Chart
        {...shared}
        title="Processing"
        note="from the start of the attempt to its seal"
        show={duration}
        tick={compactDuration}
        series={[
          { name: "median", kind: "line", style: "stroke-processing", value: (b) => b.processing_p50 },
          { name: "95 of 100 within", kind: "dashed", style: "stroke-failed", value: (b) => b.processing_p95 },
        ]}
      />
      <Chart
        {...shared}
        title="Commit latency"
        note="from the seal to the commit: the wait for the turn, and the merge"
        show={duration}
        tick={compactDuration}
        series={[
          { name: "median", kind: "line", style: "stroke-committed", value: (b) => b.commit_latency_p50 },
          { name: "95 of 100 within", kind: "dashed", style: "stroke-failed", value: (b) => b.commit_latency_p95 },
        ]}
      />
      {history.buckets.some((bucket) => bucket.quarantined > 0) && (
        <Chart
          {...shared}
          title="Quarantine"
          note={`records that were set aside, ${per}`}
          show={count}
          tick={compact}
          series={[{ name: "records", kind: "bar", style: "fill-failed", value: (b) => b.quarantined }]}
        />
      )}
    </div>
  );
}
