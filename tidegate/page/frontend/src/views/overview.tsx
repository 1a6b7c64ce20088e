/** All pipelines: which of them need a person, what waits, and why. */
import { useEffect, useRef, useState } from "preact/hooks";
import { useAnnounced } from "../announce";
import { path } from "../api";
import { count, duration, plural, rate } from "../format";
import { useLive } from "../live";
import { Answer } from "../parts/answer";
import { Ago, Empty, SeverityMark } from "../parts/basics";
import { PhaseBar } from "../parts/phase_bar";
import { Table, type TableColumn } from "../parts/table";
import { CauseHelp, CauseSentence } from "../parts/why";
import { href, pipelineHref } from "../route";
import type { PipelineRow, Pipelines } from "../server_types";
import { summary } from "../verdict";

const LIMIT = 200;
const TYPING_MS = 200;

export function Overview({ search }: { search: string }) {
  const live = useLive<Pipelines>(path(["pipelines"], { search, limit: LIMIT }));
  const verdict = live.data && !live.isOther ? summary(live.data.total, live.data.pipelines, search) : null;
  useAnnounced("overview", verdict?.text ?? null);
  return (
    <>
      <div class="heading">
        <h1 tabIndex={-1}>Pipelines</h1>
        <Search search={search} />
      </div>
      <Answer live={live} what="the pipelines">
        {({ total, pipelines }) => (
          <>
            {verdict && (
              <p class={`verdict severity-${verdict.severity}`}>
                <SeverityMark severity={verdict.severity} />
                {verdict.text}
              </p>
            )}
            {pipelines.length ? (
              <Table caption="Pipelines, trouble first" hideCaption columns={COLUMNS} rows={pipelines} id={(row) => row.name} />
            ) : (
              <NoPipelines search={search} />
            )}
            {total > pipelines.length && (
              <p class="hint">
                The {count(pipelines.length)} with most trouble of {plural(total, "pipeline")} are shown. Search for the others
                by name.
              </p>
            )}
          </>
        )}
      </Answer>
    </>
  );
}

function Search({ search }: { search: string }) {
  const [typed, setTyped] = useState(search);
  const timer = useRef<ReturnType<typeof setTimeout>>(undefined);
  useEffect(() => setTyped(search), [search]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const find = (text: string) => {
    setTyped(text);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => {
      history.replaceState(null, "", href([], { search: text }));
      dispatchEvent(new HashChangeEvent("hashchange"));
    }, TYPING_MS);
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
        Declare one in the project's <code>pipelines</code> and its Dag in <code>dags</code>, then run{" "}
        <code>tidegate migrate</code>. If there are some, ask the administrator of Airflow to let you read their Dags.
      </p>
    </Empty>
  );
}
