/** The states of a pipeline: one key, or page by page, or all as CSV. */
import { useEffect, useState } from "preact/hooks";
import { address } from "../api";
import { text } from "../format";
import { useLive } from "../live";
import { Answer } from "../parts/answer";
import { Empty } from "../parts/basics";
import { Table } from "../parts/table";
import { href } from "../route";
import type { PipelineDetail as Pipeline, Rows, State } from "../server_types";

const LIMIT = 50;
const NUMBERS = /^(big|small)?int|^integer|^numeric|^decimal|^double|^real|^float/i;

export function StatesTab({
  pipeline,
  state: chosen,
  query,
}: {
  pipeline: Pipeline;
  state: string | undefined;
  query: URLSearchParams;
}) {
  const state = pipeline.states.find((one) => one.name === chosen) ?? (chosen === undefined ? pipeline.states[0] : undefined);
  return (
    <section aria-labelledby="states">
      <h2 id="states" class="spoken">
        States
      </h2>
      {pipeline.states.length > 1 && (
        <nav class="chips" aria-label="States">
          {pipeline.states.map((one) => (
            <a
              key={one.name}
              href={href(["pipelines", pipeline.name, "states", one.name])}
              aria-current={one === state ? "page" : undefined}
            >
              {one.name}
            </a>
          ))}
        </nav>
      )}
      {state ? (
        <OneState key={state.name} pipeline={pipeline.name} state={state} query={query} />
      ) : (
        <Empty title={`${pipeline.name} has no state ${chosen ?? ""}.`} />
      )}
    </section>
  );
}

function OneState({ pipeline, state, query }: { pipeline: string; state: State; query: URLSearchParams }) {
  const key = query.getAll("key");
  const after = query.get("after");
  const isLookup = key.length > 0 && key.length === state.keys.length;
  const search = new URLSearchParams(
    isLookup ? key.map((part) => ["key", part]) : [["limit", String(LIMIT)], ...(after ? [["after", after]] : [])],
  );
  const base = `api/pipelines/${encodeURIComponent(pipeline)}/states/${encodeURIComponent(state.name)}`;
  const live = useLive<Rows>(`${base}/rows?${search}`);
  const here = ["pipelines", pipeline, "states", state.name];
  return (
    <>
      <p class="hint">
        <strong>{state.name}</strong> is {state.kind === "opaque" ? "an" : "a"} {state.kind} state: {describe(state)}. On the
        command line:{" "}
        <code>
          tidegate inspect {pipeline} --state {state.name}
        </code>
      </p>
      <div class="row spread">
        {state.keys.length > 0 && <KeyForm state={state} given={isLookup ? key : []} here={here} />}
        <a class="button" href={address(`${base}.csv`)} download>
          Download CSV
        </a>
      </div>
      <Answer live={live} what={state.name}>
        {(data) =>
          !data.rows.length ? (
            <Empty
              title={
                isLookup ? `No row has the key ${key.join(", ")}.` : after ? "No more rows." : `${state.name} has no rows yet.`
              }
            >
              {!isLookup && !after && <p>Rows appear when the first batch commits.</p>}
            </Empty>
          ) : (
            <div class="scroll-x" tabIndex={0} role="region" aria-label={`Rows of ${state.name}`}>
              <Table
                caption={`Rows of ${state.name}, by key`}
                hideCaption
                rows={data.rows}
                id={(row) => JSON.stringify(row.slice(0, Math.max(1, state.keys.length)))}
                columns={data.columns.map((column, position) => ({
                  name: column.name,
                  number: NUMBERS.test(column.type),
                  cell: (row: unknown[]) => <Value value={row[position]} />,
                }))}
              />
            </div>
          )
        }
      </Answer>
      <nav class="pages" aria-label="Pages of rows">
        {(after || isLookup) && <a href={href(here)}>&larr; {isLookup ? "all rows" : "first rows"}</a>}
        {!isLookup && live.data?.next && <a href={href(here, { after: live.data.next })}>next rows &rarr;</a>}
      </nav>
    </>
  );
}

const SHORT = 40; // characters that are not broken into lines

function Value({ value }: { value: unknown }) {
  const shown = text(value);
  return <bdi class={value === null ? "none" : shown.length <= SHORT ? "unbroken" : ""}>{shown}</bdi>;
}

function describe(state: State): string {
  const names = (columns: { name: string }[]) => columns.map((column) => column.name).join(", ");
  return state.keys.length ? `one row per ${names(state.keys)}` : "one row for everything";
}

function KeyForm({ state, given, here }: { state: State; given: string[]; here: (string | number)[] }) {
  const [typed, setTyped] = useState<string[]>(state.keys.map((_, position) => given[position] ?? ""));
  const shown = JSON.stringify(given);
  useEffect(() => {
    if (given.length) setTyped(given);
  }, [shown]);
  const find = (event: Event) => {
    event.preventDefault();
    location.hash = `${href(here)}?${new URLSearchParams(typed.map((part) => ["key", part]))}`;
  };
  return (
    <form class="filters" onSubmit={find} aria-label="Find a key">
      {state.keys.map((column, position) => (
        <label key={column.name}>
          {column.name}
          <input
            required={column.type !== "text"}
            autocomplete="off"
            spellcheck={false}
            placeholder={column.type === "date" ? "2013-01-31" : ""}
            value={typed[position] ?? ""}
            onInput={(event) => setTyped(typed.with(position, event.currentTarget.value))}
          />
        </label>
      ))}
      <button type="submit">Find</button>
    </form>
  );
}
