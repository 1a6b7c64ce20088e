/** Charts over time: bars or lines, drawn as SVG, with the same figures as a table. */
import { useId, useState } from "preact/hooks";
import { dayAndMonth, local, ticks } from "../zone";
import { Table } from "./table";
import { useWidth } from "./width";

export type Series<Row> = { name: string; kind: "bar" | "line" | "dashed"; style: string; value: (row: Row) => number | null };

type Properties<Row> = {
  title: string;
  note: string;
  rows: Row[];
  at: (row: Row) => number; // start of the bucket, ms
  bucketMs: number;
  from: number;
  to: number;
  series: Series<Row>[];
  show: (value: number | null) => string;
  tick: (value: number) => string; // shorter, for the axis
};

const HEIGHT = 150;
const LEFT = 58;
const RIGHT = 8;
const BOTTOM = 20;
const TOP = 8;

export function Chart<Row>({ title, note, rows, at, bucketMs, from, to, series, show, tick }: Properties<Row>) {
  const [box, width] = useWidth<HTMLDivElement>();
  const [pointed, setPointed] = useState<Row | null>(null);
  const titleId = useId();
  const values = rows.flatMap((row) => series.map((one) => one.value(row) ?? 0));
  const top = niceTop(Math.max(...values, 0));
  const x = (time: number) => LEFT + ((time - from) / (to - from || 1)) * Math.max(1, width - LEFT - RIGHT);
  const y = (value: number) => TOP + (1 - value / top) * (HEIGHT - TOP - BOTTOM);
  const point = (event: PointerEvent) => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    const time = from + ((event.clientX - left - LEFT) / Math.max(1, width - LEFT - RIGHT)) * (to - from);
    const near = rows.find((row) => Math.abs(at(row) + bucketMs / 2 - time) <= bucketMs / 2);
    setPointed(near ?? null);
  };
  const last = rows.at(-1);
  return (
    <figure class="chart">
      <figcaption id={titleId}>
        <strong>{title}</strong> <span class="muted">{note}</span>
        <span class="readout" aria-hidden="true">
          {pointed
            ? `${local(at(pointed))}: ${series.map((one) => `${one.name} ${show(one.value(pointed))}`).join(", ")}`
            : series.length > 1 && series.map((one) => <LegendEntry key={one.name} series={one} />)}
        </span>
      </figcaption>
      <div ref={box} class="plot">
        <svg
          width={width}
          height={HEIGHT}
          role="img"
          aria-labelledby={titleId}
          aria-description={
            last
              ? `Newest: ${series.map((one) => `${one.name} ${show(one.value(last))}`).join(", ")}. All figures are in the table below.`
              : ""
          }
          onPointerMove={point}
          onPointerLeave={() => setPointed(null)}
        >
          {[0, 0.5, 1].map((part) => (
            <g key={part}>
              <line class="grid" x1={LEFT} x2={width - RIGHT} y1={y(top * part)} y2={y(top * part)} />
              <text class="tick" x={LEFT - 6} y={y(top * part) + 4} text-anchor="end">
                {tick(top * part)}
              </text>
            </g>
          ))}
          {timeTicks(from, to, width).map((time) => (
            <text key={time} class="tick" x={Math.min(x(time), width - RIGHT - 18)} y={HEIGHT - 5} text-anchor="middle">
              {tickLabel(time, to - from)}
            </text>
          ))}
          {pointed && (
            <rect
              class="pointed"
              x={x(at(pointed))}
              width={Math.max(2, x(at(pointed) + bucketMs) - x(at(pointed)))}
              y={TOP}
              height={HEIGHT - TOP - BOTTOM}
            />
          )}
          {series.map((one) =>
            one.kind === "bar" ? (
              <path key={one.name} class={`bar ${one.style}`} d={bars(rows, one, at, bucketMs, x, y)} />
            ) : (
              <path key={one.name} class={`line ${one.kind} ${one.style}`} d={line(rows, one, at, bucketMs, x, y)} />
            ),
          )}
        </svg>
      </div>
      <details>
        <summary>The figures of &ldquo;{title}&rdquo; as a table</summary>
        <Table
          caption={`${title}, ${note}`}
          hideCaption
          rows={[...rows].reverse()}
          id={at}
          columns={[
            { name: "from", cell: (row) => local(at(row)) },
            ...series.map((one) => ({ name: one.name, number: true, cell: (row: Row) => show(one.value(row)) })),
          ]}
        />
      </details>
    </figure>
  );
}

function LegendEntry<Row>({ series }: { series: Series<Row> }) {
  return (
    <span class="legend-entry">
      <svg width="22" height="10">
        <path
          class={series.kind === "bar" ? `bar ${series.style}` : `line ${series.kind} ${series.style}`}
          d={series.kind === "bar" ? "M5 0h12v10H5z" : "M0 5H22"}
        />
      </svg>
      {series.name}
    </span>
  );
}

type Scale = (value: number) => number;

function bars<Row>(rows: Row[], one: Series<Row>, at: (row: Row) => number, bucketMs: number, x: Scale, y: Scale): string {
  return rows
    .filter((row) => one.value(row))
    .map((row) => {
      const [left, right] = [x(at(row)), x(at(row) + bucketMs)];
      const width = Math.max(1.5, right - left - (right - left > 4 ? 1 : 0));
      return `M${left.toFixed(1)} ${y(0)}V${y(one.value(row) ?? 0).toFixed(1)}h${width.toFixed(1)}V${y(0)}z`;
    })
    .join("");
}

/** A line that is not drawn over buckets without values; a bucket alone is a dash. */
function line<Row>(rows: Row[], one: Series<Row>, at: (row: Row) => number, bucketMs: number, x: Scale, y: Scale): string {
  let before: number | null = null;
  return rows
    .map((row) => {
      const value = one.value(row);
      if (value === null) return "";
      const joined = before !== null && at(row) - before <= bucketMs * 1.5;
      before = at(row);
      const [left, top] = [x(at(row) + bucketMs / 2), y(value).toFixed(1)];
      return joined ? `L${left.toFixed(1)} ${top}` : `M${(left - 3).toFixed(1)} ${top}h6M${left.toFixed(1)} ${top}`;
    })
    .join("");
}

/** The smallest of 1, 2, 5 times a power of ten that is not less. */
function niceTop(value: number): number {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5, 10].find((step) => step * power >= value) ?? 10) * power;
}

const HOUR = 3_600_000;
export function timeTicks(from: number, to: number, width: number): number[] {
  const most = Math.max(2, Math.floor((width - LEFT) / 90));
  const steps = [1 / 60, 1 / 12, 0.25, 1, 3, 6, 12, 24, 48, 168, 336].map((hours) => hours * HOUR);
  const step = steps.find((one) => (to - from) / one <= most) ?? to - from;
  return ticks(from, to, step);
}

const tickLabel = (time: number, span: number): string => {
  const clock = local(time).slice(11, 16);
  return clock === "00:00" || span > 3 * 24 * HOUR ? dayAndMonth(time) : clock;
};
