/** The metadata of a batch: lists of things as tables, single facts beside them. */
import { useState } from "preact/hooks";
import { bytes, count, text } from "../format";
import { local } from "../zone";
import { Facts } from "./basics";
import { Table } from "./table";

const FIRST = 50;
type Thing = Record<string, unknown>;
type Numbered = { row: Thing; position: number };

const isThing = (value: unknown): value is Thing => typeof value === "object" && value !== null && !Array.isArray(value);

export function SourceMetadata({ source }: { source: unknown }) {
  if (Array.isArray(source)) return <Values name="rows" values={source} />;
  if (!isThing(source)) return <pre class="payload">{text(source)}</pre>;
  const entries = Object.entries(source);
  const single = entries.filter(([, value]) => !Array.isArray(value) && !isThing(value));
  return (
    <>
      {single.length > 0 && (
        <Facts facts={single.map(([name, value]) => [words(name), <bdi class="long">{text(value)}</bdi>])} />
      )}
      {entries.map(([name, value]) => {
        if (Array.isArray(value)) return <Values key={name} name={name} values={value} />;
        if (isThing(value)) return <Values key={name} name={name} values={Object.entries(value).map(flattened)} />;
        return null;
      })}
    </>
  );
}

/** An entry of a mapping, such as a partition with its offsets, as a row. */
const flattened = ([name, value]: [string, unknown]): Thing => (isThing(value) ? { name, ...value } : { name, value });

function Values({ name, values }: { name: string; values: unknown[] }) {
  const [all, setAll] = useState(false);
  if (!values.length) return null;
  const rows = values.map((value): Thing => (isThing(value) ? value : { value }));
  const shown = (all ? rows : rows.slice(0, FIRST)).map((row, position) => ({ row, position }));
  const columns = [...new Set(shown.flatMap(({ row }) => Object.keys(row)))].sort((a, b) => rank(a) - rank(b));
  return (
    <>
      <Table<Numbered>
        caption={`${words(name)} (${count(rows.length)})`}
        rows={shown}
        id={({ position }) => position}
        columns={columns.map((column, position) => ({
          name: words(column),
          wide: position === 0,
          number: shown.every(({ row }) => typeof row[column] === "number"),
          cell: ({ row }) => <Value name={column} value={row[column]} />,
        }))}
      />
      {!all && rows.length > FIRST && (
        <button type="button" class="small" onClick={() => setAll(true)}>
          Show all {count(rows.length)}
        </button>
      )}
    </>
  );
}

/** What names a thing comes first. */
const NAMES = ["topic", "partition", "name"];
const rank = (column: string): number => (NAMES.includes(column) ? NAMES.indexOf(column) : NAMES.length);

function Value({ name, value }: { name: string; value: unknown }) {
  if (/sha256|digest|hash/.test(name) && typeof value === "string")
    return (
      <code class="hash" title={value}>
        {value.slice(0, 16)}
        {value.length > 16 && "\u2026"}
      </code>
    );
  if ((name === "size" || name === "bytes") && typeof value === "number")
    return <span title={`${count(value)} bytes`}>{bytes(value)}</span>;
  if (name === "mtime_ns") return <span title={text(value)}>{local(Number(value) / 1e6)}</span>;
  return <bdi class="long">{text(value)}</bdi>;
}

const words = (name: string): string => (name === "mtime_ns" ? "modified" : name.replaceAll("_", " "));
