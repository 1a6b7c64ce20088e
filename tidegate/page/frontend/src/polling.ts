/** Polling: one answer of the server, kept up to date: what was heard and when, and what has gone wrong since. */
import { get, refusalOf, type Refused } from "./api";

export const EVERY_MS = 2000;
const LONGEST_MS = 30_000;
const REST = 8; // times as long as the last answer took: a large answer, or a slow server, is asked for less often
const GRACE_MS = 5000; // in which an answer that is due may come

/** `data` answers `where`, and was so at `heard`, ms; `error` is of the newest request, if that failed. */
export type Heard<T> = { where: string | null; data: T | null; heard: number | null; error: Refused | null };
export const UNHEARD: Heard<never> = { where: null, data: null, heard: null, error: null };

/** Everything that is shown; a change of any of it is told to all followers. */
export const resources = new Set<Resource<unknown>>();
export const followers = new Set<() => void>();
export const tellFollowers = (): void => followers.forEach((follow) => follow());

let isPaused = false; // by the reader
let skew = 0; // the server's clock less ours, ms

export const paused = (): boolean => isPaused;
/** The server's time, ms. */
export const serverNow = (): number => Date.now() + skew;

/** Stop or go on following. */
export function pause(wanted: boolean): void {
  isPaused = wanted;
  tellFollowers();
  if (!wanted) refreshAll();
}

/** Ask for everything that is shown again, now: an answer that is on its way may be older than what has just been done. */
export const refreshAll = (): void => resources.forEach((resource) => void resource.ask());

/** Go on where the time of an answer passed unseen; what is asked for once, such as the user, may be another one meanwhile. */
export const resume = (): void => resources.forEach((one) => (Date.now() >= one.due || !one.isFollowed()) && one.follow());

export class Resource<T> {
  current: Heard<T>;
  due = 0; // when it is asked for next, ms
  private etag: string | null = null;
  private timer: ReturnType<typeof setTimeout> | undefined;
  private asking: AbortController | null = null;
  private failures = 0;
  private took = 0;

  constructor(
    private readonly where: string,
    private readonly everyMs: number,
    private readonly tell: (heard: Heard<T>) => void,
  ) {
    this.current = { ...UNHEARD, where };
    resources.add(this as Resource<unknown>);
    void this.ask();
  }

  end(): void {
    clearTimeout(this.timer);
    this.asking?.abort();
    resources.delete(this as Resource<unknown>);
    tellFollowers();
  }

  /** Ask, if somebody looks. */
  follow(): void {
    if (!this.asking && !isPaused && !document.hidden) void this.ask();
  }

  /** Whether it is asked for again and again, and not only once. */
  isFollowed = (): boolean => Number.isFinite(this.due);

  /** Whether what is shown may be older than it should be. */
  isStale(): boolean {
    const late =
      this.current.heard !== null && Date.now() > this.current.heard + this.wait() + Math.max(GRACE_MS, 2 * this.took);
    return this.current.error !== null || (late && !isPaused);
  }

  private wait(): number {
    if (this.failures) return Math.min(LONGEST_MS, EVERY_MS * 2 ** this.failures);
    return Math.max(this.everyMs, Math.min(LONGEST_MS, REST * this.took));
  }

  /** Ask now; a request that is on its way is given up. */
  async ask(): Promise<void> {
    clearTimeout(this.timer);
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const began = Date.now();
    let next: Partial<Heard<T>>;
    try {
      const fresh = await get<T>(this.where, this.etag, asking.signal);
      next = { heard: Date.now(), error: null };
      if (fresh) {
        this.etag = fresh.etag;
        next.data = fresh.data;
        const now = (fresh.data as { now?: string } | null)?.now;
        if (now) skew = Date.parse(now) - Date.now();
      }
    } catch (error) {
      next = { error: refusalOf(error) };
    }
    if (asking.signal.aborted) return;
    this.asking = null;
    this.took = Date.now() - began;
    const isBack = this.failures > 0 && !next.error;
    this.failures = next.error ? this.failures + 1 : 0;
    this.due = Date.now() + this.wait();
    if (this.isFollowed()) this.timer = setTimeout(() => this.follow(), this.wait());
    this.current = { ...this.current, ...next };
    this.tell(this.current);
    tellFollowers();
    if (isBack) resources.forEach((other) => (other.current.error || !other.isFollowed()) && void other.ask());
  }
}

/** How the connection is, over everything that is shown. `failure` is of all of it: then no single answer need say so. */
export function connection() {
  const all = [...resources].filter((one) => one.isFollowed());
  const heard = all.flatMap((one) => one.current.heard ?? []);
  return {
    paused: isPaused,
    isStale: all.some((one) => one.isStale()),
    heard: heard.length ? Math.min(...heard) : null,
    failure: all.length && all.every((one) => isGeneral(one.current.error)) ? all[0]!.current.error : null,
    retry: Math.min(...all.map((one) => one.due)),
  };
}

/** A failure that says something about the server or the login, and not about one request. */
const isGeneral = (error: Refused | null): boolean =>
  error !== null && (error.status === 0 || error.status === 401 || error.status >= 500 || error.code === "NOT_JSON");
