/** The time zone that is chosen in Airflow, else the browser's, and times of day in it. */
const SHORT_DATE = { dateStyle: "short", timeStyle: "medium" } as const;

/** The zone that Airflow's page keeps for this site as JSON; null if none is chosen, or one that the browser does not know. */
export function chosenZone(kept: string | null): string | null {
  try {
    const zone: unknown = JSON.parse(kept ?? "null");
    return typeof zone === "string" ? new Intl.DateTimeFormat("en", { timeZone: zone }).resolvedOptions().timeZone : null;
  } catch {
    return null;
  }
}

const formats = (zone: string | null) => {
  const timeZone = zone ?? undefined;
  return {
    local: new Intl.DateTimeFormat("sv-SE", { ...SHORT_DATE, timeZone }),
    name: new Intl.DateTimeFormat("en", { timeZoneName: "short", timeZone }),
  };
};
let inZone = formats(null);

/** Write times in this zone from now on; null is the browser's. */
export const setZone = (zone: string | null): void => void (inZone = formats(zone));

/** A time in the reader's zone: 2026-11-25 14:03:11. A dash for what is no time. */
export function local(time: string | number | null | undefined): string {
  const ms = typeof time === "string" ? Date.parse(time) : (time ?? NaN);
  return Number.isFinite(ms) && Math.abs(ms) <= 8.64e15 ? inZone.local.format(ms) : "\u2013";
}

/** The short name of the reader's zone at a time, such as CET. */
export const zoneName = (time: number): string =>
  inZone.name.formatToParts(time).find((part) => part.type === "timeZoneName")?.value ?? "";

const SECOND = 1000;
const HOUR = 3_600_000;

/** What a clock in the reader's zone shows at a time, in ms as if that were UTC. */
const wall = (time: number): number => Date.parse(`${local(time).replace(" ", "T")}Z`);
const offset = (time: number): number => wall(time) - Math.floor(time / SECOND) * SECOND;

/** When a clock in the reader's zone shows this; of an hour that is repeated, one; of one that is left out, the next. */
export function fromWall(shown: number): number {
  const near = shown - offset(shown);
  const found = shown - offset(near);
  return wall(found) === shown ? found : Math.max(found, near);
}

/** Times from one to another, every so many ms: whole days begin at midnight, also in the week in which summer time ends. */
export function ticks(from: number, to: number, step: number): number[] {
  const [first, last] = step <= HOUR ? [from + offset(from), to + offset(from)] : [wall(from), wall(to)];
  const back = step <= HOUR ? (shown: number) => shown - offset(from) : fromWall;
  const found: number[] = [];
  for (let shown = Math.ceil(first / step) * step; shown <= last; shown += step) found.push(back(shown));
  return found.filter((time) => time >= from && time <= to);
}
