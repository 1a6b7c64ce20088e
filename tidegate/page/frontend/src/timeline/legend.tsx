/** What the timeline's shapes mean. */
const ENTRIES: [kind: string, path: string, words: string][] = [
  ["planned", "M1 8H27", "planned"],
  ["sealed", "M1 2h26v12H1z", "processing"],
  ["running", "M1 2h26v12H1z", "in work"],
  ["failed", "M1 2h22v12H1z", "failed"],
  ["fenced", "M1 2h26v12H1z", "fenced"],
  ["wait", "M1 6h26v4H1z", "waits for its turn"],
  ["commit", "M11 0h6v16h-6z", "commit"],
  ["skipped", "M11 0h6v16h-6z", "skipped"],
  ["cursor", "M1 13H13V3H27", "cursor: last committed txid"],
];

export function Legend() {
  return (
    <ul class="legend" aria-label="Legend">
      {ENTRIES.map(([kind, path, words]) => (
        <li key={kind}>
          <svg width="28" height="16" aria-hidden="true">
            {kind === "cursor" && <path class="t-cursor-halo" d={path} />}
            <path class={`t-${kind}`} d={path} />
            {kind === "failed" && <path class="t-cross" d="M19 4l8 8m0-8l-8 8" />}
          </svg>
          {words}
        </li>
      ))}
    </ul>
  );
}
