/** Answers of the server as views show them: with what is not right with them, and without an end if one cannot be drawn. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useErrorBoundary } from "preact/hooks";
import type { Refused } from "../api";
import { capitalized } from "../format";
import { useConnection, type Live } from "../live";
import { local } from "../zone";
import { ErrorCode, Loading, Outward } from "./basics";

type Properties<T> = { live: Live<T>; what: string; children: (data: T) => ComponentChildren };

/** The drawing of an answer; before it, that it is still to come, refused, or no longer current. */
export function Answer<T>({ live: { data, error, heard, isOther }, what, children }: Properties<T>) {
  const isTold = useConnection().failure !== null; // by the banner, for everything
  const isOld = isOther || error !== null;
  return (
    <>
      {data === null && error === null && <Loading what={what} />}
      {error && !isTold && (
        <Failure error={error}>
          {data !== null && (
            <p>
              What is shown of {what} is no longer current: it was so at {local(heard)}.
            </p>
          )}
        </Failure>
      )}
      {data !== null && (
        <div class={isOld ? "answer is-old" : "answer"} aria-busy={isOther}>
          <Guarded what={what} subject={data}>
            <Drawn draw={() => children(data)} />
          </Guarded>
        </div>
      )}
    </>
  );
}

const Drawn = ({ draw }: { draw: () => ComponentChildren }): JSX.Element => <>{draw()}</>;

const AGAIN_MS = 30_000;

/** Says so if a part of the page cannot be drawn, until its subject is another one, or for a while; the other parts stay. */
export function Guarded({ what, subject, children }: { what: string; subject?: unknown; children: ComponentChildren }) {
  const [fault, again] = useErrorBoundary();
  useEffect(() => fault && again(), [subject]);
  useEffect(() => {
    const timer = fault ? setTimeout(again, AGAIN_MS) : undefined; // what it follows is no longer asked for
    return () => clearTimeout(timer);
  }, [fault]);
  if (!fault) return <>{children}</>;
  return (
    <div class="notice severity-error" role="alert">
      <p>
        {capitalized(what)} cannot be drawn: <bdi>{String((fault as Error).message ?? fault)}</bdi>. Reload the page: it may be
        older than its server. The command line shows the same facts.
      </p>
      <button type="button" onClick={again}>
        Draw it again
      </button>
    </div>
  );
}

/** Why a request was refused, and what to do. */
export function Failure({
  error,
  isAction = false,
  children,
}: {
  error: Refused;
  isAction?: boolean;
  children?: ComponentChildren;
}) {
  return (
    <div class="notice severity-error" role="alert">
      <p>
        {error.message} {error.page && <ErrorCode code={error.code} />}
      </p>
      {children}
      {error.status === 401 && (
        <p>
          <Outward to=".">Log in again</Outward>, best in another tab: what you typed stays here.
        </p>
      )}
      {error.status === 0 && isAction && <p>Whether it was done is not known: look before you repeat it.</p>}
    </div>
  );
}
