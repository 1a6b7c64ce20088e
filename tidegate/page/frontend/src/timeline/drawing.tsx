/** The timeline as a picture: txids beside it as links, times above, and what is pointed at in words. */
import { useMemo, useState } from "preact/hooks";
import { Glyph } from "../parts/basics";
import { useWidth } from "../parts/width";
import { duration } from "../format";
import { useClock } from "../live";
import { batchHref } from "../route";
import type { Timeline } from "../server_types";
import type { Phase } from "../types";
import { local } from "../zone";
import { overall, story } from "./describe";
import { isOpen, picture, ROW, type Picture } from "./picture";
import { timeTicks } from "./scale";

// Later ones are drawn over earlier ones.
const SPOKEN_MS = 10_000; // the words for those who do not see the picture change no more often
const LAYERS = ["planned", "fenced", "sealed", "running", "failed", "wait", "skipped", "commit", "cross"];

export function Drawing({ name, timeline, isTrue }: { name: string; timeline: Timeline; isTrue: boolean }) {
  const [box, width] = useWidth<HTMLDivElement>();
  const [pointed, setPointed] = useState<number | null>(null);
  const clock = useClock();
  const isGoingOn = timeline.batches.some(isOpen);
  const now = isGoingOn ? clock : Date.parse(timeline.now);
  const spoken = Math.floor(now / SPOKEN_MS) * SPOKEN_MS;
  const drawn = useMemo(
    () => picture(timeline.batches, timeline.cursor, now, width, isTrue),
    [timeline.batches, timeline.cursor, isGoingOn ? now : 0, width, isTrue],
  );
  const labels = useMemo(
    () => new Map(timeline.batches.map((batch) => [batch.txid, story(batch, spoken)])),
    [timeline.batches, spoken],
  );
  const links = useMemo(
    () =>
      drawn.rows.map((batch) => (
        <li key={batch.txid}>
          <a
            class={`phase-${batch.phase}`}
            href={batchHref(name, batch.txid)}
            aria-label={labels.get(batch.txid)}
            onFocus={() => setPointed(batch.txid)}
            onBlur={() => setPointed(null)}
            onPointerEnter={() => setPointed(batch.txid)}
            onPointerLeave={() => setPointed(null)}
          >
            <Mark phase={batch.phase} />
            {batch.txid}
          </a>
        </li>
      )),
    [labels],
  );
  const at = pointed === null ? undefined : timeline.batches.find((batch) => batch.txid === pointed);
  const rowAt = (event: MouseEvent) => {
    const top = (event.currentTarget as Element).getBoundingClientRect().top;
    return drawn.rows[Math.floor((event.clientY - top) / ROW)] ?? null;
  };
  return (
    <div class="timeline">
      <p class="readout">{at ? story(at, now) : overall(timeline, now)}</p>
      <div class="timeline-grid">
        <div class="axis-corner">txid</div>
        <Axis drawn={drawn} width={width} />
        <ol class="txids" reversed>
          {links}
        </ol>
        <div class="plot" ref={box}>
          <svg
            width={width}
            height={drawn.height}
            role="img"
            aria-label={`Timeline of ${name}. ${overall(timeline, spoken)} The tab of batches has the same as a table.`}
            onPointerMove={(event) => setPointed(rowAt(event)?.txid ?? null)}
            onPointerLeave={() => setPointed(null)}
            onClick={(event) => {
              const batch = rowAt(event);
              if (batch) location.hash = batchHref(name, batch.txid);
            }}
          >
            <Picturing drawn={drawn} pointed={pointed} width={width} />
          </svg>
        </div>
      </div>
    </div>
  );
}

/** Only what is not fine has a mark. */
function Mark({ phase }: { phase: Phase }) {
  return phase === "committed" ? <span class="glyph" /> : <Glyph name={phase} />;
}

function Picturing({ drawn, pointed, width }: { drawn: Picture; pointed: number | null; width: number }) {
  const row = drawn.rows.findIndex((batch) => batch.txid === pointed);
  return (
    <>
      <defs>
        <pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
          <rect width="6" height="6" class="hatch-ground" />
          <rect width="2.500" height="6" class="hatch-line" />
        </pattern>
        <pattern id="steps" width="8" height="8" patternUnits="userSpaceOnUse">
          <rect width="8" height="8" class="steps-ground" />
          <rect width="3" height="8" class="steps-line" />
        </pattern>
      </defs>
      <path class="stripe" d={drawn.rows.map((_, row) => (row % 2 ? `M0 ${row * ROW}h${width}v${ROW}H0z` : "")).join("")} />
      {drawn.scale.cuts.map((cut) => (
        <line key={cut.from} class="cut" x1={cut.x} x2={cut.x} y1={0} y2={drawn.height} />
      ))}
      {row >= 0 && <rect class="pointed" y={row * ROW} width={width} height={ROW} />}
      {LAYERS.map((kind) => drawn.paths[kind] && <path key={kind} class={`t-${kind}`} d={drawn.paths[kind]} />)}
      <path class="t-cursor-halo" d={drawn.paths["cursor"]} />
      <path class="t-cursor" d={drawn.paths["cursor"]} />
      <path class="t-cursor-now" d={drawn.paths["cursor-now"]} />
      {drawn.isLive && <line class="now" x1={drawn.nowX} x2={drawn.nowX} y1={0} y2={drawn.height} />}
    </>
  );
}

/** Times above the picture; where idle time was cut out, how much. */
function Axis({ drawn, width }: { drawn: Picture; width: number }) {
  const { scale } = drawn;
  const labels: { x: number; text: string; kind: string }[] = [];
  const put = (x: number, text: string, kind: string) => {
    const room = text.length * 3.4 + 4;
    const inside = Math.min(Math.max(x, room), Math.max(room, width - room));
    if (!labels.some((label) => Math.abs(label.x - inside) < room + label.text.length * 3.4))
      labels.push({ x: inside, text, kind });
  };
  if (drawn.isLive) put(drawn.nowX, "now", "now-label");
  scale.cuts.forEach((cut) => put(cut.x, duration((cut.to - cut.from) / 1000), "cut-label"));
  scale.pieces.forEach(([from, to]) => {
    const piece = scale.x(to) - scale.x(from);
    const ticks = timeTicks(from, to, piece);
    (ticks.length ? ticks : [from]).forEach((time) => put(scale.x(time), clockLabel(time, to - from), "tick"));
  });
  return (
    <svg class="axis" width={width} height={22} aria-hidden="true">
      {labels.map((label) => (
        <text key={`${label.kind} ${label.x}`} class={label.kind} x={label.x} y={15} text-anchor="middle">
          {label.text}
        </text>
      ))}
      <title>{`from ${local(scale.pieces[0]?.[0] ?? 0)}`}</title>
    </svg>
  );
}

function clockLabel(time: number, span: number): string {
  const [date, clock] = local(time).split(" ");
  if (span > 2 * 86_400_000) return date!.slice(5);
  return span < 600_000 ? clock! : clock!.slice(0, 5);
}
