"""The real store behind the model's steps: the only module of this folder that knows how it is called.

`Actors.do` runs a step of the model, by its name and arguments, as a process would, and returns what the store answers in the
model's words; `Actors.interleave` runs two, of which the first is held before one of its statements until the second has ended
or waits for a lock. `Actors.observe` reads the whole ledger and the states in one snapshot, and `expected` says what a world
looks like there. Nothing is replaced by a fake but the computation: partials are made of positions here instead of by Spark.
"""

import io
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import psycopg2
import sqlalchemy as sa
from psycopg2.errors import UndefinedTable
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2

from tests.batches import Stream, end_of, plan_again
from tests.crashes import Crash
from tests.model.core import WINDOW, World, is_bad, key_of
from tests.store import (
    QUARANTINED,
    Attempt,
    Commit,
    Mend,
    NewInput,
    NotStarted,
    PipelineSpec,
    Pruned,
    QuarantineSpec,
    Redo,
    ReplanNeeded,
    Staged,
    StagedPartition,
    Tracked,
    copy_rows,
    digest_statement,
    encode_metadata,
    registration,
    retirement,
    state_tables,
    tables,
)
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, Rows, State, Sum
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

VERSIONS = (1, 2)
PATIENCE_SECONDS = 30
# What a reset puts back; partitions stay as they are, and so do the notes of them.
AS_USUAL = "SET session_replication_role = origin; RESET tidegate.writer"
KEPT = [table for table in tables.ledger.tables if table != "tidegate.state_range"]
Handle = tuple[int, int, int]  # of an attempt: txid, number, and the history in which it began


class Kinds(NamedTuple):
    """The kinds of a pipeline's source and states, whether it sets bad records aside, and whether a state records changes."""

    source: Literal["transactional", "opaque"]
    states: Literal["transactional", "opaque"]
    quarantines: bool = False
    records_changes: bool = False


ALL_KINDS = (
    Kinds("transactional", "transactional"),
    Kinds("opaque", "opaque", quarantines=True),
    Kinds("transactional", "opaque", records_changes=True),
)


class Call(NamedTuple):
    """A step of the model, to be run: its name and its arguments."""

    step: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.step}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


# Faults


class Fault(NamedTuple):
    """How a step ends early: its connection is cut around the COMMIT of what it has written, or it dies before a statement."""

    kind: Literal["cut before COMMIT", "cut after COMMIT", "dies"]
    statement: int = 0


@dataclass
class Script:
    """What happens to a thread's statements, which are counted from 1; a COMMIT counts as one."""

    fault: Fault | None = None
    hold_at: int | None = None
    is_held: threading.Event = field(default_factory=threading.Event)
    may_go_on: threading.Event = field(default_factory=threading.Event)
    has_fired: bool = False
    backend: int | None = None
    statements: int = 0
    _writes: bool = False

    def reach(self, connection: Any, statement: str) -> None:
        """Pass one more statement: be held before it, or die."""
        self.backend = connection.info.backend_pid
        self.statements += 1
        self._writes = self._writes or re.match(r"INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|WITH", statement.lstrip()) is not None
        if self.hold_at == self.statements:
            self.is_held.set()
            assert self.may_go_on.wait(PATIENCE_SECONDS), f"held for ever before {statement}"
        if self.fault is not None and self.fault.kind == "dies" and self.fault.statement == self.statements:
            self.has_fired = True
            raise Crash(statement)

    def commit(self, connection: Any, send: Callable[[], None]) -> None:
        """Send a COMMIT, unless the connection is cut before; or cut it after that."""
        self.reach(connection, "COMMIT")
        is_cut = self.fault is not None and self.fault.kind != "dies" and self._writes and not self.has_fired
        self._writes = False
        if is_cut:
            self.has_fired = True
            if self.fault == Fault("cut after COMMIT"):
                send()
            connection.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")
        send()


_scripts: dict[int, Script] = {}


@contextmanager
def scripted() -> Iterator[None]:
    """Let threads follow their scripts at each of SQLAlchemy's statements."""

    def before_statement(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if script := _scripts.get(threading.get_ident()):
            script.reach(cursor.connection, statement)

    real_commit = PGDialect_psycopg2.do_commit

    def do_commit(dialect: Any, connection: Any) -> None:
        if script := _scripts.get(threading.get_ident()):
            script.commit(connection.driver_connection, lambda: real_commit(dialect, connection))
        else:
            real_commit(dialect, connection)

    sa.event.listen(sa.Engine, "before_cursor_execute", before_statement)
    try:
        with patch.object(PGDialect_psycopg2, "do_commit", do_commit):
            yield
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", before_statement)


# Pipelines


def declared(kinds: Kinds, version: int) -> PipelineSpec:
    """Declare a pipeline of these kinds, with a keyed state and one of appended rows."""
    name = f"{kinds.source[:2]}_{kinds.states[:2]}"
    aggregates = {"records": Count(), "total": Sum("bit")}
    keyed = State(key={"key": "text"}, aggregates=aggregates, kind=kinds.states, changes=kinds.records_changes)
    return Pipeline(
        name=name,
        source=Stream(kinds.source),
        states={f"{name}_keyed": keyed, f"{name}_log": Rows({"record": "bigint"})},
        window=WINDOW,
        version=version,
        on_poison="quarantine" if kinds.quarantines else "block",
    ).spec


# The real store


@dataclass
class _StagedRows:
    """What an attempt has staged last, and whether it has sealed that."""

    partitions: list[StagedPartition]
    tracked: Tracked
    are_sealed: bool = False


@dataclass
class Did:
    """What a step answered, and whether its fault has struck."""

    answer: str
    has_fired: bool = False


class Actors:
    """Processes on one real database, which run the model's steps; `begin` empties it for another history."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = StateStore.connect(replace(settings, staging_retention_hours=0))
        self.owner = StateStore.connect(settings, user=settings.pg_owner)
        self._stager = psycopg2.connect(**settings.conninfo(user=settings.pg_stager))
        self._administrator = psycopg2.connect(**settings.conninfo(user="postgres"))
        self._administrator.autocommit = True
        self._threads = ThreadPoolExecutor(2)
        self._numbers = count(100)
        self._specs = {(kinds, version): declared(kinds, version) for kinds in ALL_KINDS for version in VERSIONS}
        self.waited = 0
        self._register()
        self.begin(ALL_KINDS[0])

    def close(self) -> None:
        """Close all connections."""
        self._threads.shutdown()
        self.store.close()
        self.owner.close()
        self._stager.close()
        self._administrator.close()

    def _register(self) -> None:
        """Register the pipelines, and keep the rows of an empty ledger for `begin`."""
        first = [self._specs[kinds, VERSIONS[0]] for kinds in ALL_KINDS]
        with migrations.connected(self.settings) as connection:
            state_tables.metadata_of(tuple(first)).create_all(connection)
            for spec in first:
                registration.register(connection, spec)
        states = [f"state.{name}" for spec in first for name in spec.tables]
        self._execute(
            f"CREATE SCHEMA empty; CREATE SCHEMA copy; {''.join(f'CREATE TABLE empty.{_bare(t)} AS TABLE {t};' for t in KEPT)}"
            f"{''.join(f'CREATE TABLE copy.{_bare(t)} AS TABLE {t} WITH NO DATA;' for t in [*KEPT, *states])}"
        )

    def begin(self, kinds: Kinds) -> None:
        """Empty the ledger, the states and staging, and go on with the pipeline of these kinds."""
        self.kinds, self.code = kinds, VERSIONS[0]
        self._attempts: dict[Handle, Attempt] = {}
        self._staged: dict[Handle, _StagedRows] = {}
        self._histories: dict[str, int] = {}
        put_back = "".join(f"DELETE FROM {t}; INSERT INTO {t} OVERRIDING SYSTEM VALUE TABLE empty.{_bare(t)};" for t in KEPT)
        emptied = "".join(f"DELETE FROM state.{name};" for name in self.spec.tables)
        self._execute("TRUNCATE copy.cursor")
        self._execute(
            f"{self._as_an_apply_worker} {self._drop_staging()} {put_back} {emptied}"
            f"UPDATE tidegate.cursor SET history = gen_random_uuid(); {AS_USUAL}"
        )
        self._note_history()

    @property
    def _as_an_apply_worker(self) -> str:
        """Return the statements after which no trigger fires but the guard of the states, which lets this session write."""
        return f"SET session_replication_role = replica; SET tidegate.writer = '{self.spec.name}';"

    def _drop_staging(self) -> str:
        """Return the statement that drops all staging tables."""
        found = self._execute(
            "SELECT format('staging.%I', relname) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'staging'::regnamespace"
        )
        return f"DROP TABLE {', '.join(name for (name,) in found)};" if found else ""

    @property
    def _copied(self) -> list[str]:
        """The tables that a copy of the database has here: the ledger, and the states of the pipeline."""
        return [*KEPT, *(f"state.{name}" for name in self.spec.tables)]

    @property
    def spec(self) -> PipelineSpec:
        """The pipeline as the code that runs declares it."""
        return self._specs[self.kinds, self.code]

    # Run steps

    def do(self, call: Call, fault: Fault | None = None) -> Did:
        """Run a step as a process would; return its answer, or "died"."""
        return self._run(call, Script(fault))

    def interleave(self, first: Call, statement: int, second: Call) -> tuple[Did, Did]:
        """Run a step up to one of its statements, then another one until it ends or waits for a lock; then let both end."""
        script, other = Script(hold_at=statement), Script()
        held = self._threads.submit(self._run, first, script)
        while not (script.is_held.wait(0.001) or held.done()):
            pass
        running = self._threads.submit(self._run, second, other)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not running.done() and not self._waits(other.backend):
            assert time.monotonic() < deadline, f"{second} neither ends nor waits"
            time.sleep(0.001)
        script.has_fired = script.is_held.is_set()
        if not running.done():
            other.has_fired = True
        script.may_go_on.set()
        return held.result(PATIENCE_SECONDS), running.result(PATIENCE_SECONDS)

    def knows(self, attempt: Handle) -> bool:
        """Return whether a process has learned that it has begun this attempt."""
        return attempt in self._attempts

    def _waits(self, backend: int | None) -> bool:
        return backend is not None and self._execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [backend])[0][0]

    def _run(self, call: Call, script: Script) -> Did:
        _scripts[threading.get_ident()] = script
        try:
            answer = getattr(self, f"_{call.step}")(**call.arguments)
        except TidegateError as error:
            answer = error.code
        except Crash:
            answer = "died"
        finally:
            del _scripts[threading.get_ident()]
        return Did(answer, script.has_fired)

    # The steps of the core

    def _plan(self, sizes: tuple[int, ...], *, takes_up: bool = False) -> str:
        run_id = f"run {next(self._numbers)}"
        while True:
            after = self.store.last_opened(self.spec.name)
            pending = self.store.uncommitted(self.spec.name, 1000) if takes_up else []
            start, metadata = end_of(after.metadata if after else None), []
            for size in sizes:
                metadata.append(encode_metadata({"start": start, "end": start + size}))
                start += size
            txids = self.store.open_batches(self.spec, run_id, pending, after, metadata)
            if txids is not None:  # else another planner was first
                return f"opened {txids}"

    def _start(self, txid: int, mode: Any = "resume", size: int = 1) -> str:
        new_input: NewInput | None = None
        while True:
            begun = self.store.start_attempt(self.spec, txid, "a process", mode=mode, new_input=new_input)
            if isinstance(begun, ReplanNeeded):
                new_input = NewInput(encode_metadata(plan_again(begun, size)), begun.continues)
                continue
            if isinstance(begun, Attempt):
                history = self._histories.setdefault(str(begun.history), len(self._histories))
                self._attempts[begun.txid, begun.number, history] = begun
                return f"attempt {begun.number}"
            return begun.name if isinstance(begun, NotStarted) else _done(begun)

    def _stage(self, txid: int, number: int, history: int = 0) -> str:
        attempt = self._attempts[txid, number, history]
        good, bad = self._read(attempt)
        rows: dict[str, list[list[Any]]] = {
            self.spec.states[0].name: [[key, len(of_key), sum(1 << p for p in of_key)] for key, of_key in _by_key(good)],
            self.spec.states[1].name: [[position, position] for position in good],
        }
        if self.spec.quarantines:
            rows[QuarantineSpec(self.spec.name).name] = [["it is bad", f"{p:03}", str(p), "true"] for p in bad]
        task_attempt = next(self._numbers)
        try:
            with self._stager, self._stager.cursor() as cursor:
                partitions = [_copy(cursor, staged, attempt, rows[staged.name], task_attempt) for staged in self.spec.staged]
        except UndefinedTable:
            return "UNPROCESSED"
        known = self._staged.get((txid, number, history))
        if known is None or not known.are_sealed:
            tracked = Tracked(len(good) + len(bad), sum(1 << p for p in (*good, *bad)), len(bad))
            self._staged[txid, number, history] = _StagedRows(partitions, tracked)
        return "staged"

    def _seal(self, txid: int, number: int, history: int = 0, *, other_rows: bool = False) -> str:
        staged = self._staged.get((txid, number, history), _StagedRows([], Tracked(0)))
        tracked = replace(staged.tracked, source_hash_sum=-1) if other_rows else staged.tracked
        self.store.seal(self._attempts[txid, number, history], staged.partitions, tracked)
        staged.are_sealed = True
        return "sealed"

    def _fail(self, txid: int, number: int, history: int = 0, *, is_poison: bool = False) -> str:
        tries = self.store.fail_attempt(self._attempts[txid, number, history], "BROKEN: it broke.", is_poison=is_poison)
        return f"{tries} tries"

    def _beat(self, txid: int, number: int, history: int = 0) -> str:
        return str(self.store.keep_alive(self._attempts[txid, number, history]))

    def _commit(self, txid: int) -> str:
        return _done(self.store.commit_batch(self.spec, txid, "a process"))

    def _commit_ready(self) -> str:
        return f"committed {[f'{done.txid}:{done.attempt}' for done in self.store.commit_ready(self.spec, 'a process')]}"

    def _skip(self, txid: int) -> str:
        done = self.store.skip_batch(self.spec, txid, "an operator", "it cannot be read")
        return "skipped in its turn" if done is None else _done(done)

    def _redo(self, txid: int) -> str:
        done = self.owner.redo_batch(self.spec, txid, Redo("an operator", "it was wrong"))
        return f"redone {done.txid}:{done.attempt}"

    # What operators do

    def _give_up(self, txid: int, tries: int = 1) -> str:
        return str(self.store.give_up(self.spec.name, txid, "the policy", "it is bad", tries=tries))

    def _halt(self, txid: int) -> str:
        self.store.halt_batch(self.spec.name, txid, "a person has to look")
        return "halted"

    def _retry(self, txid: int | None = None) -> str:
        return f"retried {self.store.retry(self.spec.name, txid, 'an operator', 'it is mended')}"

    def _pause(self) -> str:
        return str(self.store.pause(self.spec.name, "an operator", "a test"))

    def _resume(self) -> str:
        return str(self.store.resume(self.spec.name, "an operator", "a test"))

    def _retire(self) -> str:
        done = self.owner.retire(self.spec.name, retirement.Request("an operator", "a test"))
        return "retired already" if done.already else "retired"

    def _reinstate(self) -> str:
        return str(self.owner.reinstate(self.spec.name, "an operator", "a test"))

    def _deploy(self, version: int) -> str:
        self.code = version
        return "deployed"

    def _migrate(self) -> str:
        with migrations.connected(self.settings) as connection:
            return "registered" if registration.register(connection, self.spec) else "unchanged"

    def _mend(self, txid: int, number: int) -> str:
        self.store.mend_quarantined(self.spec.name, txid, number, Mend("mended", "an operator", "a test"))
        return "mended"

    def _replay(self, txid: int | None = None) -> str:
        done = self.store.replay_quarantined(self.spec, "an operator", "a test", txid=txid)
        return "nothing waits" if done is None else f"replays {done[1]} by {done[0]}"

    def _drop_old_staging(self) -> str:
        return str(self.store.drop_old_staging(self.spec))

    def _prune(self, txid: int) -> str:
        keyed, so_far = self.spec.states[0], Pruned(txid)
        while so_far.are_more:
            so_far = self.owner.prune_changes(self.spec, keyed, so_far, "an operator", "a test")
        return "pruned"

    # An older copy

    def _back_up(self) -> str:
        self._execute("".join(f"TRUNCATE copy.{_bare(t)}; INSERT INTO copy.{_bare(t)} TABLE {t};" for t in self._copied))
        return "copied"

    def marked(self) -> tuple[int, int] | None:
        """Return the last commit that the witness knows of the copy's history: its txid and attempt."""
        found = self._execute("SELECT history::text FROM copy.cursor WHERE pipeline = %s", [self.spec.name])
        mark = self.store.witness.mark_of(self.spec.name, found[0][0]) if found else None
        return mark and mark.place

    def _restore(self, marked: object) -> str:  # noqa: ARG002 - the model asks for it
        put_back = "".join(
            f"DELETE FROM {t}; INSERT INTO {t} OVERRIDING SYSTEM VALUE TABLE copy.{_bare(t)};" for t in self._copied
        )
        self._execute(f"{self._as_an_apply_worker} {self._drop_staging()} {put_back} {AS_USUAL}")
        return "restored"

    def _accept(self) -> str:
        try:
            return "accepted" if migrations.accept_epoch(self.settings, "an operator") else "nothing to accept"
        finally:
            self._note_history()

    def _note_history(self) -> None:
        """Number the history of commits that the pipeline is in, in the order in which they begin."""
        ((history,),) = self._execute("SELECT history::text FROM tidegate.cursor WHERE pipeline = %s", [self.spec.name])
        self._histories.setdefault(history, len(self._histories))

    # Faults that strike from outside

    def _lose_staging(self, txid: int, number: int, history: int = 0, what: str = "table") -> str:
        keyed = self.spec.states[0].name
        if what == "table":
            self._execute(f"DROP TABLE IF EXISTS staging.{keyed}_{txid}_{number}")
        elif self._execute("SELECT to_regclass(%s)", [f"staging.{keyed}_{txid}_{number}"])[0][0]:
            known = self._staged.get((txid, number, history))
            own = [p.task_attempt for p in known.partitions] if known else []
            table = f"staging.{keyed}_{txid}_{number}"
            first = f"SELECT min(ctid) FROM {table} WHERE task_attempt = ANY(%s)"
            self._execute(f"DELETE FROM {table} WHERE ctid = ({first})", [own])
        return "lost"

    def _fall_silent(self, txid: int, number: int, history: int = 0) -> str:  # noqa: ARG002 - the model asks for it
        own = [self.spec.name, txid, number]
        self._execute(
            "UPDATE tidegate.attempt SET seen_at = seen_at - interval '90 s' WHERE (pipeline, txid, attempt) = (%s, %s, %s)",
            own,
        )
        return "silent"

    # What is there

    def observe(self) -> dict[str, Any]:
        """Return what the ledger and the states hold, from one snapshot."""
        keyed, log = (state.name for state in self.spec.states)
        before = "previous_records, previous_total, previous_txid" if self.kinds.states == "opaque" else "NULL, NULL, NULL"
        changes = f"state.{keyed}_changes" if self.kinds.records_changes else f"(SELECT * FROM state.{keyed} LIMIT 0)"
        statement = _OBSERVED.format(keyed=keyed, log=log, before=before, changes=changes)
        (seen,) = self._execute(statement, {"pipeline": self.spec.name})[0]
        return {name: value or [] for name, value in seen.items()}

    def _read(self, attempt: Attempt) -> tuple[list[int], list[int]]:
        """Return the positions that an attempt's metadata names, and the bad ones among them; those in quarantine as mended."""
        read = attempt.source_metadata
        if QUARANTINED not in read:
            positions = range(read["start"], read["end"])
            bad = [position for position in positions if self.spec.quarantines and is_bad(position)]
            return [position for position in positions if position not in bad], bad
        statement = "SELECT payload::int, mended_payload IS NOT NULL FROM tidegate.quarantine WHERE pipeline = %s AND "
        taken = self._execute(f"{statement} replayed_txid = %s ORDER BY txid, number", [self.spec.name, attempt.txid])
        return [p for p, is_mended in taken if is_mended], [p for p, is_mended in taken if not is_mended]

    def _execute(self, statement: str, parameters: Any = None) -> list[tuple]:
        with self._administrator.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []


_WITH_PLAN = "coalesce(a.source_metadata, b.source_metadata)"
_READ = "convert_from({}, 'UTF8')::json -> 'metadata'"
_OBSERVED = f"""
SELECT json_build_object(
  'cursor', (SELECT json_build_array(txid, attempt) FROM tidegate.cursor WHERE pipeline = %(pipeline)s),
  'batches', (SELECT json_agg(json_build_array(txid, {_READ.format("source_metadata")}, attempt, halted_at IS NOT NULL,
     skip_reason IS NOT NULL, tries_after) ORDER BY txid) FROM tidegate.batch WHERE pipeline = %(pipeline)s),
  'attempts', (SELECT json_agg(json_build_array(a.txid, a.attempt, {_READ.format(_WITH_PLAN)},
     CASE WHEN sealed_at IS NOT NULL THEN 'sealed' WHEN failed_at IS NOT NULL THEN 'failed' ELSE 'open' END,
     coalesce(is_poison, false), (SELECT coalesce(sum(rows), 0) FROM tidegate.seal s
       WHERE (s.pipeline, s.txid, s.attempt) = (a.pipeline, a.txid, a.attempt))) ORDER BY a.txid, a.attempt)
     FROM tidegate.attempt a JOIN tidegate.batch b USING (pipeline, txid) WHERE pipeline = %(pipeline)s),
  'commits', (SELECT json_agg(json_build_array(txid, attempt, skipped_reason IS NOT NULL) ORDER BY txid)
     FROM tidegate.commit WHERE pipeline = %(pipeline)s),
  'keyed', (SELECT json_agg(json_build_array(txid, key, records, total, {{before}}) ORDER BY key) FROM state.{{keyed}}),
  'changes', (SELECT json_agg(json_build_array(txid, key, records, total, {{before}}) ORDER BY txid, key) FROM {{changes}} c),
  'log', (SELECT json_agg(json_build_array(txid, record) ORDER BY txid, record) FROM state.{{log}}),
  'quarantine', (SELECT json_agg(json_build_array(txid, number, payload, replayed_txid, mended_payload IS NOT NULL)
     ORDER BY txid, number) FROM tidegate.quarantine WHERE pipeline = %(pipeline)s),
  'pipeline', (SELECT json_build_array(paused_at IS NOT NULL, retired_at IS NOT NULL, (declaration ->> 'version')::int)
     FROM tidegate.pipeline WHERE pipeline = %(pipeline)s))
"""


def expected(world: World) -> dict[str, Any]:
    """Return what `observe` returns if the store holds this world."""
    batches = list(enumerate(world.batches, 1))
    attempts = [(txid, number, a) for txid, batch in batches for number, a in enumerate(batch.attempts, 1)]

    def read(txid: int, source: Any) -> dict[str, Any]:
        position = {"start": source.start, "end": source.end}
        return {QUARANTINED: source.replayed, "source": position} if source.replayed else position

    def sealed(a: Any) -> int:
        return len(_by_key(a.good)) + len(a.good) + len(a.bad) if a.phase == "sealed" else 0

    def row(key: str, r: Any) -> list[Any]:
        before = [None, None] if r.before is None else [len(r.before), _total(r.before)]
        return [key, len(r.counted), _total(r.counted), *before, r.txid_before]

    return {
        "cursor": [world.cursor, world.commits[-1].attempt if world.commits else None],
        "batches": [
            [txid, read(txid, b.input), len(b.attempts), b.is_halted, b.is_given_up, b.tries_after] for txid, b in batches
        ],
        "attempts": [[txid, number, read(txid, a.input), a.phase, a.is_poison, sealed(a)] for txid, number, a in attempts],
        "commits": [[txid, done.attempt, done.is_skipped] for txid, done in enumerate(world.commits, 1)],
        "keyed": [[r.txid, *row(key, r)] for key, r in sorted(world.keyed)],
        "changes": [[txid, *row(key, r)] for txid, key, r in sorted(world.changes, key=lambda change: change[:2])],
        "log": [list(entry) for entry in sorted(world.log)],
        "quarantine": [[r.txid, r.number, str(r.position), r.replayed_by, r.is_mended] for r in sorted(world.aside)],
        "pipeline": [world.is_paused, world.is_retired, world.version],
    }


def _total(positions: tuple[int, ...]) -> int:
    return sum(1 << position for position in positions)


def _by_key(positions: Sequence[int]) -> list[tuple[str, list[int]]]:
    return [(key, [p for p in positions if key_of(p) == key]) for key in sorted({key_of(p) for p in positions})]


def _copy(cursor: Any, staged: Staged, attempt: Attempt, rows: list[list[Any]], task_attempt: int) -> StagedPartition:
    """Copy rows into staging as a Spark task would, in the stager's role."""
    table = state_tables.staging_table_of(staged, attempt.txid, attempt.number)
    content = io.BytesIO("".join(",".join(map(str, [*row, task_attempt])) + "\n" for row in rows).encode())
    digest = digest_statement(staged, attempt.txid, attempt.number)
    written, checksum = copy_rows(cursor, table.name, list(table.c.keys()), content, task_attempt, digest)
    return StagedPartition(staged.name, 0, task_attempt, written, checksum)


def _done(done: Commit) -> str:
    word = "committed" if done.skipped_reason is None else "skipped"
    return f"{'already ' if done.already_committed else ''}{word} {done.txid}:{done.attempt}"


def _bare(table: str) -> str:
    return table.rpartition(".")[2]
