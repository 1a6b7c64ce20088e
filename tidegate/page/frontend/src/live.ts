/** What views follow: answers of the server, how the connection is, and one clock. */
import { useEffect, useRef, useState } from "preact/hooks";
import { connection, EVERY_MS, followers, Resource, resume, serverNow, UNHEARD, type Heard } from "./polling";

/** `isOther`: the data answers an earlier filter or page, until the answer to the new one is here. */
export type Live<T> = Heard<T> & { isOther: boolean };

const resourceOf = (where: string | null): string | undefined => where?.split("?")[0];

/** The answer at a path (null: nothing is asked), kept up to date; `Infinity`: asked for once. Another path starts afresh. */
export function useLive<T>(where: string | null, everyMs = EVERY_MS): Live<T> {
  const [state, setState] = useState<Heard<T>>(UNHEARD);
  useEffect(() => {
    if (where === null) return;
    const resource = new Resource<T>(where, everyMs, setState);
    return () => resource.end();
  }, [where]);
  // Filters and pages keep the old answer on the screen until theirs arrives; another resource does not.
  const kept: Heard<T> = resourceOf(state.where) === resourceOf(where) ? state : UNHEARD;
  const isOther = kept.where !== where;
  return { ...kept, error: isOther ? null : kept.error, isOther: isOther && kept.data !== null };
}

export function useConnection(): ReturnType<typeof connection> {
  const [, again] = useState({});
  useEffect(() => {
    const follow = () => again({});
    followers.add(follow);
    return () => void followers.delete(follow);
  }, []);
  return connection();
}

// The page's one clock: it ticks while the page is seen.
const ticking = new Set<() => void>();
const tick = () => document.hidden || ticking.forEach((each) => each());
setInterval(tick, 1000);
const seen = () => {
  tick();
  resume();
};
document.addEventListener("visibilitychange", seen);
addEventListener("online", seen);

/** What the server's time comes to, such as a text; drawn again when that changes. */
export function useTicking<T>(read: (now: number) => T): T {
  const [, setShown] = useState<unknown>();
  const newest = useRef(read);
  newest.current = read;
  useEffect(() => {
    const follow = () => setShown(newest.current(serverNow()));
    ticking.add(follow);
    return () => void ticking.delete(follow);
  }, []);
  return read(serverNow());
}

/** The server's time, ms, in steps. */
export const useClock = (stepMs = 1000): number => useTicking((now) => Math.floor(now / stepMs) * stepMs);
