/** Records that were set aside: why, their text, how to mend and replay them. */
import { useState } from "preact/hooks";
import { ActionButton } from "../actions";
import { path } from "../api";
import { count, plural } from "../format";
import { useLive } from "../live";
import { Answer } from "../parts/answer";
import { Ago, Empty } from "../parts/basics";
import { MendDialog } from "../parts/mend_dialog";
import { Table } from "../parts/table";
import { batchHref, href } from "../route";
import type { PipelineDetail as Pipeline, Quarantine, QuarantinedRecord } from "../server_types";

const LIMIT = 50;
const TXIDS_SHOWN = 12;

export function QuarantineTab({ pipeline, query }: { pipeline: Pipeline; query: URLSearchParams }) {
  const { name, may_act: mayAct } = pipeline;
  const [txid, after] = [query.get("txid"), query.get("after")];
  const [mending, setMending] = useState<QuarantinedRecord | null>(null);
  const live = useLive<Quarantine>(path(["pipelines", name, "quarantine"], { txid, after, limit: LIMIT }));
  const here = (changed: Record<string, string | number | null>) =>
    href(["pipelines", name, "quarantine"], { txid, ...changed });
  return (
    <section aria-labelledby="quarantine">
      <h2 id="quarantine" class="spoken">
        Quarantine
      </h2>
      <Answer live={live} what="quarantine">
        {(data) =>
          !data.records.length ? (
            <Empty title={txid ? `No record of txid ${txid} is in quarantine.` : "Quarantine is empty."}>
              <p>
                {txid ? (
                  <a href={href(["pipelines", name, "quarantine"])}>All records</a>
                ) : (
                  <>
                    With <code>on_poison="quarantine"</code>, records that do not fit the schema or fail a check are set aside
                    here, and the rest of their batch counts.
                  </>
                )}
              </p>
            </Empty>
          ) : (
            <>
              <div class="row spread">
                <Summary data={data} />
                {mayAct && data.total > 0 && (
                  <ActionButton pipeline={name} verb="replay" txid={txid === null ? null : Number(txid)} primary />
                )}
              </div>
              {data.by_txid.length > 1 && (
                <nav class="chips" aria-label="By batch">
                  {data.by_txid.slice(0, TXIDS_SHOWN).map(([of, records]) => (
                    <a
                      key={of}
                      href={href(["pipelines", name, "quarantine"], { txid: of })}
                      aria-current={String(of) === txid ? "page" : undefined}
                    >
                      txid {of}: {count(records)}
                    </a>
                  ))}
                  {data.by_txid.length > TXIDS_SHOWN && <span class="hint">and older ones</span>}
                </nav>
              )}
              <Table
                caption="Records in quarantine"
                hideCaption
                rows={data.records}
                id={(record) => `${record.txid} ${record.number}`}
                columns={[
                  {
                    name: "record",
                    cell: (record) => (
                      <>
                        <a href={batchHref(name, record.txid)}>txid {record.txid}</a>, number {record.number}
                      </>
                    ),
                  },
                  {
                    name: "why",
                    wide: true,
                    cell: (record) => (
                      <>
                        <bdi class="long">{record.reason}</bdi>
                        {record.origin && <bdi class="second long">{record.origin}</bdi>}
                        <Payload record={record} />
                      </>
                    ),
                  },
                  { name: "set aside", cell: (record) => <Ago at={record.quarantined_at} /> },
                  ...(mayAct
                    ? [
                        {
                          name: "mend",
                          cell: (record: QuarantinedRecord) =>
                            record.state ? null : (
                              <button
                                type="button"
                                class="small"
                                onClick={() => setMending(record)}
                                aria-label={`Mend record ${record.number} of txid ${record.txid}`}
                              >
                                Mend
                              </button>
                            ),
                        },
                      ]
                    : []),
                ]}
              />
            </>
          )
        }
      </Answer>
      <nav class="pages" aria-label="Pages of records">
        {(after || txid) && <a href={href(["pipelines", name, "quarantine"])}>&larr; all records</a>}
        {live.data?.next && <a href={here({ after: live.data.next })}>more &rarr;</a>}
      </nav>
      {mending && <MendDialog pipeline={name} record={mending} close={() => setMending(null)} />}
    </section>
  );
}

/** How much there is of both kinds, and what to do with it. */
function Summary({ data }: { data: Quarantine }) {
  const aside = data.set_aside;
  return (
    <p>
      {data.total > 0 && (
        <>
          {plural(data.total, "record waits", "records wait")} to be replayed. Fix the cause, or mend the records, and replay
          them: a new batch takes them up.{" "}
        </>
      )}
      {aside > 0 && (
        <>
          {plural(aside, "partial was", "partials were")} set aside by a commit: too late for a window, or found by a check.
          They count nowhere, and are kept to be looked at.
        </>
      )}
    </p>
  );
}

function Payload({ record }: { record: QuarantinedRecord }) {
  const mended = record.mended_payload;
  return (
    <>
      <pre
        class={`payload ${mended === null ? "" : "struck"}`}
        tabIndex={0}
        aria-label={mended === null ? "The record" : "The record as it came"}
        dir="auto"
      >
        {record.payload}
        {record.is_cut && "\u2026"}
      </pre>
      {mended !== null && (
        <>
          <span class="second">
            mended by <bdi>{record.mended_by ?? ""}</bdi>:
          </span>
          <pre class="payload" tabIndex={0} aria-label="The record as it was mended" dir="auto">
            {mended}
            {record.is_cut && "\u2026"}
          </pre>
        </>
      )}
    </>
  );
}
