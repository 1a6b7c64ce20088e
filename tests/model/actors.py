"""The real store under the model's steps: the only module of this folder that knows how it is called.

`Actors.do` runs a step of the model, by its name and arguments, as a process would, and returns what the store answers in the
model's words; `Actors.interleave` runs two, of which the first is held before one of its statements until the second has ended
or waits for a lock. `Actors.observe` reads the whole ledger and the states in one snapshot, and `expected` says what a world
looks like there. Nothing is replaced by a fake but the computation: partials are made of positions here instead of by Spark.
"""

import json
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psycopg2
from psycopg2.errors import UndefinedTable

from tests import store as ledger
from tests.batches import Stream, end_of, plan_again, stage
from tests.crashes import COMMIT, Crash, watched
from tests.model.core import WINDOW, World, is_bad, key_of
from tests.postgres_versions import AnyPostgres, running
from tests.steps import prune
from tidegate import migrations
from tidegate.jobs import Count, Pipeline, Rows, State, Sum
from tidegate.stack.components.server_process import reserve_port
from tidegate.state_store import Settings, StateStore
from tidegate.state_store.base.errors import TidegateError

# A pipeline for each: its source, its states, whether bad records are set aside, whether a state records changes.
FIRST_WORLDS = (
    World("transactional", "transactional"),
    World("opaque", "opaque", quarantines=True),
    World("transactional", "opaque", records_changes=True),
)
VERSIONS = (1, 2)
OF_ATTEMPTS = {"stage", "seal", "fail", "beat", "lose_staging", "fall_silent"}
PATIENCE_SECONDS = 30
BY = ("an operator", "a test")
# What steps answer that return nothing.
DONE = {"seal": "sealed", "skip": "skipped in its turn", "halt": "halted", "mend": "mended", "replay": "nothing waits"}
DONE |= {"deploy": "deployed", "prune": "pruned", "back_up": "copied", "restore": "restored"}
DONE |= {"lose_staging": "lost", "fall_silent": "silent"}
Handle = tuple[int, int, int]  # of an attempt: txid, number, and the history in which it began


class Call(NamedTuple):
    """A step of the model, to be run: its name and its arguments."""

    step: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.step}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"


class Did(NamedTuple):
    """What a step answered, and whether its fault has struck, or it was held, or has waited."""

    answer: str
    has_fired: bool = False


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
        self._writes |= re.match(r"INSERT|UPDATE|DELETE|CREATE|DROP|ALTER|WITH", statement.lstrip()) is not None
        if self.hold_at == self.statements:
            self.is_held.set()
            assert self.may_go_on.wait(PATIENCE_SECONDS), f"held for ever before {statement}"
        if self.fault == Fault("dies", self.statements):
            self.has_fired = True
            raise Crash(statement)

    def commit(self, connection: Any, send: Callable[[], None]) -> None:
        """Send a COMMIT, unless the connection is cut before; or cut it after that."""
        self.reach(connection, "COMMIT")
        is_cut = self.fault is not None and self.fault.kind != "dies" and self._writes and not self.has_fired
        self._writes = False
        if not is_cut or self.fault == Fault("cut after COMMIT"):
            send()
        if is_cut:
            self.has_fired = True
            connection.close()
            raise psycopg2.OperationalError("server closed the connection unexpectedly")


_scripts: dict[int, Script] = {}


@contextmanager
def scripted() -> Iterator[None]:
    """Let threads follow their scripts at each of SQLAlchemy's statements."""

    def before_statement(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        if script := _scripts.get(threading.get_ident()):
            script.reach(cursor.connection, statement)

    def do_commit(dialect: Any, connection: Any) -> None:
        if script := _scripts.get(threading.get_ident()):
            script.commit(connection.driver_connection, lambda: COMMIT(dialect, connection))
        else:
            COMMIT(dialect, connection)

    with watched(before_statement, do_commit):
        yield


# The real store


def declared(world: World, version: int) -> ledger.PipelineSpec:
    """Declare a pipeline of a world's kinds, with a keyed state and one of appended rows."""
    name = f"{world.source[:2]}_{world.states[:2]}"
    aggregates = {"records": Count(), "total": Sum("bit")}
    keyed = State(key={"key": "text"}, aggregates=aggregates, kind=world.states, changes=world.records_changes)
    return Pipeline(
        name=name,
        source=Stream(world.source),
        states={f"{name}_keyed": keyed, f"{name}_log": Rows({"record": "bigint"})},
        window=WINDOW,
        version=version,
        on_poison="quarantine" if world.quarantines else "block",
    ).spec


@dataclass
class Begun:
    """An attempt that a process knows it has begun; what it has staged last, and whether it has sealed that."""

    attempt: ledger.Attempt
    partitions: Sequence[ledger.StagedPartition] = ()
    tracked: ledger.Tracked = ledger.Tracked(0)
    is_sealed: bool = False


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
        self._specs = {(first, version): declared(first, version) for first in FIRST_WORLDS for version in VERSIONS}
        specs = [self._specs[first, VERSIONS[0]] for first in FIRST_WORLDS]
        with migrations.connected(settings) as connection:
            ledger.state_tables.metadata_of(tuple(specs)).create_all(connection)
            for spec in specs:
                ledger.registration.register(connection, spec)
        self._execute("CREATE SCHEMA empty; CREATE SCHEMA copy")
        for spec in specs:
            self._copy(spec, "empty", "CREATE TABLE IF NOT EXISTS {copy} AS TABLE {table};")
            self._copy(spec, "copy", "CREATE TABLE IF NOT EXISTS {copy} AS TABLE {table} WITH NO DATA;")
        self.begin(FIRST_WORLDS[0])

    def close(self) -> None:
        self._threads.shutdown()
        for connected in (self.store, self.owner, self._stager, self._administrator):
            connected.close()

    def begin(self, first: World) -> None:
        """Empty the ledger, the states and staging, and go on with the pipeline of this world."""
        self.first, self.code = first, VERSIONS[0]
        self.begun: dict[Handle, Begun] = {}
        self._histories: dict[str, int] = {}
        self._execute("TRUNCATE copy.cursor")
        self._put_back("empty", "UPDATE tidegate.cursor SET history = gen_random_uuid();")
        self._note_history()

    @property
    def spec(self) -> ledger.PipelineSpec:
        """The pipeline as the code that runs declares it."""
        return self._specs[self.first, self.code]

    def _copy(self, spec: ledger.PipelineSpec, schema: str, statement: str) -> None:
        """Run a statement for each table of the ledger, and of the states, and its copy in a schema.

        Partitions stay as they are, and so do the notes of them.
        """
        names = [*(each for each in ledger.tables.ledger.tables if each != "tidegate.state_range")]
        names += [f"state.{each}" for each in spec.tables]
        self._execute("".join(statement.format(table=t, copy=f"{schema}.{t.rpartition('.')[2]}") for t in names))

    def _put_back(self, schema: str, then: str = "") -> None:
        """Put copies in the place of all tables, and drop staging; no trigger fires but the states' guard, which agrees."""
        self._execute(f"SET session_replication_role = replica; SET tidegate.writer = '{self.spec.name}'")
        staging = (
            "SELECT format('staging.%I', relname) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'staging'::regnamespace"
        )
        if found := self._execute(staging):
            self._execute(f"DROP TABLE {', '.join(name for (name,) in found)}")
        self._copy(self.spec, schema, "DELETE FROM {table}; INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {copy};")
        self._execute(f"{then} SET session_replication_role = origin; RESET tidegate.writer")

    def _execute(self, statement: str, parameters: Any = None) -> list[tuple]:
        with self._administrator.cursor() as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

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
        script.has_fired = script.is_held.is_set()
        running = self._threads.submit(self._run, second, other)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (running.done() or other.has_fired):
            assert time.monotonic() < deadline, f"{second} neither ends nor waits"
            time.sleep(0.001)
            blocked = "SELECT cardinality(pg_blocking_pids(%s)) > 0"
            other.has_fired = other.backend is not None and self._execute(blocked, [other.backend])[0][0]
        script.may_go_on.set()
        return held.result(PATIENCE_SECONDS), running.result(PATIENCE_SECONDS)

    def _run(self, call: Call, script: Script) -> Did:
        _scripts[threading.get_ident()] = script
        arguments = dict(call.arguments)
        if call.step in OF_ATTEMPTS:
            arguments["at"] = (arguments.pop("txid"), arguments.pop("number"), arguments.pop("history", 0))
        try:
            answer = self._steps()[call.step](**arguments)
            if isinstance(answer, ledger.Commit):
                how = f"{'already ' * answer.already_committed}{'committed' if answer.skipped_reason is None else 'skipped'}"
                answer = f"{how} {answer.txid}:{answer.attempt}"
        except TidegateError as error:
            answer = error.code
        except Crash:
            answer = "died"
        finally:
            del _scripts[threading.get_ident()]
        return Did(DONE[call.step] if answer is None else str(answer), script.has_fired)

    def _steps(self) -> dict[str, Callable[..., Any]]:
        """Return the steps: those of one call as they are, all others are methods."""
        store, owner, spec, name = self.store, self.owner, self.spec, self.spec.name
        methods = {step: getattr(self, f"_{step}") for step in METHODS}
        return methods | {
            "fail": lambda at, **how: f"{store.fail_attempt(self.begun[at].attempt, 'BROKEN: it broke.', **how)} tries",
            "beat": lambda at: store.keep_alive(self.begun[at].attempt),
            "commit": lambda txid: store.commit_batch(spec, txid, "a process"),
            "commit_ready": lambda: f"committed {[f'{d.txid}:{d.attempt}' for d in store.commit_ready(spec, 'a process')]}",
            "skip": lambda txid: store.skip_batch(spec, txid, *BY),
            "redo": lambda txid: f"redone {txid}:{owner.redo_batch(spec, txid, ledger.Redo(*BY)).attempt}",
            "give_up": lambda txid, tries: store.give_up(name, txid, "the policy", "it is bad", tries=tries),
            "halt": lambda txid: store.halt_batch(name, txid, "a person has to look"),
            "retry": lambda txid=None: f"retried {store.retry(name, txid, *BY)}",
            "pause": lambda: store.pause(name, *BY),
            "resume": lambda: store.resume(name, *BY),
            "retire": lambda: "retired already" if owner.retire(name, ledger.retirement.Request(*BY)).already else "retired",
            "reinstate": lambda: owner.reinstate(name, *BY),
            "deploy": lambda version: setattr(self, "code", version),
            "mend": lambda txid, number: store.mend_quarantined(name, txid, number, ledger.Mend("mended", *BY)),
            "prune": lambda txid: prune(owner, spec, spec.states[0], txid) and None,
            "drop_old_staging": lambda: store.drop_old_staging(spec),
            "back_up": lambda: self._copy(spec, "copy", "TRUNCATE {copy}; INSERT INTO {copy} TABLE {table};"),
            "restore": lambda **_: self._put_back("copy"),
        }

    def _plan(self, sizes: tuple[int, ...], *, takes_up: bool = False) -> str:
        run_id, txids = f"run {next(self._numbers)}", None
        while txids is None:  # unless another planner was first
            after = self.store.last_opened(self.spec.name)
            pending = self.store.uncommitted(self.spec.name, 1000) if takes_up else []
            start, metadata = end_of(after.metadata if after else None), []
            for size in sizes:
                metadata.append(ledger.encode_metadata({"start": start, "end": start + size}))
                start += size
            txids = self.store.open_batches(self.spec, run_id, pending, after, metadata)
        return f"opened {txids}"

    def _start(self, txid: int, mode: Any = "resume", size: int = 1) -> Any:
        begun = self.store.start_attempt(self.spec, txid, "a process", mode=mode)
        while isinstance(begun, ledger.ReplanNeeded):
            new_input = ledger.NewInput(ledger.encode_metadata(plan_again(begun, size)), begun.continues)
            begun = self.store.start_attempt(self.spec, txid, "a process", mode=mode, new_input=new_input)
        if isinstance(begun, ledger.Attempt):
            history = self._histories.setdefault(str(begun.history), len(self._histories))
            self.begun[begun.txid, begun.number, history] = Begun(begun)
            return f"attempt {begun.number}"
        return begun.name if isinstance(begun, ledger.NotStarted) else begun

    def _stage(self, at: Handle) -> str:
        begun = self.begun[at]
        good, bad = self._read(begun.attempt)
        rows: dict[str, list[list[Any]]] = {
            self.spec.states[0].name: [[key, len(of_key), _total(of_key)] for key, of_key in _by_key(good).items()],
            self.spec.states[1].name: [[position, position] for position in good],
            ledger.QuarantineSpec(self.spec.name).name: [["it is bad", f"{p:03}", str(p), "true"] for p in bad],
        }
        try:
            with self._stager, self._stager.cursor() as cursor:
                partitions = [stage(cursor, begun.attempt, each, rows[each.name]) for each in self.spec.staged]
        except UndefinedTable:
            return "UNPROCESSED"
        if not begun.is_sealed:
            begun.partitions, begun.tracked = partitions, ledger.Tracked(len(good) + len(bad), _total([*good, *bad]), len(bad))
        return "staged"

    def _read(self, attempt: ledger.Attempt) -> tuple[list[int], list[int]]:
        """Return the positions that an attempt's metadata names, and the bad ones among them; those in quarantine as mended."""
        read = attempt.source_metadata
        if ledger.QUARANTINED in read:
            statement = "SELECT payload::int, mended_payload IS NOT NULL FROM tidegate.quarantine WHERE pipeline = %s AND "
            taken = self._execute(f"{statement} replayed_txid = %s ORDER BY txid, number", [self.spec.name, attempt.txid])
        else:
            taken = [(p, not (self.spec.quarantines and is_bad(p))) for p in range(read["start"], read["end"])]
        return [p for p, counts in taken if counts], [p for p, counts in taken if not counts]

    def _seal(self, at: Handle, *, other_rows: bool = False) -> None:
        begun = self.begun[at]
        tracked = replace(begun.tracked, source_hash_sum=-1) if other_rows else begun.tracked
        self.store.seal(begun.attempt, begun.partitions, tracked)
        begun.is_sealed = True

    def _migrate(self) -> str:
        with migrations.connected(self.settings) as connection:
            return "registered" if ledger.registration.register(connection, self.spec) else "unchanged"

    def _replay(self, txid: int | None = None) -> str | None:
        done = self.store.replay_quarantined(self.spec, *BY, txid=txid)
        return done and f"replays {done[1]} by {done[0]}"

    def _accept(self) -> str:
        try:
            return "accepted" if migrations.accept_epoch(self.settings, "an operator") else "nothing to accept"
        finally:
            self._note_history()

    def _note_history(self) -> None:
        """Number the history of commits that the pipeline is in, in the order in which they begin."""
        ((history,),) = self._execute("SELECT history::text FROM tidegate.cursor WHERE pipeline = %s", [self.spec.name])
        self._histories.setdefault(history, len(self._histories))

    def marked(self) -> tuple[int, int] | None:
        """Return the last commit that the witness knows of the copy's history: its txid and attempt."""
        found = self._execute("SELECT history::text FROM copy.cursor WHERE pipeline = %s", [self.spec.name])
        mark = self.store.witness.mark_of(self.spec.name, found[0][0]) if found else None
        return mark and mark.place

    def _lose_staging(self, at: Handle, what: str = "table") -> None:
        table = f"staging.{self.spec.states[0].name}_{at[0]}_{at[1]}"
        if what == "table":
            self._execute(f"DROP TABLE IF EXISTS {table}")
        elif self._execute("SELECT to_regclass(%s)", [table])[0][0]:
            own = [p.task_attempt for p in self.begun[at].partitions]
            self._execute(
                f"DELETE FROM {table} WHERE ctid = (SELECT min(ctid) FROM {table} WHERE task_attempt = ANY(%s))", [own]
            )

    def _fall_silent(self, at: Handle) -> None:
        own = "UPDATE tidegate.attempt SET seen_at = seen_at - interval '90 s' WHERE (pipeline, txid, attempt) = (%s, %s, %s)"
        self._execute(own, [self.spec.name, *at[:2]])

    # What is there

    def observe(self) -> dict[str, list[Any]]:
        """Return the rows of the ledger and of the states, from one snapshot."""
        keyed, log = (f"state.{state.name}" for state in self.spec.states)
        of_keyed = f"txid, key, records, total, {PREVIOUS if self.first.states == 'opaque' else 'NULL, NULL, NULL'}"
        parts = {part: (columns, f"tidegate.{part} t WHERE pipeline = '{self.spec.name}'") for part, columns in LEDGER.items()}
        parts |= {"keyed": (of_keyed, keyed), "log": ("txid, record", log)}
        if self.first.records_changes:
            parts["changes"] = (of_keyed, f"{keyed}_changes")
        rows = [f"'{part}', (SELECT json_agg(json_build_array({columns})) FROM {of})" for part, (columns, of) in parts.items()]
        ((seen,),) = self._execute(f"SELECT json_build_object({', '.join(rows)})")
        return {part: sorted(seen.get(part) or [], key=json.dumps) for part in (*LEDGER, "keyed", "log", "changes")}


METHODS = ("plan", "start", "stage", "seal", "migrate", "replay", "accept", "lose_staging", "fall_silent")
PREVIOUS = "previous_records, previous_total, previous_txid"
READ = "convert_from({}, 'UTF8')::json -> 'metadata'"
OF_PLAN = "(SELECT source_metadata FROM tidegate.batch b WHERE (b.pipeline, b.txid) = (t.pipeline, t.txid))"
OWN_SEALS = "(s.pipeline, s.txid, s.attempt) = (t.pipeline, t.txid, t.attempt)"
LEDGER = {  # which columns of which tables are compared
    "pipeline": "paused_at IS NOT NULL, retired_at IS NOT NULL, (declaration ->> 'version')::int",
    "cursor": "txid, attempt",
    "batch": f"txid, {READ.format('source_metadata')}, attempt, halted_at IS NOT NULL, skip_reason IS NOT NULL, tries_after",
    "attempt": f"""txid, attempt, {READ.format(f"coalesce(source_metadata, {OF_PLAN})")},
        CASE WHEN sealed_at IS NOT NULL THEN 'sealed' WHEN failed_at IS NOT NULL THEN 'failed' ELSE 'open' END,
        coalesce(is_poison, false), (SELECT coalesce(sum(rows), 0) FROM tidegate.seal s WHERE {OWN_SEALS})""",
    "commit": "txid, attempt, skipped_reason IS NOT NULL",
    "quarantine": "txid, number, payload::int, replayed_txid, mended_payload IS NOT NULL",
}


@contextmanager
def running_actors() -> Iterator[Actors]:
    """Run a server with a migrated database, and actors on it whose statements follow their scripts; without Spark."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory("-model", "tidegate-", memory, ignore_cleanup_errors=True) as folder, ExitStack() as held:
        home = Path(folder)
        home.chmod(0o711)
        postgres = AnyPostgres(home, reserve_port(None, held), max_connections="60", synchronous_commit="off")
        held.enter_context(running(postgres))
        settings = replace(postgres.settings, witness_folder=home / "witness")
        migrations.upgrade(settings, [])
        actors = held.enter_context(closing(Actors(settings)))
        held.enter_context(scripted())
        yield actors


def expected(world: World) -> dict[str, list[Any]]:
    """Return what `observe` returns if the store holds this world."""
    batches = list(enumerate(world.batches, 1))

    def read(source: Any) -> dict[str, Any]:
        position = {"start": source.start, "end": source.end}
        return {ledger.QUARANTINED: source.replayed, "source": position} if source.replayed else position

    def sealed(own: Any) -> int:
        return len(_by_key(own.good)) + len(own.good) + len(own.bad) if own.phase == "sealed" else 0

    def row(key: str, r: Any) -> list[Any]:
        before = [None, None] if r.before is None else [len(r.before), _total(r.before)]
        return [r.txid, key, len(r.counted), _total(r.counted), *before, r.txid_before]

    parts: dict[str, list[Any]] = {
        "pipeline": [[world.is_paused, world.is_retired, world.version]],
        "cursor": [[world.cursor, world.commits[-1].attempt if world.commits else None]],
        "batch": [[n, read(b.input), len(b.attempts), b.is_halted, b.is_given_up, b.tries_after] for n, b in batches],
        "attempt": [
            [txid, number, read(own.input), own.phase, own.is_poison, sealed(own)]
            for txid, batch in batches
            for number, own in enumerate(batch.attempts, 1)
        ],
        "commit": [[txid, *done] for txid, done in enumerate(world.commits, 1)],
        "quarantine": [list(record) for record in world.aside],
        "keyed": [row(*each) for each in world.keyed],
        "log": [list(entry) for entry in world.log],
        "changes": [row(key, left) for _, key, left in world.changes],
    }
    return {part: sorted(rows, key=json.dumps) for part, rows in parts.items()}


def _total(positions: Sequence[int]) -> int:
    return sum(1 << position for position in positions)


def _by_key(positions: Sequence[int]) -> dict[str, list[int]]:
    return {key: [p for p in positions if key_of(p) == key] for key in sorted({key_of(p) for p in positions})}
