/** All pipelines: which of them need a person, what waits, and why. */
import { useEffect, useState } from "preact/hooks";
import { useAnnounced } from "../announce";
import { path } from "../api";
import { count, duration, plural, rate } from "../format";
import { useLive } from "../live";
import { Ago, Empty, Loading, SeverityMark } from "../parts/basics";
import { Failure } from "../parts/action_dialog";
import { PhaseBar } from "../parts/phase_bar";
import { Table, type TableColumn } from "../parts/table";
import { CauseHelp, CauseSentence } from "../parts/why";
import { href, pipelineHref } from "../route";
import type { PipelineRow, Pipelines, Severity } from "../types";

const LIMIT = 200;
const RANK: Record<Severity, number> = { error: 0, warning: 1, info: 2, ok: 3 };

/** A pipeline that stands still by a person's wish comes after those that need one. */
const rank = (row: PipelineRow): number => (row.paused && row.why.severity !== "error" ? 1.5 : RANK[row.why.severity]);

export function Overview({ search }: { search: string }) {
  const { data, error } = useLive<Pipelines>(path(["pipelines"], { search, limit: LIMIT }));
  const rows = [...(data?.pipelines ?? [])].sort(
    (a, b) => rank(a) - rank(b) || (b.lag_seconds ?? -1) - (a.lag_seconds ?? -1) || a.name.localeCompare(b.name),
  );
  const verdict = data && summary(data.total, rows);
  useAnnounced("overview", verdict?.text ?? null);
  return (
    <>
      <div class="heading">
        <h1 tabIndex={-1}>Pipelines</h1>
        <Search search={search} />
      </div>
      {verdict && (
        <p class={`verdict severity-${verdict.severity}`}>
          <SeverityMark severity={verdict.severity} />
          {verdict.text}
        </p>
      )}
      {!data && !error && <Loading what="the pipelines" />}
      {!data && error && <Failure error={error} />}
      {data && !rows.length && <NoPipelines search={search} />}
      {rows.length > 0 && (
        <Table caption="Pipelines, trouble first" hideCaption columns={COLUMNS} rows={rows} id={(row) => row.name} />
      )}
      {data?.next && (
        <p class="hint">
          The first {count(rows.length)} of {plural(data.total, "pipeline")} are shown. Search for the others by name.
        </p>
      )}
    </>
  );
}

function Search({ search }: { search: string }) {
  const [typed, setTyped] = useState(search);
  useEffect(() => setTyped(search), [search]);
  const find = (text: string) => {
    setTyped(text);
    history.replaceState(null, "", href([], { search: text }));
    dispatchEvent(new HashChangeEvent("hashchange"));
  };
  return (
    <search>
      <label class="spoken" for="search">
        Search pipelines by name
      </label>
      <input
        id="search"
        type="search"
        placeholder="Search by name"
        autocomplete="off"
        spellcheck={false}
        value={typed}
        onInput={(event) => find(event.currentTarget.value)}
      />
    </search>
  );
}

/** The state of everything in one sentence. */
function summary(total: number, rows: PipelineRow[]): { severity: Severity; text: string } | null {
  if (!rows.length) return null;
  const broken = rows.filter((row) => row.why.severity === "error");
  const waiting = rows.filter((row) => row.why.severity === "warning" && !row.paused);
  const paused = rows.filter((row) => row.paused && row.why.severity !== "error");
  const others = [
    waiting.length && `${plural(waiting.length, "pipeline waits", "pipelines wait")}`,
    paused.length && `${plural(paused.length, "pipeline is", "pipelines are")} paused`,
  ].filter(Boolean);
  if (broken.length)
    return {
      severity: "error",
      text: [`${plural(broken.length, "pipeline needs", "pipelines need")} a person`, ...others].join(", ") + ".",
    };
  if (others.length) return { severity: "warning", text: `${others.join(", ")}.` };
  return { severity: "ok", text: total === 1 ? "The pipeline flows." : `All ${count(total)} pipelines flow.` };
}

const COLUMNS: TableColumn<PipelineRow>[] = [
  {
    name: "pipeline",
    cell: (row) => (
      <span class="named">
        <SeverityMark severity={row.why.severity} paused={row.paused !== null && row.why.severity !== "error"} />
        <a class="strong" href={pipelineHref(row.name)}>
          {row.name}
        </a>
      </span>
    ),
  },
  {
    name: "why",
    wide: true,
    cell: (row) => (
      <div class={`why severity-${row.why.severity}`}>
        <p class="sentence">
          <CauseSentence cause={row.why} />
        </p>
        {row.why.severity !== "ok" && <CauseHelp pipeline={row.name} cause={row.why} mayAct={row.may_act} />}
      </div>
    ),
  },
  {
    name: "lag",
    number: true,
    cell: (row) =>
      row.pending ? (
        <>
          <span class="figure">{plural(row.pending, "txid")}</span>
          <span class="second">{row.lag_seconds === null ? "" : duration(row.lag_seconds)}</span>
        </>
      ) : (
        <span class="none">none</span>
      ),
  },
  { name: "rows/s", number: true, cell: (row) => rate(row.rows_per_second) },
  {
    name: "committed",
    number: true,
    cell: (row) => (
      <>
        <span class="figure">txid {row.committed}</span>
        <span class="second">
          <Ago at={row.committed_at} />
        </span>
      </>
    ),
  },
  { name: "uncommitted", whole: true, cell: (row) => <PhaseBar phases={row.phases} /> },
];

function NoPipelines({ search }: { search: string }) {
  if (search)
    return (
      <Empty title={`No pipeline that you may read has \u201c${search}\u201d in its name.`}>
        <p>
          <a href="#/">Show all</a>
        </p>
      </Empty>
    );
  return (
    <Empty title="There is no pipeline yet that you may read.">
      <p>
        Declare one in the project's <code>pipelines</code> and its Dag in <code>dags</code>, then run <code>tidegate migrate</code>. If
        there are some, ask the administrator of Airflow to let you read their Dags.
      </p>
    </Empty>
  );
}
