/** What the page's server answers. Times are ISO 8601 in UTC. */

export type Phase = "planned" | "processing" | "failed" | "halted" | "processed" | "committed" | "skipped";
export type Severity = "ok" | "info" | "warning" | "error";
export type Verb = "retry" | "skip" | "redo" | "pause" | "resume" | "replay" | "trigger";

export type Cause = {
  code: string;
  sentence: string;
  txid: number | null;
  since: string | null;
  advice: string | null;
  command: string | null;
  action: { verb: Verb; txid: number | null } | null;
  severity: Severity;
  error: string | null;
};
/** First the nearest cause, last the root cause. */
export type Why = { causes: Cause[] };

export type Me = { user: string; airflow_url: string; version: string; read_only: boolean };

export type PipelineRow = {
  name: string;
  description: string | null;
  committed: number;
  opened: number;
  pending: number;
  committed_at: string | null;
  lag_seconds: number | null;
  rows_per_second: number | null;
  quarantined: number;
  paused: { at: string; by: string; reason: string } | null;
  phases: Partial<Record<Phase, number>>;
  why: Cause;
  may_act: boolean;
};
export type Pipelines = { now: string; total: number; next: string | null; pipelines: PipelineRow[] };

export type Column = { name: string; type: string };
export type State = { name: string; kind: string; keys: Column[]; values: Column[] };
export type Action = { acted_at: string; action: string; txid: number | null; owner: string; reason: string | null };
export type Pipeline = PipelineRow & {
  now: string;
  source_kind: string;
  guarantee: string;
  window: number;
  registered_at: string;
  states: State[];
  declared: boolean;
  actions: Action[];
};

export type BatchRow = {
  txid: number;
  phase: Phase;
  attempt: number | null;
  attempts: number;
  source_rows: number | null;
  key_count: number | null;
  opened_at: string;
  started_at: string | null;
  sealed_at: string | null;
  committed_at: string | null;
  merged_at: string | null;
  waits_for: string | null;
  error: string | null;
  owner: string | null;
};
export type Batches = { now: string; batches: BatchRow[]; next: number | null };

export type TimelineAttempt = {
  attempt: number;
  started_at: string;
  staged_at: string | null;
  sealed_at: string | null;
  failed_at: string | null;
  seen_at: string | null;
  error: string | null;
  owner: string;
};
export type TimelineBatch = {
  txid: number;
  phase: Phase;
  opened_at: string;
  attempts: TimelineAttempt[];
  commit: { attempt: number; committed_at: string; merged_at: string; skipped: boolean } | null;
};
export type Timeline = { now: string; cursor: number; batches: TimelineBatch[] };

export type Attempt = TimelineAttempt & Record<string, unknown>;
export type Batch = {
  now: string;
  batch: BatchRow;
  source: unknown;
  source_digest: string | null;
  attempts: Attempt[];
  seals: Record<string, unknown>[];
  commit: Record<string, unknown> | null;
  actions: Action[];
  checks?: { name: string; found: string | null }[];
  quarantined: number;
  set_aside?: number;
  why: Why;
  links: { dag_run: string | null; logs: { attempt: number; url: string }[]; spark: string | null };
};

export type Rows = { columns: Column[]; rows: unknown[][]; next: string | null };

export type Bucket = {
  at: string;
  batches: number;
  rows: number;
  skipped: number;
  quarantined: number;
  processing_p50: number | null;
  processing_p95: number | null;
  commit_latency_p50: number | null;
  commit_latency_p95: number | null;
};
export type History = { now: string; bucket_seconds: number; buckets: Bucket[] };

export type QuarantinedRecord = {
  txid: number;
  number: number;
  state?: string | null; // of a partial that a commit has set aside
  reason: string;
  origin: string | null;
  payload: string | null;
  is_raw: boolean;
  quarantined_at: string;
  mended_payload?: string | null;
  mended_by?: string | null;
  is_cut?: boolean; // in a list: the payloads are longer
};
export type Quarantine = { total: number; set_aside?: number; by_txid: [number, number][]; next: string | null; records: QuarantinedRecord[] };

export type Prospect = { will: string; allowed: boolean; refusal: string | null; command: string };
export type Done = { message: string; txids: number[]; run_needed: boolean };
