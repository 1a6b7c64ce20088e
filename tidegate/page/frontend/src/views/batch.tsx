/** The whole story of one batch. */
import { ActionButton } from "../actions";
import { useAnnounced } from "../announce";
import { path } from "../api";
import { absolute, between, count, duration, plural } from "../format";
import { useLive } from "../live";
import { Answer, Guarded } from "../parts/answer";
import { Ago, Empty, Facts, Outward, PhaseBadge } from "../parts/basics";
import { SourceMetadata } from "../parts/source_metadata";
import { WhyChain } from "../parts/why";
import { batchHref, href, pipelineHref } from "../route";
import type { Batch } from "../server_types";
import { Attempts, Seals } from "./attempts";
import { AuditTrail } from "./audit";

export function BatchView({ name, txid }: { name: string; txid: string }) {
  const isTxid = /^[1-9]\d{0,18}$/.test(txid);
  const live = useLive<Batch>(isTxid ? path(["pipelines", name, "batches", txid]) : null);
  const { data: story } = live;
  useAnnounced(`${name} ${txid}`, story ? `Txid ${txid} is ${story.batch.phase}.` : null);
  return (
    <>
      <nav class="path" aria-label="Where you are">
        <a href="#/">Pipelines</a>
        <a href={pipelineHref(name)}>{name}</a>
        <a href={pipelineHref(name, "batches")}>batches</a>
      </nav>
      <div class="heading">
        <h1 tabIndex={-1}>
          txid {txid} {story && <PhaseBadge phase={story.batch.phase} />}
        </h1>
        {isTxid && <Neighbours name={name} txid={Number(txid)} hasNext={story?.has_next ?? false} />}
      </div>
      {!isTxid && <Empty title={`\u201c${txid}\u201d is not a txid: txids are whole numbers from 1.`} />}
      {isTxid && (
        <Answer live={live} what={`txid ${txid}`}>
          {(story) => <Story name={name} story={story} />}
        </Answer>
      )}
    </>
  );
}

function Story({ name, story }: { name: string; story: Batch }) {
  const { may_act: mayAct } = story;
  const { txid } = story.batch;
  return (
    <>
      {story.why.causes.length > 0 && !isOver(story) && (
        <section class="panel" aria-labelledby="why">
          <h2 id="why">Why it {story.batch.phase === "processing" ? "has not committed" : "waits"}</h2>
          <WhyChain pipeline={name} causes={story.why.causes} mayAct={mayAct} />
        </section>
      )}
      {mayAct && <Buttons name={name} story={story} cursor={story.cursor} />}
      <div class="columns">
        <section aria-labelledby="summary">
          <h2 id="summary">Summary</h2>
          <Summary name={name} story={story} />
        </section>
        <section aria-labelledby="elsewhere">
          <h2 id="elsewhere">Elsewhere</h2>
          <Links story={story} />
        </section>
      </div>
      <section aria-labelledby="attempts">
        <h2 id="attempts">Attempts</h2>
        {story.attempts.length ? <Attempts story={story} /> : <Empty title="No attempt yet: no run has processed it." />}
      </section>
      <section aria-labelledby="input">
        <h2 id="input">Input</h2>
        <p class="hint">
          Frozen when the batch was planned: every attempt reads exactly this.
          {story.source_digest && (
            <>
              {" "}
              Digest <code class="hash">{story.source_digest}</code>
            </>
          )}
        </p>
        <Guarded what="the input">
          <SourceMetadata source={story.source} />
        </Guarded>
      </section>
      {story.checks.length > 0 && (
        <section aria-labelledby="checks">
          <h2 id="checks">Checks</h2>
          <Facts
            facts={story.checks.map(({ name: check, found }) => [
              check,
              found === null ? "found nothing" : <bdi class="long">{found}</bdi>,
            ])}
          />
        </section>
      )}
      {story.seals.length > 0 && (
        <section aria-labelledby="seals">
          <h2 id="seals">Seals</h2>
          <Seals seals={story.seals} />
        </section>
      )}
      <section aria-labelledby="by-hand">
        <h2 id="by-hand">Done by hand</h2>
        {story.actions.length ? (
          <AuditTrail pipeline={name} actions={story.actions} caption={`What operators did with txid ${txid}`} />
        ) : (
          <p class="none">Nothing.</p>
        )}
      </section>
    </>
  );
}

const isOver = (story: Batch): boolean => story.batch.phase === "committed" || story.batch.phase === "skipped";

function Neighbours({ name, txid, hasNext }: { name: string; txid: number; hasNext: boolean }) {
  return (
    <nav class="pages" aria-label="Neighbouring batches">
      {txid > 1 && <a href={batchHref(name, txid - 1)}>&larr; txid {txid - 1}</a>}
      {hasNext && <a href={batchHref(name, txid + 1)}>txid {txid + 1} &rarr;</a>}
    </nav>
  );
}

function Buttons({ name, story, cursor }: { name: string; story: Batch; cursor: number }) {
  const { txid, phase } = story.batch;
  const isOpen = !isOver(story);
  const isFailed = phase === "failed" || phase === "halted";
  const isOffered = story.why.causes.some((cause) => cause.action?.verb === "retry" && cause.action.txid === txid); // above
  if (!isOpen && txid !== cursor && !story.quarantined) return null;
  return (
    <div class="row actions" role="group" aria-label="Actions">
      {isFailed && !isOffered && <ActionButton pipeline={name} verb="retry" txid={txid} primary />}
      {isOpen && <ActionButton pipeline={name} verb="skip" txid={txid} />}
      {phase === "committed" && txid === cursor && <ActionButton pipeline={name} verb="redo" txid={txid} />}
      {story.quarantined > 0 && <ActionButton pipeline={name} verb="replay" txid={txid} />}
    </div>
  );
}

function Summary({ name, story: { batch, commit, quarantined, set_aside: aside } }: { name: string; story: Batch }) {
  return (
    <Facts
      facts={[
        ["skipped because", commit?.skipped_reason ? <bdi>{commit.skipped_reason}</bdi> : null],
        ["waits for", batch.waits_for && <bdi class="long">{batch.waits_for}</bdi>],
        ["planned", <Exactly at={batch.opened_at} />],
        [
          "processing",
          batch.started_at &&
            (batch.sealed_at ? duration(between(batch.started_at, batch.sealed_at)) : <Exactly at={batch.started_at} />),
        ],
        [
          "waited for its turn",
          batch.sealed_at && batch.committed_at && duration(between(batch.sealed_at, batch.committed_at)),
        ],
        ["committed", (batch.merged_at ?? batch.committed_at) && <Exactly at={(batch.merged_at ?? batch.committed_at)!} />],
        ["commit took", duration(between(batch.committed_at, batch.merged_at)).replace("\u2013", "")],
        ["rows read", batch.source_rows === null ? null : count(batch.source_rows)],
        ["keys written", batch.key_count === null ? null : count(batch.key_count)],
        [
          "quarantine",
          quarantined + aside ? (
            <a href={href(["pipelines", name, "quarantine"], { txid: batch.txid })}>
              {[quarantined && plural(quarantined, "record"), aside && plural(aside, "partial")].filter(Boolean).join(", ")}
            </a>
          ) : null,
        ],
        ["committed by", commit && <bdi>{commit.owner}</bdi>],
      ]}
    />
  );
}

function Exactly({ at }: { at: string }) {
  return (
    <>
      <Ago at={at} /> <span class="muted">{absolute(at)}</span>
    </>
  );
}

function Links({ story: { links } }: { story: Batch }) {
  if (!links.dag_run && !links.logs.length)
    return <p class="none">It was not run by Airflow, or Airflow has forgotten the run.</p>;
  return (
    <ul class="links">
      {links.dag_run && (
        <li>
          <Outward to={links.dag_run}>Dag run in Airflow</Outward>
        </li>
      )}
      {links.logs.map((log) => (
        <li key={log.attempt}>
          <Outward to={log.url}>Log of the task of attempt {log.attempt}</Outward>
        </li>
      ))}
    </ul>
  );
}
