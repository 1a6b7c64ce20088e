"""What else a batch may become, and an ordinary pipeline, beside Structured Streaming that does the same by foreachBatch.

Appended rows, the newest row per key, a transform with two states and four files per batch, and words of text files.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
from psycopg2 import sql

from benchmarks.cardinality import STREAMING
from benchmarks.events import offer, write_events
from benchmarks.harness import Bar, Bench, Figure, compared, timed
from benchmarks.peer import Peer
from benchmarks.pipelines import APPENDED, NEWEST, ORDINARY, WORDS
from benchmarks.project import Project, stack_without_airflow
from tidegate.jobs import Pipeline
from tidegate.jobs.engine.local_run import run_pipeline

VOCABULARY = 50_000
STORAGE = "WITH (fillfactor = 75, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_limit = 2000)"
COUNTED = "events bigint NOT NULL, amount bigint NOT NULL"
VERSION = "at bigint NOT NULL, page text, amount bigint"
EVENTS = "user_id bigint, page text, amount bigint"


@dataclass(frozen=True)
class Case:
    """A pipeline, the peer's way of doing the same, and how to compare both with the files."""

    pipeline: Pipeline
    job: str
    key: str
    tables: tuple[tuple[str, str], ...]  # the peer's: a suffix of the name, and the columns
    wanted: tuple[tuple[str, str], ...]  # by state: the query of its rows over the view "input"
    what: str
    files_per_batch: int = 1


ADDED = "count(*), sum(amount)::BIGINT"
CASES = (
    Case(
        APPENDED,
        "append",
        "",
        (("", f"batch bigint, position bigint, {EVENTS}, PRIMARY KEY (batch, position)"),),
        (("event", "SELECT user_id, page, amount FROM input"),),
        "appended as rows",
    ),
    Case(
        NEWEST,
        "newest",
        "user_id",
        (("", f"user_id bigint PRIMARY KEY, {VERSION}"),),
        (("newest_event", 'SELECT user_id, max("at"), arg_max(page, "at"), arg_max(amount, "at") FROM input GROUP BY 1'),),
        "to the newest per user",
    ),
    Case(
        ORDINARY,
        "two_states",
        "",
        (
            ("_by_page", f'page text COLLATE "C" PRIMARY KEY, {COUNTED}'),
            ("_by_bucket", f"bucket bigint PRIMARY KEY, {COUNTED}"),
        ),
        (
            ("by_page", f"SELECT page, {ADDED} FROM input WHERE amount >= 10 GROUP BY 1"),
            ("by_bucket", f"SELECT user_id % 10000, {ADDED} FROM input WHERE amount >= 10 GROUP BY 1"),
        ),
        "through a transform into two states, four files per batch",
        files_per_batch=4,
    ),
    Case(
        WORDS,
        "words",
        "word",
        (("", 'word text COLLATE "C" PRIMARY KEY, events bigint NOT NULL'),),
        (("per_word", "SELECT word, count(*) FROM input GROUP BY word"),),
        "of words counted",
    ),
)


def run(bench: Bench) -> Iterator[Figure]:
    """Time ten files of two million events by each way, and as many words of text."""
    files, rows = bench.choose(10, 4), bench.choose(2_000_000, 50_000)
    write_events(bench.folder / "events", files, rows, numbered=True)
    write_words(bench.folder / "words", files, rows)
    with stack_without_airflow(bench.folder / "project") as made, Peer(made.settings, bench.folder) as peer:
        made.register(*(case.pipeline for case in CASES))
        for case in CASES:
            is_text = case.pipeline is WORDS
            offered = sorted((bench.folder / ("words" if is_text else "events")).iterdir())
            trial = _Trial(bench, made, peer, case, offered)
            ours, theirs = trial.passes(bench.passes)
            what = f"{files} files of {rows:,} {'words' if is_text else 'events'} {case.what}"
            yield compared("kinds", what, ours, STREAMING, theirs, bar=Bar(at_least=1.5))


def write_words(folder: Path, files: int, words: int) -> None:
    """Write lines of ten words; a few words are frequent, most are rare, as in a language."""
    folder.mkdir(parents=True)
    with duckdb.connect() as connection:
        for number in range(files):
            first = number * words
            connection.execute(
                f"""COPY (
                    SELECT string_agg(translate(floor(pow({VOCABULARY}, (hash(i) % 1000000) / 1e6))::INT::VARCHAR,
                                                '0123456789', 'abcdefghij'), ' ' ORDER BY i) AS line
                    FROM range({first}, {first + words}) AS numbers(i) GROUP BY i // 10 ORDER BY i // 10
                ) TO '{folder / f"{number:04d}.txt"}' (FORMAT csv, HEADER false, QUOTE '')"""
            )


class _Trial:
    """Runs peer and engine alternately over the same files."""

    def __init__(self, bench: Bench, made: Project, peer: Peer, case: Case, files: list[Path]) -> None:
        self._bench = bench
        self._project = made
        self._peer = peer
        self._case = case
        self._files = files
        self._arrivals = 0
        self._ours = made.home / "data" / case.pipeline.name
        self._theirs = bench.folder / "peer" / case.pipeline.name
        with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
            for suffix, columns in case.tables:
                table = sql.Identifier(f"peer_{case.pipeline.name}{suffix}")
                cursor.execute(sql.SQL("CREATE TABLE {} ({}) {}").format(table, sql.SQL(columns), sql.SQL(STORAGE)))

    def passes(self, passes: int) -> tuple[list[float], list[float]]:
        """Run both untimed, then time each in turn, and check the results."""
        ours: list[float] = []
        theirs: list[float] = []
        for number in range(passes + 1):
            for name, way, times in ((STREAMING, self._streaming, theirs), ("tidegate run", self._engine, ours)):
                self._project.settle()
                times.append(way())
                self._bench.tell(f"{self._case.pipeline.name}, pass {number}, {name}: {times[-1]:.2f} s")
        self._check()
        return ours[1:], theirs[1:]

    def _streaming(self) -> float:
        self._offer(self._theirs)
        case = self._case
        target = f"peer_{case.pipeline.name}"
        return self._peer.run(self._theirs, case.key, target, job=case.job, files_per_trigger=case.files_per_batch)

    def _engine(self) -> float:
        self._offer(self._ours)
        pipeline = self._case.pipeline
        return timed(lambda: run_pipeline(self._project.settings, pipeline, run_id=f"benchmark {self._arrivals}"))

    def _offer(self, folder: Path) -> None:
        self._arrivals += 1
        offer(self._files, folder, f"{self._arrivals:04d}")

    def _check(self) -> None:
        """Compare our states and the peer's tables with what DuckDB computes from the files, by number and hash of the rows."""
        case = self._case
        for (state, query), (suffix, _) in zip(case.wanted, case.tables, strict=True):
            (spec,) = (spec for spec in case.pipeline.spec.states if spec.name == state)
            columns = [column.name for column in spec.columns if column.name != "position"]
            wanted = self._fingerprint_of_files(query)
            assert self._fingerprint("state", state, columns) == wanted, f"{case.pipeline.name} is wrong"
            assert self._fingerprint("public", f"peer_{case.pipeline.name}{suffix}", columns) == wanted, "the peer is wrong"

    def _fingerprint(self, schema: str, table: str, columns: list[str]) -> tuple[int, int]:
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        statement = sql.SQL(
            "SELECT count(*), sum(('x' || left(md5(concat_ws(' ', {})), 8))::bit(32)::bigint)::bigint FROM {}"
        ).format(names, sql.Identifier(schema, table))
        with contextlib.closing(self._project.administrator()) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            (found,) = cursor.fetchall()
        return tuple(found)

    def _fingerprint_of_files(self, query: str) -> tuple[int, int]:
        if self._case.pipeline is WORDS:
            lines = f"read_csv('{self._ours}/*.txt', columns = {{'line': 'VARCHAR'}}, delim = '', quote = '', header = false)"
            given = f"SELECT unnest(string_split(line, ' ')) AS word FROM {lines}"
        else:
            given = f"SELECT * FROM '{self._ours}/*.parquet'"
        with duckdb.connect() as connection:
            connection.execute(f"CREATE VIEW input AS {given}")
            texts = "concat_ws(' ', *COLUMNS(*))"
            statement = f"SELECT count(*), sum(('0x' || left(md5({texts}), 8))::BIGINT)::BIGINT FROM ({query})"
            return connection.execute(statement).fetchall()[0]
