/** The dialog of one action: says what will happen, asks for a reason, does it once, and says what happened. */
import { useEffect, useRef, useState } from "preact/hooks";
import { act, path, refusalOf, runAddress, startRun, type Refused } from "../api";
import { label, MEANINGS, txidList, type Request } from "../actions";
import { useLive } from "../live";
import { refreshAll } from "../polling";
import type { Outcome as Done, Prospect } from "../server_types";
import type { Verb } from "../types";
import { Failure } from "./answer";
import { Command, Outward } from "./basics";
import { Modal } from "./modal";

type Run = { id: string } | { refused: Refused };
type Result = { done: Done | null; run: Run | null };

/** Verbs that only name the command: the server lacks the role that they need. */
const COMMAND_ONLY: readonly Verb[] = ["redo"];

export function ActionDialog({ request, close }: { request: Request; close: () => void }) {
  const { pipeline, verb, txid } = request;
  const [failure, setFailure] = useState<Refused | null>(null);
  const [result, setResult] = useState<Result | null>(null);
  const [reason, setReason] = useState("");
  const [isBusy, setBusy] = useState(false);
  const busy = useRef(false); // a second click comes before the next drawing
  const reasonField = useRef<HTMLTextAreaElement>(null);

  const isAsked = verb !== "trigger" && result === null;
  const live = useLive<Prospect>(isAsked ? path(["pipelines", pipeline, "actions", verb], { txid }) : null);
  const prospect = verb === "trigger" ? triggerProspect(pipeline) : live.data;
  const error = failure ?? live.error;

  useEffect(() => {
    if (document.activeElement?.closest("button, a")) return;
    (reasonField.current ?? document.getElementById("dialog-title"))?.focus(); // a field that has gone took the focus along
  }, [prospect?.allowed]);

  const once = async (work: () => Promise<void>) => {
    if (busy.current) return;
    busy.current = true;
    setBusy(true);
    setFailure(null);
    try {
      await work();
    } catch (failed) {
      setFailure(refusalOf(failed));
    } finally {
      busy.current = false;
      setBusy(false);
      refreshAll();
    }
  };
  const confirm = () =>
    once(async () => {
      if (verb === "trigger") return setResult({ done: null, run: { id: await startRun(pipeline, reason) } });
      const done = await act<Done>(path(["pipelines", pipeline, "actions", verb]), { txid, reason });
      setResult({ done, run: done.run_needed ? await runOrRefusal(pipeline, `${label(verb, txid)}: ${reason}`) : null });
    });
  const runAgain = () => once(async () => setResult({ done: result?.done ?? null, run: await runOrRefusal(pipeline, reason) }));

  const mayConfirm = prospect?.allowed && !result && !COMMAND_ONLY.includes(verb);
  const needsReason = verb !== "trigger";
  return (
    <Modal title={`${label(verb, txid)}: ${pipeline}`} close={close} isBusy={isBusy} isDone={result !== null}>
      {!prospect && !error && !result && <p class="loading">Asking what will happen &hellip;</p>}
      {prospect && !result && (
        <p class="will" id="will">
          {prospect.will}
        </p>
      )}
      {prospect?.refusal && !result && (
        <p class="notice severity-warning" role="alert">
          {prospect.refusal}
        </p>
      )}
      {mayConfirm && (
        <form
          id="action"
          onSubmit={(event) => {
            event.preventDefault();
            void confirm();
          }}
        >
          <label>
            Reason{needsReason ? "" : " (optional)"}
            <textarea
              rows={2}
              maxLength={1000}
              required={needsReason}
              aria-describedby="will"
              ref={reasonField}
              value={reason}
              onInput={(event) => setReason(event.currentTarget.value)}
            />
          </label>
          <p class="hint">
            {needsReason
              ? "It is kept in the ledger with your name, for those who look later."
              : "It becomes the note of the run in Airflow."}
          </p>
        </form>
      )}
      {result && <Outcome pipeline={pipeline} result={result} />}
      {error && <Failure error={error} isAction={failure !== null} />}
      {prospect && !result && (
        <p class="or">
          {COMMAND_ONLY.includes(verb) ? "Type it on the command line: " : "The same on the command line: "}
          <Command text={prospect.command} />
        </p>
      )}
      <div class="row buttons">
        {mayConfirm && (
          <button type="submit" form="action" class={verb === "skip" ? "danger" : "primary"} aria-disabled={isBusy}>
            {isBusy ? "Working \u2026" : label(verb, txid)}
          </button>
        )}
        {!prospect && error && !result && (
          <button type="button" class="primary" onClick={() => refreshAll()}>
            Ask again
          </button>
        )}
        {result?.run && "refused" in result.run && (
          <button type="button" class="primary" aria-disabled={isBusy} onClick={() => void runAgain()}>
            Start the run again
          </button>
        )}
        <button type="button" aria-disabled={isBusy} onClick={() => busy.current || close()}>
          {result || !mayConfirm ? "Close" : "Cancel"}
        </button>
      </div>
    </Modal>
  );
}

const triggerProspect = (pipeline: string): Prospect => ({
  will: `Airflow starts a run of ${pipeline}: ${MEANINGS.trigger.replace("Airflow starts a run, which ", "it ")}. If there is nothing to do, it ends at once.`,
  allowed: true,
  refusal: null,
  command: `tidegate trigger ${pipeline} --wait`,
});

/** Start the run that carries out what was decided. The decision stands even if Airflow refuses the run. */
async function runOrRefusal(pipeline: string, note: string): Promise<Run> {
  try {
    return { id: await startRun(pipeline, note) };
  } catch (failed) {
    return { refused: refusalOf(failed) };
  }
}

function Outcome({ pipeline, result: { done, run } }: { pipeline: string; result: Result }) {
  const box = useRef<HTMLDivElement>(null);
  useEffect(() => box.current?.focus(), []); // once: what is drawn later takes the focus from nobody
  return (
    <div class="notice severity-ok" role="status" tabIndex={-1} ref={box}>
      {done && <p>{done.message}</p>}
      {done && done.txids.length > 1 && <p>It concerns {txidList(done.txids)}.</p>}
      {run && "id" in run && (
        <p>
          Airflow has started the run <Outward to={runAddress(pipeline, run.id)}>{run.id}</Outward>.
        </p>
      )}
      {run && "refused" in run && (
        <p>
          But Airflow did not start a run ({run.refused.message}). Start one: <Command text={`tidegate trigger ${pipeline}`} />
        </p>
      )}
    </div>
  );
}
