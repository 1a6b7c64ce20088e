/** The batches of a pipeline, newest first, with filters. */
import { path } from "../api";
import { between, count, duration } from "../format";
import { useLive } from "../live";
import { Answer } from "../parts/answer";
import { Ago, Empty, ErrorCode, PhaseBadge, Since } from "../parts/basics";
import { Table, type TableColumn } from "../parts/table";
import { batchHref, href } from "../route";
import type { Batches, BatchRow } from "../server_types";
import type { Phase } from "../types";
import { fromWall } from "../zone";

const LIMIT = 50;
const PHASES: Phase[] = ["planned", "processing", "failed", "halted", "processed", "committed", "skipped"];
const FILTERS = ["phase", "error", "since", "until"] as const;

export function BatchesTab({ name, query }: { name: string; query: URLSearchParams }) {
  const filters = Object.fromEntries(FILTERS.map((filter) => [filter, query.get(filter) ?? ""])) as Record<
    (typeof FILTERS)[number],
    string
  >;
  const before = query.get("before");
  const live = useLive<Batches>(
    path(["pipelines", name, "batches"], {
      ...filters,
      since: utc(filters.since),
      until: utc(filters.until),
      before,
      limit: LIMIT,
    }),
  );
  const here = (changed: Record<string, string | number | null>) =>
    href(["pipelines", name, "batches"], { ...filters, before: null, ...changed });
  const isFiltered = Object.values(filters).some(Boolean);
  return (
    <section aria-labelledby="batches">
      <h2 id="batches" class="spoken">
        Batches
      </h2>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          phase
          <select value={filters.phase} onChange={(event) => (location.hash = here({ phase: event.currentTarget.value }))}>
            <option value="">any</option>
            {PHASES.map((phase) => (
              <option key={phase}>{phase}</option>
            ))}
          </select>
        </label>
        <label>
          error code
          <input
            value={filters.error}
            placeholder="any"
            autocomplete="off"
            spellcheck={false}
            onChange={(event) => (location.hash = here({ error: event.currentTarget.value.trim().toUpperCase() }))}
          />
        </label>
        <label>
          last event since
          <input
            type="datetime-local"
            value={filters.since}
            onChange={(event) => (location.hash = here({ since: event.currentTarget.value }))}
          />
        </label>
        <label>
          until
          <input
            type="datetime-local"
            value={filters.until}
            onChange={(event) => (location.hash = here({ until: event.currentTarget.value }))}
          />
        </label>
        {isFiltered && <a href={href(["pipelines", name, "batches"])}>all batches</a>}
      </form>
      <Answer live={live} what="the batches">
        {({ batches, next }) =>
          batches.length ? (
            <Table
              caption={`Batches of ${name}, newest first`}
              hideCaption
              columns={columns(name)}
              rows={batches}
              id={(row) => row.txid}
            />
          ) : (
            <NoBatches name={name} isFiltered={isFiltered} hasMore={next !== null} />
          )
        }
      </Answer>
      <nav class="pages" aria-label="Pages of batches">
        {before && <a href={here({})}>&larr; newest</a>}
        {live.data?.next && <a href={here({ before: live.data.next })}>older &rarr;</a>}
      </nav>
    </section>
  );
}

/** A time that was typed in the reader's zone, as the server wants it. */
function utc(typed: string): string {
  const when = fromWall(Date.parse(`${typed}Z`));
  return Number.isNaN(when) ? "" : new Date(when).toISOString();
}

const columns = (name: string): TableColumn<BatchRow>[] => [
  {
    name: "txid",
    cell: (row) => (
      <a class="strong" href={batchHref(name, row.txid)}>
        {row.txid}
      </a>
    ),
  },
  { name: "phase", cell: (row) => <PhaseBadge phase={row.phase} /> },
  {
    name: "waits for",
    wide: true,
    cell: (row) => (
      <>
        {row.waits_for && <bdi class="clamped">{row.waits_for}</bdi>}
        {row.error && row.phase !== "committed" && !row.waits_for?.includes(row.error) && <ErrorCode code={row.error} />}
      </>
    ),
  },
  { name: "attempts", number: true, cell: (row) => count(row.attempts) },
  { name: "rows", number: true, cell: (row) => count(row.source_rows) },
  { name: "keys", number: true, cell: (row) => count(row.key_count) },
  { name: "planned", cell: (row) => <Ago at={row.opened_at} /> },
  { name: "processing", number: true, cell: (row) => duration(between(row.started_at, row.sealed_at)) },
  {
    name: "wait",
    number: true,
    cell: (row) =>
      row.phase === "processed" && row.sealed_at ? (
        <Since at={row.sealed_at} />
      ) : (
        duration(between(row.sealed_at, row.committed_at))
      ),
  },
  { name: "committed", cell: (row) => <Ago at={row.merged_at ?? row.committed_at} /> },
];

function NoBatches({ name, isFiltered, hasMore }: { name: string; isFiltered: boolean; hasMore: boolean }) {
  if (hasMore) return <Empty title="None of the batches that were looked at matches. Go on with older ones." />;
  if (isFiltered) return <Empty title="No batch matches these filters." />;
  return (
    <Empty title="No batch has been planned yet.">
      <p>
        A run plans batches when the source has something new. Start one: <code>tidegate trigger {name} --wait</code>
      </p>
    </Empty>
  );
}
