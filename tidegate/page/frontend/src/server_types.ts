/** Written by `make page` from the server's models: change those. Times are ISO 8601 in UTC. */

export type Action = {
  acted_at: string;
  action: string;
  txid: number | null;
  owner: string;
  reason: string;
};

export type Answered = {
  query: string;
  txids: Partial<Record<string, number>>;
  columns: Column[];
  rows: unknown[][];
};

export type Attempt = {
  attempt: number;
  started_at: string;
  staged_at: string | null;
  sealed_at: string | null;
  failed_at: string | null;
  seen_at: string | null;
  error: string | null;
  owner: string;
};

export type AttemptDetail = {
  attempt: number;
  started_at: string;
  staged_at: string | null;
  sealed_at: string | null;
  failed_at: string | null;
  seen_at: string | null;
  error: string | null;
  owner: string;
  airflow_run_id: string | null;
  airflow_task_id: string | null;
  airflow_try: number | null;
  spark_application: string | null;
  spark_tag: string | null;
  fingerprint: string;
  source_digest: string;
  is_poison: boolean | null;
  source_rows: number | null;
  source_hash_sum: string | null;
  quarantined_rows: number | null;
  transformed_rows: number | null;
  transformed_hash_sum: string | null;
  staged_bytes: number | null;
  dropped_at: string | null;
  outcome: "committed" | "skipped" | "failed" | "fenced" | "sealed" | "in work";
};

export type Batch = {
  now: string;
  cursor: number;
  has_next: boolean;
  may_act: boolean;
  batch: BatchRow;
  source: unknown;
  source_digest: string;
  attempts: AttemptDetail[];
  seals: Seal[];
  commit: CommitDetail | null;
  actions: Action[];
  checks: Check[];
  quarantined: number;
  set_aside: number;
  why: Why;
  links: Links;
};

export type BatchRow = {
  txid: number;
  phase: "planned" | "processing" | "failed" | "halted" | "processed" | "committed" | "skipped";
  attempt: number;
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

export type Batches = {
  now: string;
  batches: BatchRow[];
  next: number | null;
};

export type Button = {
  verb: "retry" | "skip" | "pause" | "resume" | "replay" | "trigger";
  txid: number | null;
};

export type Cause = {
  code: string;
  sentence: string;
  txid: number | null;
  since: string | null;
  advice: string | null;
  command: string | null;
  action: Button | null;
  severity: "ok" | "info" | "warning" | "error";
  error: string | null;
  is_beside: boolean;
};

export type Check = {
  name: string;
  found: string | null;
};

export type Column = {
  name: string;
  type: string;
};

export type Commit = {
  attempt: number;
  committed_at: string;
  merged_at: string;
  skipped: boolean;
};

export type CommitDetail = {
  attempt: number;
  owner: string;
  committed_at: string;
  merged_at: string;
  key_count: number;
  quarantined_rows: number;
  skipped_reason: string | null;
};

export type FoundRows = {
  txid: number;
  columns: Column[];
  rows: (unknown[] | null)[];
};

export type Links = {
  dag_run: string | null;
  logs: Log[];
};

export type Log = {
  attempt: number;
  url: string;
};

export type Me = {
  user: string;
  version: string;
};

export type Nothing = {
};

export type Outcome = {
  message: string;
  txids: number[];
  run_needed: boolean;
};

export type Paused = {
  at: string;
  by: string;
  reason: string;
};

export type PipelineDetail = {
  name: string;
  description: string;
  committed: number;
  opened: number;
  pending: number;
  committed_at: string | null;
  lag_seconds: number | null;
  rows_per_second: number | null;
  quarantined: number;
  paused: Paused | null;
  phases: Partial<Record<"planned" | "processing" | "failed" | "halted" | "processed" | "committed" | "skipped", number>>;
  why: Cause;
  may_act: boolean;
  now: string;
  causes: Cause[];
  source_kind: string;
  guarantee: string;
  window: number;
  registered_at: string;
  states: State[];
  declared: boolean;
  actions: Action[];
};

export type PipelineRow = {
  name: string;
  description: string;
  committed: number;
  opened: number;
  pending: number;
  committed_at: string | null;
  lag_seconds: number | null;
  rows_per_second: number | null;
  quarantined: number;
  paused: Paused | null;
  phases: Partial<Record<"planned" | "processing" | "failed" | "halted" | "processed" | "committed" | "skipped", number>>;
  why: Cause;
  may_act: boolean;
};

export type Pipelines = {
  now: string;
  total: number;
  pipelines: PipelineRow[];
};

export type Prospect = {
  will: string;
  allowed: boolean;
  refusal: string | null;
  command: string;
};

export type Quarantine = {
  total: number;
  set_aside: number;
  by_txid: [number, number][];
  next: string | null;
  records: QuarantinedRecord[];
};

export type QuarantinedRecord = {
  txid: number;
  number: number;
  state: string | null;
  reason: string;
  origin: string | null;
  payload: string;
  is_raw: boolean;
  quarantined_at: string;
  replayed_txid: number | null;
  mended_payload: string | null;
  mended_at: string | null;
  mended_by: string | null;
  mended_reason: string | null;
  is_cut: boolean;
};

export type Rows = {
  txid: number;
  columns: Column[];
  rows: unknown[][];
  next: string | null;
};

export type Seal = {
  attempt: number;
  state: string;
  partition: number;
  task_attempt: number;
  rows: number;
  digest: string;
};

export type State = {
  name: string;
  kind: string;
  keys: Column[];
  values: Column[];
};

export type Timeline = {
  now: string;
  cursor: number;
  batches: TimelineBatch[];
};

export type TimelineBatch = {
  txid: number;
  phase: "planned" | "processing" | "failed" | "halted" | "processed" | "committed" | "skipped";
  opened_at: string;
  attempts: Attempt[];
  commit: Commit | null;
};

export type Why = {
  causes: Cause[];
};
