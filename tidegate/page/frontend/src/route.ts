/** Client routes, kept in the URL's hash so that the page works inside Airflow's frame and alone. */
import { useEffect, useState } from "preact/hooks";

export const TABS = ["timeline", "batches", "states", "quarantine", "actions"] as const;
export type Tab = (typeof TABS)[number];

export type Route = { parts: string[]; query: URLSearchParams };

/** The parts of a hash such as `#/pipelines/flights/batches/17?x=y`, decoded. A broken escape stays as it is. */
export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { parts, query: new URLSearchParams(query) };
}

/** The hash of a view: each part is encoded, empty values of the query are left out. */
export function href(parts: (string | number)[], query: Record<string, string | number | null | undefined> = {}): string {
  const given = Object.entries(query).filter((entry) => entry[1] !== null && entry[1] !== undefined && entry[1] !== "");
  const search = new URLSearchParams(given.map(([name, value]) => [name, String(value)]));
  const tail = search.size ? `?${search}` : "";
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${tail}`;
}

export const pipelineHref = (name: string, tab?: Tab): string => href(["pipelines", name, ...(tab ? [tab] : [])]);
export const batchHref = (name: string, txid: number): string => href(["pipelines", name, "batches", txid]);

/** The current route; follows the address bar. */
export function useRoute(): Route {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const follow = () => setHash(location.hash);
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return parse(hash);
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
