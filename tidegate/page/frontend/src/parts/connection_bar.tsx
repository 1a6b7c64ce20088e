/** Says whether what is shown is current, and lets the reader stop it from moving. */
import { useEffect, useRef } from "preact/hooks";
import { announce } from "../announce";
import { duration } from "../format";
import { useClock, useConnection } from "../live";
import { pause, refreshAll } from "../polling";
import { ErrorCode, Outward } from "./basics";

const UNSAID_MS = 3000; // what is over by then, such as the look at a page that was hidden, is not said

export function ConnectionBar() {
  const { paused, isStale, heard, failure, retry } = useConnection();
  useClock();
  const age = heard === null ? null : Date.now() - heard;
  const wasStale = useRef(false);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (isStale) announce("What is shown is no longer current: the server does not answer as it should.");
      else if (wasStale.current) announce("The server answers again.");
      wasStale.current = isStale;
    }, UNSAID_MS);
    return () => clearTimeout(timer);
  }, [isStale]);
  useEffect(() => void document.documentElement.classList.toggle("stale", failure !== null), [failure !== null]);
  const shownSince = age === null ? "" : ` What is shown is ${duration(Math.round(age / 1000))} old.`;
  return (
    <>
      <button
        type="button"
        class={`live small ${paused ? "is-paused" : isStale ? "is-stale" : "is-live"}`}
        title={
          paused ? "the page stands still; press to follow again" : "the page follows by itself; press to make it stand still"
        }
        onClick={() => pause(!paused)}
      >
        <span class="dot" aria-hidden="true" />
        {paused ? "stands still" : isStale ? "stale" : "live"}
      </button>
      {failure && (
        <div class="banner severity-error" role="alert">
          {failure.status === 401 ? (
            <>
              Your login has ended. <Outward to=".">Log in again</Outward>
            </>
          ) : (
            <>
              {failure.message} {failure.page && <ErrorCode code={failure.code} />}
            </>
          )}
          <span class="muted" aria-hidden="true">
            {shownSince}
            {!paused && ` It is asked again in ${Math.max(0, Math.ceil((retry - Date.now()) / 1000))} s.`}
          </span>
          <button type="button" class="small" onClick={() => refreshAll()}>
            Ask now
          </button>
        </div>
      )}
    </>
  );
}
