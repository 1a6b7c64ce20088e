/** Why something waits: the chain of causes, each with what helps. */
import { useActions } from "../actions";
import type { Cause } from "../server_types";
import { Command, ErrorCode, SeverityMark, Since } from "./basics";

/** One cause in a sentence. */
export function CauseSentence({ cause }: { cause: Cause }) {
  return (
    <>
      <bdi>{cause.sentence}</bdi>
      {cause.since && cause.severity !== "ok" && (
        <span class="since">
          {" "}
          for <Since at={cause.since} />
        </span>
      )}
      {cause.error && (
        <>
          {" "}
          <ErrorCode code={cause.error} />
        </>
      )}
    </>
  );
}

/** What helps against a cause: advice, button, command. */
export function CauseHelp({ pipeline, cause, mayAct }: { pipeline: string; cause: Cause; mayAct: boolean }) {
  const { open, label } = useActions();
  const { action } = cause;
  if (!cause.advice && !cause.command && !action) return null;
  return (
    <div class="help">
      {cause.advice && (
        <p>
          <bdi>{cause.advice}</bdi>
        </p>
      )}
      <div class="row">
        {action && mayAct && (
          <button type="button" class="primary" onClick={() => open({ pipeline, verb: action.verb, txid: action.txid })}>
            {label(action.verb, action.txid)}
          </button>
        )}
        {cause.command && <Command text={cause.command} />}
      </div>
    </div>
  );
}

/** The whole chain, from the nearest cause to the root. */
export function WhyChain({ pipeline, causes, mayAct }: { pipeline: string; causes: Cause[]; mayAct: boolean }) {
  return (
    <ol class="why-chain">
      {causes.map((cause, position) => (
        <li key={`${position} ${cause.code} ${cause.txid}`} class={`cause severity-${cause.severity}`}>
          <SeverityMark severity={cause.severity} />
          <div>
            <p class="sentence">
              {position > 0 && <span class="because">{cause.is_beside ? "besides" : "because"} </span>}
              <CauseSentence cause={cause} />
            </p>
            <CauseHelp pipeline={pipeline} cause={cause} mayAct={mayAct} />
          </div>
        </li>
      ))}
    </ol>
  );
}
