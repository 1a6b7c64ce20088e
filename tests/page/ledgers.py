"""Rows and ledgers for the page's tests, which SQL writes."""

from typing import Any

from psycopg2 import sql

from tests.statements import execute
from tidegate.state_store import Settings

PIPELINES, TXIDS = 100, 100_000


def as_owner(settings: Settings, statement: str | sql.Composable, parameters: Any = None) -> list[tuple]:
    """Run a statement as the owner of the tables, whom the trigger on state tables lets write as a pipeline."""
    return execute(settings.conninfo(user=settings.pg_owner), statement, parameters)


def write_rows(settings: Settings, pipeline: str, table: str, rows: list[tuple]) -> None:
    values = sql.SQL(", ").join(sql.SQL("({})").format(sql.SQL(", ").join(map(sql.Literal, row))) for row in rows)
    insert = sql.SQL("SET LOCAL tidegate.writer = {}; INSERT INTO {} VALUES {}")
    as_owner(settings, insert.format(sql.Literal(pipeline), sql.Identifier("state", table), values))


LARGE_LEDGER = """
INSERT INTO tidegate.pipeline (pipeline, source_kind, fingerprint, declaration)
SELECT 'large_' || n, source_kind, fingerprint,
       jsonb_set(declaration, '{name}', to_jsonb('large_' || n))
FROM tidegate.pipeline, generate_series(1, %(pipelines)s) n WHERE pipeline = 'clicks';

INSERT INTO tidegate.cursor (pipeline, txid, attempt, source_digest, epoch)
SELECT 'large_' || n, CASE n WHEN 1 THEN %(txids)s ELSE %(others)s END - 20, 1, '\\x00', c.epoch
FROM tidegate.cursor c, generate_series(1, %(pipelines)s) n WHERE c.pipeline = 'clicks';

INSERT INTO tidegate.batch (pipeline, txid, source_metadata, source_digest, opened_by, opened_at, attempt, awaits_ack)
SELECT c.pipeline, t, b.source_metadata, b.source_digest, 'a run', now() - make_interval(secs => c.txid + 20 - t),
       CASE WHEN t <= c.txid + 16 THEN 1 ELSE 0 END, false
FROM tidegate.cursor c, generate_series(1, c.txid + 20) t,
     (SELECT source_metadata, source_digest FROM tidegate.batch WHERE pipeline = 'clicks' AND txid = 1) b
WHERE c.pipeline LIKE 'large%%';

INSERT INTO tidegate.attempt (pipeline, txid, attempt, owner, fingerprint, source_digest, started_at, sealed_at, failed_at,
                              error, is_poison, source_rows)
SELECT b.pipeline, b.txid, 1, 'a run', 'f', b.source_digest, b.opened_at,
       CASE WHEN b.txid %% 7 > 0 OR b.txid <= c.txid THEN b.opened_at END,
       CASE WHEN b.txid %% 7 = 0 AND b.txid > c.txid THEN b.opened_at END,
       CASE WHEN b.txid %% 7 = 0 AND b.txid > c.txid THEN 'SPARK_UNAVAILABLE: away' END,
       CASE WHEN b.txid %% 7 = 0 AND b.txid > c.txid THEN false END, 1000
FROM tidegate.batch b JOIN tidegate.cursor c USING (pipeline) WHERE b.pipeline LIKE 'large%%' AND b.attempt = 1;

INSERT INTO tidegate.commit (pipeline, txid, attempt, source_digest, owner, key_count, committed_at, merged_at, skipped_reason)
SELECT b.pipeline, b.txid, 1, b.source_digest, 'a run', 10, b.opened_at, b.opened_at + interval '1 second',
       CASE b.txid WHEN 5 THEN 'given up' END
FROM tidegate.batch b JOIN tidegate.cursor c USING (pipeline) WHERE b.pipeline LIKE 'large%%' AND b.txid <= c.txid;
"""


def write_large_ledger(settings: Settings, pipelines: int = PIPELINES, txids: int = TXIDS, others: int = 1000) -> None:
    """Write pipelines, the first with so many txids, others with fewer; pipeline clicks is their model, and has a batch."""
    as_owner(settings, LARGE_LEDGER, {"pipelines": pipelines, "txids": txids, "others": others})
    as_owner(settings, "ANALYZE tidegate.batch, tidegate.attempt, tidegate.commit, tidegate.cursor, tidegate.pipeline")
