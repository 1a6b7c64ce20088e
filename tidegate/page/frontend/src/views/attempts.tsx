/** The attempts of a batch, their checks, and what they sealed. */
import { between, bytes, count, duration } from "../format";
import { Ago, ErrorCode, Glyph } from "../parts/basics";
import { Table } from "../parts/table";
import type { AttemptDetail as Attempt, Batch } from "../server_types";
import type { Phase } from "../types";

const BADGES: Record<Attempt["outcome"], Phase> = {
  committed: "committed",
  skipped: "skipped",
  failed: "failed",
  fenced: "skipped",
  sealed: "processed",
  "in work": "processing",
};

export function Attempts({ story }: { story: Batch }) {
  const newestFirst = [...story.attempts].sort((a, b) => b.attempt - a.attempt);
  return (
    <Table
      caption="Newest first; only the newest can commit"
      rows={newestFirst}
      id={(attempt) => attempt.attempt}
      columns={[
        { name: "attempt", cell: (attempt) => attempt.attempt },
        {
          name: "outcome",
          cell: ({ outcome }) => (
            <span class={`badge phase-${BADGES[outcome]}`}>
              <Glyph name={BADGES[outcome]} />
              {outcome}
            </span>
          ),
        },
        {
          name: "error, checks",
          wide: true,
          cell: (attempt) => (attempt.error ? <AttemptError attempt={attempt} /> : <Checks attempt={attempt} />),
        },
        { name: "began", cell: (attempt) => <Ago at={attempt.started_at} /> },
        {
          name: "took",
          number: true,
          cell: (attempt) => duration(between(attempt.started_at, attempt.sealed_at ?? attempt.failed_at)),
        },
        {
          name: "staged",
          number: true,
          cell: (attempt) => (attempt.staged_bytes === null ? "\u2013" : bytes(attempt.staged_bytes)),
        },
        { name: "by", cell: (attempt) => <bdi>{attempt.owner}</bdi> },
      ]}
    />
  );
}

function AttemptError({ attempt }: { attempt: Attempt }) {
  const said = attempt.error ?? "";
  const code = /^([A-Z][A-Z0-9_]{2,}):?\s*/.exec(said);
  return (
    <>
      {code?.[1] && <ErrorCode code={code[1]} />} <bdi class="long">{code ? said.slice(code[0].length) : said}</bdi>
      {attempt.is_poison && <span class="second">The content of the batch is at fault.</span>}
    </>
  );
}

/** Counts and sums of hashes that had to agree before the attempt could seal. */
function Checks({ attempt }: { attempt: Attempt }) {
  if (attempt.source_rows === null) return <span class="none">{"\u2013"}</span>;
  const line = (name: string, rows: number, sum: string | null) => (
    <span class="second">
      {name} {count(rows)} rows
      {sum !== null && (
        <>
          , sum of hashes <code class="hash">{sum}</code>
        </>
      )}
    </span>
  );
  return (
    <>
      {line("source", attempt.source_rows, attempt.source_hash_sum)}
      {attempt.quarantined_rows ? line("set aside", attempt.quarantined_rows, null) : null}
      {attempt.transformed_rows !== null && line("transformed", attempt.transformed_rows, attempt.transformed_hash_sum)}
    </>
  );
}

export function Seals({ seals }: { seals: Batch["seals"] }) {
  return (
    <Table
      caption="What each sealed attempt staged: one Spark task per partition counts"
      rows={seals}
      id={(seal) => `${seal.attempt} ${seal.state} ${seal.partition}`}
      columns={[
        { name: "attempt", cell: (seal) => seal.attempt },
        { name: "state", wide: true, cell: (seal) => seal.state },
        { name: "partition", number: true, cell: (seal) => seal.partition },
        { name: "task attempt", number: true, cell: (seal) => seal.task_attempt },
        { name: "rows", number: true, cell: (seal) => count(seal.rows) },
        { name: "digest", number: true, cell: (seal) => <code class="hash">{seal.digest}</code> },
      ]}
    />
  );
}
