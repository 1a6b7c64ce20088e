/** Small parts that many views share. */
import type { ComponentChildren, JSX } from "preact";
import { useState } from "preact/hooks";
import { address } from "../api";
import { absolute, ago, duration } from "../format";
import { isFramed, openOutside } from "../frame";
import { useTicking } from "../live";
import type { Phase, Severity } from "../types";

/** How long ago something was, with the exact time in its title. */
export function Ago({ at }: { at: string | null | undefined }) {
  const shown = useTicking((now) => at && ago((now - Date.parse(at)) / 1000));
  if (!at) return <span class="none">{"\u2013"}</span>;
  return (
    <time dateTime={at} title={absolute(at)}>
      {shown}
    </time>
  );
}

/** Time that has passed since then, going on. */
export function Since({ at }: { at: string }) {
  const shown = useTicking((now) => duration(Math.floor((now - Date.parse(at)) / 1000)));
  return (
    <time dateTime={at} title={`since ${absolute(at)}`}>
      {shown}
    </time>
  );
}

const GLYPHS: Record<Phase | Severity | "paused", string> = {
  planned: "M8 3a5 5 0 1 0 0 10A5 5 0 0 0 8 3z",
  processing: "M13 8A5 5 0 1 1 8 3M8 5v3l2.500 1.500",
  processed: "M4.500 3h7M4.500 13h7M5.500 3v2L8 8l2.500-3V3M5.500 13v-2L8 8l2.500 3v2",
  committed: "M3.500 8.500 6.500 11.500 12.500 4.500",
  skipped: "M8 3a5 5 0 1 0 0 10A5 5 0 0 0 8 3zM4.500 11.500l7-7",
  failed: "M4 4l8 8M12 4l-8 8",
  halted: "M5.700 2.500h4.600l3.200 3.200v4.600l-3.200 3.200H5.700L2.500 10.300V5.700zM8 5v3.500M8 10.500v.600",
  paused: "M5.500 4v8M10.500 4v8",
  ok: "M3.500 8.500 6.500 11.500 12.500 4.500",
  info: "M13 8A5 5 0 1 1 8 3M8 5v3l2.500 1.500",
  warning: "M8 2.500 14 13H2zM8 6.500V9.500M8 11v.600",
  error: "M5.700 2.500h4.600l3.200 3.200v4.600l-3.200 3.200H5.700L2.500 10.300V5.700zM8 5v3.500M8 10.500v.600",
};
const SEVERITY_WORDS: Record<Severity, string> = { ok: "flows", info: "works", warning: "waits", error: "needs a person" };

export function Glyph({ name }: { name: keyof typeof GLYPHS }) {
  return (
    <svg class="glyph" viewBox="0 0 16 16" aria-hidden="true">
      <path d={GLYPHS[name]} />
    </svg>
  );
}

/** A batch's phase: word, shape and colour. */
export function PhaseBadge({ phase }: { phase: Phase }) {
  return (
    <span class={`badge phase-${phase}`}>
      <Glyph name={phase} />
      {phase}
    </span>
  );
}

/** How bad something is, as a shape with a word for those who do not see it. */
export function SeverityMark({ severity, paused = false }: { severity: Severity; paused?: boolean }) {
  const word = paused ? "paused" : SEVERITY_WORDS[severity];
  return (
    <span class={`mark severity-${severity}`} title={word}>
      <Glyph name={paused ? "paused" : severity} />
      <span class="spoken">{word}</span>
    </span>
  );
}

/** A command to type, with a button that copies it. */
export function Command({ text }: { text: string }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      if (!copyBySelection(text)) return; // the frame or the browser does not allow it: the text can be selected by hand
    }
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return (
    <span class="command">
      <code>{text}</code>
      <button type="button" class="small quiet" onClick={copy} aria-label={`Copy the command ${text}`}>
        {copied ? "copied" : "copy"}
      </button>
      <span class="spoken" role="status">
        {copied ? "copied" : ""}
      </span>
    </span>
  );
}

function copyBySelection(text: string): boolean {
  const field = document.createElement("textarea");
  field.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** A link to another page of Airflow or of the product, out of the frame. */
export function Outward({ to, children }: { to: string; children: ComponentChildren }) {
  const target = address(to);
  const follow = (event: MouseEvent) => {
    if (!isFramed() || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    openOutside(target);
  };
  if (!/^https?:/.test(target)) return <>{children}</>; // a link comes from data: nothing but web pages
  return (
    <a class="outward" href={target} onClick={follow}>
      {children}
    </a>
  );
}

/** The code of an error, linked to the page that explains it. */
export function ErrorCode({ code }: { code: string }) {
  return (
    <Outward to={`errors/${encodeURIComponent(code)}`}>
      <code class="error-code">{code}</code>
    </Outward>
  );
}

/** Says that there is nothing, and what to do. */
export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="empty-title">{title}</p>
      {children}
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return <p class="loading">Reading {what} &hellip;</p>;
}

/** Names and values. */
export function Facts({ facts }: { facts: [string, JSX.Element | string | number | null | undefined][] }) {
  return (
    <dl class="facts">
      {facts
        .filter((fact) => fact[1] !== null && fact[1] !== undefined && fact[1] !== "")
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  );
}
