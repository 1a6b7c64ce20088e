/** The dialog in which an operator mends one record of quarantine. */
import { useRef, useState } from "preact/hooks";
import { act, path, Refused } from "../api";
import { refreshAll } from "../live";
import type { QuarantinedRecord } from "../types";
import { Failure } from "./action_dialog";
import { Modal } from "./modal";

export function MendDialog({ pipeline, record, close }: { pipeline: string; record: QuarantinedRecord; close: () => void }) {
  const [payload, setPayload] = useState(record.mended_payload ?? record.payload ?? "");
  const [reason, setReason] = useState("");
  const [error, setError] = useState<Refused | null>(null);
  const [isBusy, setBusy] = useState(false);
  const busy = useRef(false);
  const save = async (event: Event) => {
    event.preventDefault();
    if (busy.current) return;
    busy.current = true;
    setBusy(true);
    setError(null);
    try {
      await act(path(["pipelines", pipeline, "quarantine", record.txid, record.number]), { payload, reason });
      refreshAll();
      close();
    } catch (failure) {
      if (!(failure instanceof Refused)) throw failure;
      setError(failure);
    } finally {
      busy.current = false;
      setBusy(false);
    }
  };
  return (
    <Modal title={`Mend record ${record.number} of txid ${record.txid}`} close={close} isBusy={isBusy}>
      <form onSubmit={(event) => void save(event)}>
        <p id="mend-why">
          It was set aside because: <bdi>{record.reason}</bdi>
        </p>
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
        <p class="hint">The record as it came is kept. The mended one counts when quarantine is replayed.</p>
        {error && <Failure error={error} />}
        <div class="row buttons">
          <button type="submit" class="primary" aria-disabled={isBusy}>
            {isBusy ? "Working \u2026" : "Mend"}
          </button>
          <button type="button" onClick={() => busy.current || close()}>
            Cancel
          </button>
        </div>
      </form>
    </Modal>
  );
}
