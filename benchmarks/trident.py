"""The word count beside that of a real Trident topology: Storm's LocalCluster and a transactional map in the same Postgres.

Trident's side is `TridentWords.java`, compiled here: each file is one transaction, as it is one batch for us.
"""

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from psycopg2 import sql

from benchmarks.events import offer
from benchmarks.harness import Bar, Bench, Figure, compared, timed
from benchmarks.kinds import STORAGE, write_words
from benchmarks.pipelines import WORDS
from benchmarks.project import Project, stack_without_airflow
from tidegate.jobs.engine.local_run import run_pipeline
from tidegate.stack.components import java_libraries
from tidegate.stack.components.spark import java_program
from tidegate.state_store import Settings

PACKAGES = ("org.apache.storm:storm-server:2.8.3", "org.postgresql:postgresql:42.7.7")
SOURCE = Path(__file__).with_name("TridentWords.java")
TABLE = "trident_words"
MEMORY = "4g"
MOST_SECONDS = 300


class Trident:
    """A LocalCluster in a process of its own, warm and waiting."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        java_libraries.fetch(PACKAGES, print)
        libraries = f"{java_libraries.folder(PACKAGES)}/*"
        compiler = Path(shutil.which(java_program()) or java_program()).resolve().with_name("javac")
        if not compiler.exists():
            raise SystemExit(f"There is no {compiler}: install a JDK, such as openjdk-17-jdk-headless.")
        subprocess.run([compiler, "-cp", libraries, "-d", folder / "classes", SOURCE], check=True)
        known = settings.conninfo(user="postgres")
        address = f"jdbc:postgresql://{known['host']}:{known['port']}/{known['dbname']}?user=postgres"
        opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in ("java.lang", "java.nio", "java.util", "sun.nio.ch")]
        self._log = folder / "trident.log"
        self._process = subprocess.Popen(
            [java_program(), f"-Xmx{MEMORY}", *opened, "-cp", f"{folder / 'classes'}:{libraries}", SOURCE.stem, address, TABLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            env={**os.environ, "PGPASSFILE": str(settings.pg_passfile)},
            cwd=folder,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def run(self, files: Sequence[Path]) -> float:
        """Count the words of these files, one transaction each; return the seconds."""
        assert self._process.stdin
        assert self._process.stdout
        print(*files, "", sep="\n", file=self._process.stdin, flush=True)
        limit = threading.Timer(MOST_SECONDS, self._process.kill)
        limit.start()
        answer = self._process.stdout.readline()
        limit.cancel()
        if not answer:
            raise RuntimeError(f"Trident ended, or took more than {MOST_SECONDS} s; see {self._log}")
        return float(answer)


def run(bench: Bench) -> Iterator[Figure]:
    """Time ten files of two million words by each way."""
    files, words = bench.choose(10, 3), bench.choose(2_000_000, 50_000)
    warm_up = bench.choose(3, 1)  # the JVMs go on compiling for several passes
    write_words(bench.folder / "words", files, words)
    offered = sorted((bench.folder / "words").iterdir())
    with stack_without_airflow(bench.folder / "project") as made:
        made.register(WORDS)
        with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
            columns = 'word text COLLATE "C" PRIMARY KEY, txid bigint NOT NULL, count bigint NOT NULL'
            cursor.execute(f"CREATE TABLE {TABLE} ({columns}) {STORAGE}")
        # Not in turn: an idle LocalCluster takes nearly half a core.
        theirs: list[float] = []
        with Trident(made.settings, bench.folder) as trident:
            for number in range(warm_up + bench.passes):
                made.settle()
                theirs.append(trident.run(offered))
                bench.tell(f"words, pass {number}: Trident {theirs[-1]:.2f} s")
        ours: list[float] = []
        for number in range(warm_up + bench.passes):
            made.settle()
            offer(offered, made.home / "data" / WORDS.name, f"{number:04d}")
            ours.append(timed(lambda: run_pipeline(made.settings, WORDS, run_id=f"benchmark {number}")))  # noqa: B023
            bench.tell(f"words, pass {number}: tidegate run {ours[-1]:.2f} s")
        _check(made)
    what = f"{files} files of {words:,} words counted"
    yield compared("trident", what, ours[warm_up:], "Trident LocalCluster", theirs[warm_up:], bar=Bar(at_least=2))


def _check(made: Project) -> None:
    """Compare both tables; `benchmarks.kinds` compares ours with what DuckDB counts."""
    ours = sql.SQL("SELECT word, events FROM state.per_word")
    theirs = sql.SQL("SELECT word, count FROM {}").format(sql.Identifier(TABLE))
    differing = sql.SQL("SELECT count(*) FROM (({a} EXCEPT {b}) UNION ALL ({b} EXCEPT {a})) AS d").format(a=ours, b=theirs)
    with contextlib.closing(made.administrator()) as connection, connection.cursor() as cursor:
        cursor.execute(differing)
        assert cursor.fetchall() == [(0,)], "the counts differ"
