/** Requests to the page's server and to Airflow's own REST API, under the user's login. */

/** An answer that says no, or no answer at all (status 0). */
export class Refused extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly page: string | null = null,
  ) {
    super(message);
  }
}

/** An error as a request's refusal: one without an answer, whatever kept it away. */
export const refusalOf = (error: unknown): Refused =>
  error instanceof Refused ? error : new Refused(0, "NO_ANSWER", String(error));

const TIMEOUT_MS = 30_000;

/** Absolute address of a path below the page's own address. */
export const address = (path: string): string => new URL(path, document.baseURI.replace(/#.*/s, "")).href;

/** Path of an API call: each part is encoded. */
export function path(parts: (string | number)[], query: Record<string, string | number | null | undefined> = {}): string {
  const given = Object.entries(query).filter((entry) => entry[1] !== null && entry[1] !== undefined && entry[1] !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  return `api/${parts.map((part) => encodeURIComponent(part)).join("/")}${search.size ? `?${search}` : ""}`;
}

export type Fresh<T> = { data: T; etag: string | null };

/** Get JSON; null if it still is the version with this ETag. Raises: Refused. */
export async function get<T>(where: string, etag: string | null, signal?: AbortSignal): Promise<Fresh<T> | null> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (etag) headers["If-None-Match"] = etag;
  const { answer, said } = await request(where, { headers, cache: "no-store", signal: signal ?? null });
  if (answer.status === 304) return null;
  const data = parsed(answer, said);
  if (data === null) throw notJson(answer); // an empty answer is no news that all is gone
  return { data: data as T, etag: answer.headers.get("ETag") };
}

/** Do something on the server. Raises: Refused. */
export async function act<T>(where: string, given: unknown): Promise<T> {
  const { answer, said } = await request(where, {
    method: "POST",
    headers: { Accept: "application/json", "Content-Type": "application/json", "X-Tidegate-Action": "1" },
    body: JSON.stringify(given),
  });
  return parsed(answer, said) as T;
}

/** Start a Dag run by Airflow's own REST API; return its run id. Raises: Refused. */
export async function startRun(dag: string, note: string): Promise<string> {
  const where = `../api/v2/dags/${encodeURIComponent(dag)}/dagRuns`;
  const run = await act<{ dag_run_id: string }>(where, { logical_date: null, note: note || null });
  return run.dag_run_id;
}

/** Address of a Dag run in Airflow's UI. */
export const runAddress = (dag: string, run: string): string =>
  address(`../dags/${encodeURIComponent(dag)}/runs/${encodeURIComponent(run)}`);

/** An answer with all of its text: what is cut off on the way is no answer. */
async function request(where: string, options: RequestInit): Promise<{ answer: Response; said: string }> {
  const late = AbortSignal.timeout(TIMEOUT_MS);
  const signal = options.signal ? AbortSignal.any([options.signal, late]) : late;
  let answer: Response;
  let said: string;
  try {
    answer = await fetch(address(where), { ...options, signal, credentials: "same-origin", redirect: "manual" });
    said = await answer.text();
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused(0, "NO_ANSWER", "The server does not answer.");
  }
  // A redirect leads to the login, which a request in the background cannot follow.
  if (answer.type === "opaqueredirect") throw new Refused(401, "LOGIN_NEEDED", "Your login has ended.");
  if (answer.ok || answer.status === 304) return { answer, said };
  throw refusal(answer, said);
}

function refusal(answer: Response, said: string): Refused {
  try {
    const { code, message, page, detail } = JSON.parse(said) as Record<string, unknown>;
    const text = message ?? (typeof detail === "string" ? detail : detail && JSON.stringify(detail));
    const where = typeof page === "string" ? page : null;
    return new Refused(answer.status, String(code ?? `HTTP_${answer.status}`), String(text ?? answer.statusText), where);
  } catch {
    return new Refused(
      answer.status,
      `HTTP_${answer.status}`,
      `The server answers ${answer.status} ${answer.statusText}`.trim(),
    );
  }
}

const notJson = (answer: Response): Refused =>
  new Refused(answer.status, "NOT_JSON", "The server's answer is not JSON. Is something between it and you?");

function parsed(answer: Response, said: string): unknown {
  try {
    return said ? JSON.parse(said) : null;
  } catch {
    throw notJson(answer);
  }
}
