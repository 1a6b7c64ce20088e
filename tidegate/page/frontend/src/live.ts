/** Data that follows the server: polled while the page is seen, kept while the server is away. */
import { useEffect, useRef, useState } from "preact/hooks";
import { get, Refused } from "./api";

export const EVERY_MS = 2000;
const HIDDEN_MS = 60_000;
const LONGEST_MS = 30_000;
const REST = 8; // times as long as the last answer took: a large answer, or a slow server, is asked for less often

export type Live<T> = { data: T | null; error: Refused | null; refresh: () => void };

/** How the connection is, over all of the page's requests. */
export type Connection = {
  paused: boolean; // by the reader
  heard: number | null; // when the server last answered, ms
  failure: Refused | null; // of the newest request that says something about the server
  retry: number | null; // when it will be asked again, ms
};
let connection: Connection = { paused: false, heard: null, failure: null, retry: null };
const followers = new Set<() => void>();
const refreshers = new Set<() => void>();
let skew = 0; // the server's clock less ours, ms

/** The server's time, ms. */
export const serverNow = (): number => Date.now() + skew;

function change(next: Partial<Connection>): void {
  connection = { ...connection, ...next };
  followers.forEach((follow) => follow());
}

export function useConnection(): Connection {
  const [, again] = useState({});
  useEffect(() => {
    const follow = () => again({});
    followers.add(follow);
    return () => void followers.delete(follow);
  }, []);
  return connection;
}

/** Stop or go on following. */
export function pause(paused: boolean): void {
  change({ paused });
  if (!paused) refreshAll();
}

/** Ask for everything that is shown again, now. */
export const refreshAll = (): void => [...refreshers].forEach((refresh) => refresh());

/** A failure that says something about the server or the login, and not about one request. */
const isGeneral = (error: Refused): boolean =>
  error.status === 0 || error.status === 401 || error.status >= 500 || error.code === "NOT_JSON";

/** The answer at a path (null: nothing is asked), kept up to date. Another path starts afresh. */
export function useLive<T>(where: string | null): Live<T> {
  const [state, setState] = useState<{ where: string | null; data: T | null; error: Refused | null }>({
    where,
    data: null,
    error: null,
  });
  const refresh = useRef(() => {});

  useEffect(() => {
    if (where === null) return;
    const ended = new AbortController();
    let etag: string | null = null;
    let timer: number | undefined;
    let failures = 0;
    let asking = false;
    let took = 0;

    const wait = (): number => {
      if (document.hidden) return HIDDEN_MS;
      return failures ? Math.min(LONGEST_MS, EVERY_MS * 2 ** failures) : Math.min(LONGEST_MS, Math.max(EVERY_MS, REST * took));
    };
    const ask = async () => {
      clearTimeout(timer);
      if (asking) return;
      asking = true;
      const began = performance.now();
      try {
        const fresh: { data: T; etag: string | null } | null = await get<T>(where, etag, ended.signal);
        if (ended.signal.aborted) return;
        failures = 0;
        took = performance.now() - began;
        if (fresh) {
          etag = fresh.etag;
          const now = (fresh.data as { now?: string } | null)?.now;
          if (now) skew = Date.parse(now) - Date.now();
          setState({ where, data: fresh.data, error: null });
        } else setState((old) => (old.error ? { ...old, error: null } : old));
        change({ heard: Date.now(), failure: null, retry: null });
      } catch (error) {
        if (ended.signal.aborted) return;
        if (!(error instanceof Refused)) throw error;
        failures += 1;
        setState((old) => (old.where === where ? { ...old, error } : { where, data: null, error }));
        if (isGeneral(error)) change({ failure: error, retry: Date.now() + wait() });
        else change({ heard: Date.now(), failure: null, retry: null });
      } finally {
        asking = false;
        if (!ended.signal.aborted) timer = setTimeout(due, wait());
      }
    };
    const due = () => {
      if (connection.paused) timer = setTimeout(due, EVERY_MS);
      else void ask();
    };
    const seen = () => {
      if (!document.hidden && !connection.paused) void ask();
    };
    const now = () => void ask();
    refresh.current = now;
    refreshers.add(now);
    document.addEventListener("visibilitychange", seen);
    addEventListener("online", seen);
    void ask();
    return () => {
      ended.abort();
      clearTimeout(timer);
      refreshers.delete(now);
      document.removeEventListener("visibilitychange", seen);
      removeEventListener("online", seen);
    };
  }, [where]);

  // Filters and pages keep the old answer on the screen until theirs arrives; another resource does not.
  const sameResource = state.where?.split("?")[0] === where?.split("?")[0];
  return {
    data: sameResource ? state.data : null,
    error: state.where === where ? state.error : null,
    refresh: () => refresh.current(),
  };
}

/** The server's time, renewed every second while the page is seen. */
export function useClock(): number {
  const [now, setNow] = useState(serverNow());
  useEffect(() => {
    const timer = setInterval(() => document.hidden || setNow(serverNow()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
