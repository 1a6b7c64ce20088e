/** One pipeline: how it is and why, and tabs for everything else. */
import { useAnnounced } from "../announce";
import { path } from "../api";
import { ActionButton } from "../actions";
import { count, duration, plural, rate } from "../format";
import { useLive } from "../live";
import { Answer, Guarded } from "../parts/answer";
import { Ago, Empty, Facts, SeverityMark } from "../parts/basics";
import { PhaseBar } from "../parts/phase_bar";
import { Tiles } from "../parts/tiles";
import { WhyChain } from "../parts/why";
import { pipelineHref, TABS, type Tab } from "../route";
import type { PipelineDetail as Pipeline } from "../server_types";
import { AuditTrail } from "./audit";
import { BatchesTab } from "./batches";
import { QuarantineTab } from "./quarantine";
import { StatesTab } from "./states";
import { TimelineTab } from "./timeline";

type Properties = { name: string; section: string | undefined; item: string | undefined; query: URLSearchParams };

export function PipelineView({ name, section, item, query }: Properties) {
  const live = useLive<Pipeline>(path(["pipelines", name]));
  const { data: pipeline } = live;
  const tab: Tab = TABS.find((known) => known === section) ?? "timeline";
  useAnnounced(name, pipeline ? pipeline.why.sentence : null);
  return (
    <>
      <nav class="path" aria-label="Where you are">
        <a href="#/">Pipelines</a>
      </nav>
      <h1 tabIndex={-1}>
        {pipeline && (
          <SeverityMark
            severity={pipeline.why.severity}
            paused={pipeline.paused !== null && pipeline.why.severity !== "error"}
          />
        )}
        {name}
      </h1>
      <Answer live={live} what={name}>
        {(pipeline) => (
          <>
            {pipeline.description && <p class="description">{pipeline.description}</p>}
            {!pipeline.declared && (
              <p class="notice severity-warning">The code no longer declares this pipeline. What it committed is still here.</p>
            )}
            <section aria-label="Why" class="panel">
              <WhyChain pipeline={name} causes={pipeline.causes} mayAct={pipeline.may_act} />
            </section>
            <Figures pipeline={pipeline} />
            {pipeline.may_act && <Buttons pipeline={pipeline} />}
          </>
        )}
      </Answer>
      {pipeline && (
        <Guarded what={`the ${tab}`} subject={tab}>
          <nav class="tabs" aria-label={`Views of ${name}`}>
            {TABS.map((known) => (
              <a key={known} href={pipelineHref(name, known)} aria-current={known === tab ? "page" : undefined}>
                {known}
                {known === "quarantine" && pipeline.quarantined > 0 && (
                  <span class="counter">{count(pipeline.quarantined)}</span>
                )}
              </a>
            ))}
          </nav>
          {tab === "timeline" && <TimelineTab name={name} query={query} />}
          {tab === "batches" && <BatchesTab name={name} query={query} />}
          {tab === "states" && <StatesTab pipeline={pipeline} state={item} query={query} />}
          {tab === "quarantine" && <QuarantineTab pipeline={pipeline} query={query} />}
          {tab === "actions" && <ActionsTab pipeline={pipeline} />}
        </Guarded>
      )}
    </>
  );
}

function Figures({ pipeline }: { pipeline: Pipeline }) {
  return (
    <Tiles
      tiles={[
        {
          name: "lag",
          value: pipeline.pending ? plural(pipeline.pending, "txid") : "none",
          below:
            pipeline.pending && pipeline.lag_seconds !== null
              ? duration(pipeline.lag_seconds)
              : "all that was planned has committed",
        },
        { name: "cursor", value: `txid ${pipeline.committed}`, below: <Ago at={pipeline.committed_at} /> },
        { name: "rows per second", value: rate(pipeline.rows_per_second), below: "last hour with commits" },
        {
          name: "uncommitted",
          value: <PhaseBar phases={pipeline.phases} />,
          below: `a window of ${plural(pipeline.window, "batch", "batches")}`,
        },
        {
          name: "quarantine",
          value: pipeline.quarantined ? plural(pipeline.quarantined, "record") : "empty",
          below: pipeline.quarantined ? (
            <a href={pipelineHref(pipeline.name, "quarantine")}>why, and what to do</a>
          ) : (
            "no record was set aside"
          ),
        },
      ]}
    />
  );
}

function Buttons({ pipeline }: { pipeline: Pipeline }) {
  const { name, paused, phases } = pipeline;
  return (
    <div class="row actions" role="group" aria-label="Actions">
      <ActionButton pipeline={name} verb="trigger" />
      {paused ? <ActionButton pipeline={name} verb="resume" /> : <ActionButton pipeline={name} verb="pause" />}
      {Boolean(phases.halted || phases.failed) && <ActionButton pipeline={name} verb="retry" />}
      {pipeline.quarantined > 0 && <ActionButton pipeline={name} verb="replay" />}
    </div>
  );
}

function ActionsTab({ pipeline }: { pipeline: Pipeline }) {
  return (
    <section aria-labelledby="audit">
      <h2 id="audit">Done by hand</h2>
      {pipeline.actions.length ? (
        <AuditTrail pipeline={pipeline.name} actions={pipeline.actions} caption="The newest first, at most 100" />
      ) : (
        <Empty title="Nobody has done anything by hand.">
          <p>Retries, skips, pauses and replays appear here, with the operator and the reason.</p>
        </Empty>
      )}
      <h2>About the pipeline</h2>
      <Facts
        facts={[
          ["source", pipeline.source_kind],
          ["guarantee", pipeline.guarantee],
          ["window", `${plural(pipeline.window, "batch", "batches")} in flight`],
          ["states", pipeline.states.map((state) => `${state.name} (${state.kind})`).join(", ")],
          ["declaration registered", <Ago at={pipeline.registered_at} />],
        ]}
      />
    </section>
  );
}
