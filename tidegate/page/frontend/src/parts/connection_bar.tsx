/** Says whether what is shown is current, and lets the reader stop it from moving. */
import { useEffect } from "preact/hooks";
import { announce } from "../announce";
import { duration } from "../format";
import { EVERY_MS, pause, refreshAll, useClock, useConnection } from "../live";
import { ErrorCode, Outward } from "./basics";

const STALE_MS = 5 * EVERY_MS;

export function ConnectionBar() {
  const { paused, heard, failure, retry } = useConnection();
  useClock();
  const age = heard === null ? null : Date.now() - heard;
  const isStale = failure !== null || (age !== null && age > STALE_MS && !paused);
  useEffect(() => {
    document.documentElement.classList.toggle("stale", isStale);
    if (isStale) announce("What is shown is no longer current: the server does not answer as it should.");
    else if (document.documentElement.dataset["wasStale"]) announce("The server answers again.");
    if (isStale) document.documentElement.dataset["wasStale"] = "yes";
  }, [isStale]);
  const shownSince = age === null ? "" : ` What is shown is ${duration(Math.round(age / 1000))} old.`;
  return (
    <>
      <button
        type="button"
        class={`live small ${paused ? "is-paused" : isStale ? "is-stale" : "is-live"}`}
        aria-pressed={!paused}
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
            {retry !== null && !paused && ` It is asked again in ${Math.max(0, Math.ceil((retry - Date.now()) / 1000))} s.`}
          </span>
          <button type="button" class="small" onClick={refreshAll}>
            Ask now
          </button>
        </div>
      )}
    </>
  );
}
