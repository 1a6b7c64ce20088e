/** Numbers, times and durations as text. */
import { local, zoneName } from "./zone";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const ONE_DIGIT = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const DASH = "\u2013";

/** A count with thousands separators; not for txids, which are names. */
export function count(value: number | string | null | undefined): string {
  if (value === null || value === undefined) return DASH;
  return typeof value === "string" ? value : WHOLE.format(value);
}

export function rate(value: number | null): string {
  if (value === null) return DASH;
  return value >= 10 ? WHOLE.format(value) : ONE_DIGIT.format(value);
}

export const capitalized = (text: string): string => text.charAt(0).toUpperCase() + text.slice(1);

/** "1 batch", "2 batches". */
export function plural(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** A length of time in one or two units: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 days. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return DASH;
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${ONE_DIGIT.format(s)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const [days, hours, minutes] = [Math.floor(s / 86_400), Math.floor(s / 3600), Math.floor(s / 60)];
  if (days >= 2) return two(days, "days", hours - days * 24, "h");
  if (hours >= 1) return two(hours, "h", minutes - hours * 60, "min");
  return two(minutes, "min", Math.floor(s) - minutes * 60, "s");
}

function two(large: number, unit: string, small: number, smaller: string): string {
  return small && large < 10 ? `${large} ${unit} ${small} ${smaller}` : `${large} ${unit}`;
}

/** Seconds from one time to another; null if either is missing. */
export function between(from: string | null | undefined, to: string | null | undefined): number | null {
  return from && to ? (Date.parse(to) - Date.parse(from)) / 1000 : null;
}

/** Roughly how long ago, such as "12 s ago"; a time to come is "in 12 s". */
export function ago(seconds: number): string {
  const s = Math.abs(seconds);
  if (s < 2) return "now";
  const [size, unit] = s < 60 ? [1, "s"] : s < 3600 ? [60, "min"] : s < 129_600 ? [3600, "h"] : [86_400, "days"];
  const text = `${Math.floor(s / (size as number))} ${unit}`;
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

/** A time in the reader's zone and in UTC. */
export function absolute(iso: string): string {
  const when = new Date(iso);
  if (Number.isNaN(when.valueOf())) return DASH;
  const zone = zoneName(when.valueOf());
  const utc = when.toISOString().slice(0, 19).replace("T", " ");
  return zone === "UTC" ? `${utc} UTC` : `${local(iso)} ${zone} (${utc} UTC)`;
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];
export function bytes(value: number): string {
  const power = value < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log10(value) / 3));
  return `${ONE_DIGIT.format(value / 1000 ** power)} ${UNITS[power]}`;
}

/** A cell's value as text; null is a dash, and structures are JSON. */
export function text(value: unknown): string {
  if (value === null || value === undefined) return DASH;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
