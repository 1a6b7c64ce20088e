/** Actions by hand: which exist, what they are called, and the dialog that asks before one is done. */
import { createContext, type ComponentChildren } from "preact";
import { useContext, useState } from "preact/hooks";
import { ActionDialog } from "./parts/action_dialog";
import { Guarded } from "./parts/answer";
import { count } from "./format";
import type { Verb } from "./types";

export type Request = { pipeline: string; verb: Verb; txid: number | null };

const LABELS: Record<Verb, string> = {
  retry: "Retry",
  skip: "Skip",
  redo: "Redo",
  pause: "Pause",
  resume: "Resume",
  replay: "Replay quarantine",
  trigger: "Run now",
};

/** What a button says, such as "Retry txid 7". */
export function label(verb: Verb, txid: number | null): string {
  if (verb === "retry" && txid === null) return "Retry all";
  return txid === null ? LABELS[verb] : `${LABELS[verb]}${verb === "replay" ? " of" : ""} txid ${txid}`;
}

/** What a verb does, in half a sentence, for buttons' titles. */
export const MEANINGS: Record<Verb, string> = {
  retry: "halted batches and those that were given up are tried again",
  skip: "a batch is given up: a commit without its rows takes its place",
  redo: "a new attempt at the last committed batch replaces its effect",
  pause: "no run and no batch begins; batches in flight commit",
  resume: "new runs work again",
  replay: "a new batch takes up records of quarantine",
  trigger: "Airflow starts a run, which takes in what is new and what is left over",
};

const Actions = createContext<(request: Request) => void>(() => {});

/** Opens dialogs, one at a time; they stay open whatever becomes of the view below. */
export function ActionsProvider({ children }: { children: ComponentChildren }) {
  const [request, setRequest] = useState<Request | null>(null);
  return (
    <Actions.Provider value={setRequest}>
      {children}
      {request && (
        <Guarded key={`${request.pipeline} ${request.verb} ${request.txid}`} what="the dialog">
          <ActionDialog request={request} close={() => setRequest(null)} />
        </Guarded>
      )}
    </Actions.Provider>
  );
}

export function useActions() {
  return { open: useContext(Actions), label };
}

/** A button that opens the dialog of an action. */
export function ActionButton({
  pipeline,
  verb,
  txid = null,
  primary = false,
}: Omit<Request, "txid"> & { txid?: number | null; primary?: boolean }) {
  const { open } = useActions();
  return (
    <button
      type="button"
      class={primary ? "primary" : ""}
      title={MEANINGS[verb]}
      onClick={() => open({ pipeline, verb, txid })}
    >
      {label(verb, txid)}
    </button>
  );
}

/** "txids 3, 4 and 5", shortened. */
export function txidList(txids: number[]): string {
  if (!txids.length) return "";
  const shown = txids.slice(0, 8).join(", ");
  const rest = txids.length > 8 ? ` and ${count(txids.length - 8)} more` : "";
  return `${txids.length === 1 ? "txid" : "txids"} ${shown}${rest}`;
}
