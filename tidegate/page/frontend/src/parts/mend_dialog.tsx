/** The dialog in which an operator mends one record of quarantine. */
import { useEffect, useRef, useState } from "preact/hooks";
import { act, get, path, Refused, refusalOf } from "../api";
import { refreshAll } from "../polling";
import type { QuarantinedRecord } from "../server_types";
import { Failure } from "./answer";
import { Modal } from "./modal";

export function MendDialog({ pipeline, record, close }: { pipeline: string; record: QuarantinedRecord; close: () => void }) {
  const where = path(["pipelines", pipeline, "quarantine", record.txid, record.number]);
  const [payload, setPayload] = useState<string | null>(null);
  const [isMended, setMended] = useState(false);
  const [reason, setReason] = useState("");
  const [error, setError] = useState<Refused | null>(null);
  const [isBusy, setBusy] = useState(false);
  const busy = useRef(false); // a second click comes before the next drawing

  useEffect(() => {
    const ended = new AbortController();
    get<QuarantinedRecord>(where, null, ended.signal).then(
      (fresh) => {
        const text = fresh?.data.mended_payload ?? fresh?.data.payload ?? "";
        if (text.includes("\r")) return setError(unsafe(pipeline, record));
        setPayload(text);
        setMended(typeof fresh?.data.mended_payload === "string");
      },
      (failure: unknown) => ended.signal.aborted || setError(refusalOf(failure)),
    );
    return () => ended.abort();
  }, []);

  const save = async (event: Event) => {
    event.preventDefault();
    if (busy.current) return;
    busy.current = true;
    setBusy(true);
    setError(null);
    try {
      await act(where, { payload, reason, again: isMended });
      close();
    } catch (failure) {
      setError(refusalOf(failure));
    } finally {
      busy.current = false;
      setBusy(false);
      refreshAll();
    }
  };
  return (
    <Modal title={`Mend record ${record.number} of txid ${record.txid}`} close={close} isBusy={isBusy}>
      <p id="mend-why">
        It was set aside because: <bdi>{record.reason}</bdi>
      </p>
      {payload === null && !error && <p class="loading">Reading the record &hellip;</p>}
      {payload !== null && (
        <form id="mend" onSubmit={(event) => void save(event)}>
          <label>
            The record
            <textarea
              class="code"
              rows={6}
              required
              spellcheck={false}
              dir="auto"
              aria-describedby="mend-why"
              value={payload}
              onInput={(event) => setPayload(event.currentTarget.value)}
            />
          </label>
          <label>
            Reason
            <textarea
              rows={2}
              required
              maxLength={1000}
              value={reason}
              onInput={(event) => setReason(event.currentTarget.value)}
            />
          </label>
          <p class="hint">
            The record as it came is kept. The mended one is read when quarantine is replayed.
            {isMended && " It was mended before: yours replaces that."}
          </p>
        </form>
      )}
      {error && <Failure error={error} isAction={payload !== null} />}
      <div class="row buttons">
        {payload !== null && (
          <button type="submit" form="mend" class="primary" aria-disabled={isBusy}>
            {isBusy ? "Working \u2026" : "Mend"}
          </button>
        )}
        <button type="button" aria-disabled={isBusy} onClick={() => busy.current || close()}>
          Cancel
        </button>
      </div>
    </Modal>
  );
}

/** A field for text would change the record beyond what the operator types. */
const unsafe = (pipeline: string, { txid, number }: QuarantinedRecord): Refused =>
  new Refused(
    422,
    "CARRIAGE_RETURN",
    "The record has carriage returns, which a browser turns into newlines. Mend it on the command line: " +
      `tidegate quarantine mend ${pipeline} ${txid} ${number} --reason REASON --payload TEXT`,
  );
