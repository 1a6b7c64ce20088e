"""Why a pipeline, or one of its batches, waits: the chain of causes, each with what to do about it.

The facts are the ledger's, as of one moment; tries and policy are the declared pipeline's. Airflow is not asked.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from jobs.pipeline import Pipeline
from jobs.registry import find_pipeline, has_pipeline
from state_store.errors import SchemaOutOfDate, TidegateError, UnknownBatch, UnknownPipeline
from tidegate import remedies
from tidegate.remedies import Action

if TYPE_CHECKING:
    from state_store import StateStore
    from state_store.waits import Try, Wait, WaitingBatch

Severity = Literal["ok", "info", "warning", "error"]
LONGEST_QUOTE = 300  # characters of an error in a sentence: the batch's history has all of it
# As in `state_store.attempts`, which loads SQLAlchemy.
FENCED = "ATTEMPT_FENCED"


@dataclass(frozen=True)
class Cause:
    """One cause: what it is in a sentence, since when (ISO 8601), what to do, and the command or button that does it.

    `code` names the kind of cause, `error` the error behind it, which `tidegate error CODE` explains.
    """

    code: str
    sentence: str
    txid: int | None = None
    since: str | None = None
    advice: str | None = None
    command: str | None = None
    action: Action | None = None
    severity: Severity = "info"
    error: str | None = None


@dataclass(frozen=True)
class Why:
    """A chain of causes: the nearest first, the root cause last."""

    causes: tuple[Cause, ...]


def explain(store: "StateStore", pipeline: Pipeline | str, txid: int | None = None) -> Why:
    """Return why a txid has not committed, or what the pipeline waits for as a whole.

    A txid that has committed has one cause, which says so; a pipeline with nothing to do has the cause IDLE first.

    Raises: UnknownPipeline if the pipeline is neither declared nor registered; UnknownBatch; StoreUnavailable.
    """
    declared = _declared(pipeline)
    name = declared.name
    wait = store.waits({name: txid}).get(name)
    if wait is None:
        return Why((_unregistered(declared),))
    if txid is not None and wait.requested is None:
        raise UnknownBatch(f"{name} has no txid {txid}. See: tidegate inspect {name}", pipeline=name, txid=txid)
    return Why(tuple(_Chain(wait, declared).causes()))


def root_causes(store: "StateStore", names: Iterable[str]) -> dict[str, Cause]:
    """Return the root cause of each of these pipelines that is registered, from a constant number of statements."""
    found = store.waits(dict.fromkeys(names))
    return {name: list(_Chain(wait, _declared(name, is_registered=True)).causes())[-1] for name, wait in found.items()}


def of_error(error: TidegateError, pipeline: str | None = None) -> Cause:
    """Return an error that keeps the ledger from being read as a cause: then only that is known."""
    remedy = remedies.of(error.code, error.pipeline or pipeline, error.txid)
    return Cause(
        error.code, _quoted(str(error)), error.txid, None, remedy.advice, remedy.command, severity="error", error=error.code
    )


class _Declared(NamedTuple):
    """A pipeline as the code declares it; `pipeline` is None where it does not, or cannot be imported, for the reason."""

    name: str
    pipeline: Pipeline | None
    reason: str | None = None


def _declared(pipeline: Pipeline | str, *, is_registered: bool = False) -> _Declared:
    if isinstance(pipeline, Pipeline):
        return _Declared(pipeline.name, pipeline)
    try:
        return _Declared(pipeline, find_pipeline(pipeline))
    except UnknownPipeline as unknown:
        return _Declared(pipeline, None, None if is_registered else str(unknown))
    except Exception as error:  # noqa: BLE001 - an author's module may raise anything; that is the cause then
        return _Declared(pipeline, None, f"{type(error).__name__}: {error}")


def _unregistered(declared: _Declared) -> Cause:
    if declared.pipeline is None and not has_pipeline(declared.name):
        raise UnknownPipeline(declared.reason or f"There is no pipeline {declared.name}.", pipeline=declared.name)
    return Cause(
        "NOT_REGISTERED",
        f"{declared.name} is declared, and not registered in this database.",
        advice="Write its migration if its state tables are new (tidegate migrate --new MESSAGE), then register it.",
        command="tidegate migrate",
        severity="error",
        error=SchemaOutOfDate("").code,
    )


class _Chain:
    """The causes of one pipeline, and of the requested txid if there is one."""

    def __init__(self, wait: "Wait", declared: _Declared) -> None:
        self.wait = wait
        self.name = wait.row.pipeline
        self.declared = declared
        self.next_txid = wait.cursor.txid + 1

    def causes(self) -> Iterator[Cause]:
        """Yield the causes, nearest first."""
        requested, first = self.wait.requested, self.wait.first
        if requested is not None and requested.txid < self.next_txid:
            yield self._committed(requested)
            return
        blocked = list(self._blocked())
        if first is None:
            yield self._idle()
            yield from self._notes()
            yield from self._paused()
        else:
            if requested is not None and requested.txid > first.txid:
                yield from self._later(requested, first)
            chain = list(self._first(first))
            yield from chain
            if chain[-1].code not in _GOES_ON:
                yield from self._paused()
        yield from blocked

    # what keeps a whole pipeline

    def _blocked(self) -> Iterator[Cause]:
        """Yield what keeps every batch of the pipeline from being processed or committed."""
        wait, row = self.wait, self.wait.row
        if self.declared.pipeline is not None and self.declared.pipeline.spec.fingerprint != row.fingerprint:
            yield self._error("DECLARATION_CHANGED", f"The declaration of {self.name} is not the one that is registered.")
        elif self.declared.reason is not None:
            yield self._cause(
                "NOT_LOADED",
                f"The code of {self.name} cannot be loaded: {_quoted(self.declared.reason)}.",
                severity="error",
                advice="Correct the pipeline's file; until then no run of it can begin.",
                command="tidegate pipelines",
            )
        if wait.is_standby:
            yield self._error("STORE_UNAVAILABLE", "This Postgres is a standby, and commits need the primary.")
        if wait.lost is not None:
            yield self._error("HOLE_DETECTED", f"This database lacks commits of {self.name}: {_quoted(wait.lost)}.")
        elif wait.is_restored:
            story = f"This database was restored, promoted or copied: commits after txid {wait.cursor.txid} may be lost."
            yield self._error("HOLE_DETECTED", story)
        elif row.last_commit != wait.cursor.txid:
            story = f"The cursor is at txid {wait.cursor.txid}, but the ledger committed {row.last_commit}."
            yield self._error("HOLE_DETECTED", story)

    def _paused(self) -> Iterator[Cause]:
        row = self.wait.row
        if row.paused_at is not None:
            yield self._cause(
                "PAUSED",
                f"{self.name} was paused by {row.paused_by}: {_quoted(row.paused_reason or '')}.",
                since=row.paused_at,
                severity="warning",
                advice="When the reason is gone, let runs start again; a run then takes up what is left over.",
                command=self._command("resume", "--reason ..."),
                action=Action("resume", None),
                error="PIPELINE_PAUSED",
            )

    # nothing to do

    def _idle(self) -> Cause:
        row = self.wait.row
        done = f"All batches up to txid {row.opened} have committed." if row.opened else "No batch was opened yet."
        return self._cause(
            "IDLE", f"Nothing to do. {done}", since=row.committed_at, severity="ok", command=self._command("trigger", "--wait")
        )

    def _notes(self) -> Iterator[Cause]:
        """Yield what waits besides batches."""
        row = self.wait.row
        if row.acks_due:
            yield self._cause(
                "ACK_OUTSTANDING",
                f"The source has not had its ack for {_number(row.acks_due)} committed {_plural('batch', row.acks_due)}.",
                advice="The next run gives it; if that fails again, the log of its plan says why.",
                command=self._command("trigger", "--wait"),
                action=Action("trigger", None),
            )
        if row.quarantined:
            yield self._cause(
                "QUARANTINED",
                f"{_number(row.quarantined)} bad {_plural('record', row.quarantined)} of {self.name} "
                f"{'waits' if row.quarantined == 1 else 'wait'} in quarantine.",
                advice="Look at the reasons; when their cause is fixed, take them up again with tidegate quarantine replay.",
                command=f"tidegate quarantine list {self._name}",
                action=Action("replay", None),
            )

    def _committed(self, batch: "WaitingBatch") -> Cause:
        if batch.committed_at is None:
            return self._error(
                "HOLE_DETECTED", f"The cursor has passed txid {batch.txid}, which has no commit.", txid=batch.txid
            )
        if batch.skipped_reason is not None:
            sentence = f"Txid {batch.txid} was skipped, without its rows: {_quoted(batch.skipped_reason)}."
            error = remedies.code_in(batch.skipped_reason)
            return self._cause("SKIPPED", sentence, txid=batch.txid, since=batch.committed_at, severity="ok", error=error)
        return self._cause(
            "COMMITTED", f"Txid {batch.txid} has committed.", txid=batch.txid, since=batch.committed_at, severity="ok"
        )

    # a batch

    def _later(self, batch: "WaitingBatch", first: "WaitingBatch") -> Iterator[Cause]:
        """Yield why a batch after the first uncommitted one has not committed."""
        newest = batch.tries[0] if batch.tries else None
        if batch.skip_reason is None and batch.halted_at is None:
            if newest is None and batch.txid - self.wait.cursor.txid > self.wait.row.in_flight:
                yield self._window_full(batch)
                return
            if newest is not None and newest.sealed_at is not None:
                yield self._waits_for(batch, first, since=newest.sealed_at)
                return
        yield from self._own(batch, is_first=False)
        yield self._waits_for(batch, first)

    def _first(self, batch: "WaitingBatch") -> Iterator[Cause]:
        newest = batch.tries[0] if batch.tries else None
        if batch.skip_reason is None and batch.halted_at is None and newest is not None and newest.sealed_at is not None:
            yield self._ready(batch, newest)
            return
        yield from self._own(batch, is_first=True)

    def _own(self, batch: "WaitingBatch", *, is_first: bool) -> Iterator[Cause]:
        """Yield what a batch that is not sealed waits for itself."""
        if batch.skip_reason is not None:
            yield self._given_up(batch, is_first=is_first)
        elif batch.halted_at is not None:
            yield self._halted(batch)
        elif not batch.tries:
            yield self._planned(batch)
        elif batch.tries[0].failed_at is not None:
            yield self._failed(batch, batch.tries[0])
        else:
            yield self._in_work(batch, batch.tries[0])
            if before := next((one for one in batch.tries[1:] if _counts(one, batch)), None):
                yield self._failed_before(batch, before)

    def _waits_for(self, batch: "WaitingBatch", first: "WaitingBatch", since: datetime | None = None) -> Cause:
        sentence = f"Txid {batch.txid} waits for txid {first.txid} to commit: batches commit in the order of their txids."
        return self._cause("WAITS_FOR_TXID", sentence, txid=batch.txid, since=since)

    def _window_full(self, batch: "WaitingBatch") -> Cause:
        window = self.wait.row.in_flight
        sentence = (
            f"Txid {batch.txid} may begin when txid {batch.txid - window} has committed, because the window is full: at most "
            f"{window} {_plural('batch', window)} may be begun and not committed, and txid {self.next_txid} commits next."
        )
        return self._cause("WINDOW_FULL", sentence, txid=batch.txid, since=batch.opened_at)

    def _planned(self, batch: "WaitingBatch") -> Cause:
        busy = self.wait.row.in_work
        if busy is not None:
            sentence = f"Txid {batch.txid} is planned, and waits for a run that processes it; one is at work on txid {busy}."
            return self._cause("PLANNED", sentence, txid=batch.txid, since=batch.opened_at)
        return self._cause(
            "PLANNED",
            f"Txid {batch.txid} is planned, and waits for a run that processes it; no run is at work.",
            txid=batch.txid,
            since=batch.opened_at,
            severity="warning",
            advice="Start a run, unless one has just been started.",
            command=self._command("trigger", "--wait"),
            action=Action("trigger", None),
        )

    def _given_up(self, batch: "WaitingBatch", *, is_first: bool) -> Cause:
        turn = "its turn has come, so the next run skips it" if is_first else "it waits for its turn to be skipped"
        return self._cause(
            "GIVEN_UP",
            f"Txid {batch.txid} was given up by {batch.skip_owner}, and {turn}: {_quoted(batch.skip_reason or '')}.",
            txid=batch.txid,
            severity="warning",
            advice="If it can be fixed, fix and retry it before it is skipped; otherwise start a run.",
            command=self._command("retry", str(batch.txid)),
            action=Action("retry", batch.txid),
            error=remedies.code_in(batch.skip_reason or ""),
        )

    def _halted(self, batch: "WaitingBatch") -> Cause:
        reason = batch.halted_reason or ""
        code = remedies.code_of(reason)
        remedy = remedies.of(code, self.name, batch.txid)
        return self._cause(
            "HALTED",
            f"Txid {batch.txid} waits for a person: {_quoted(reason)}.",
            txid=batch.txid,
            since=batch.halted_at,
            severity="error",
            advice=remedy.advice,
            command=remedy.command,
            action=Action("retry", batch.txid),
            error=code,
        )

    def _failed(self, batch: "WaitingBatch", newest: "Try") -> Cause:
        code = remedies.code_of(newest.error or "")
        remedy = remedies.of(code, self.name, batch.txid)
        advice = f"Nothing while its run lasts: it tries again. {remedy.advice} If the run has ended, start another."
        return self._cause(
            "FAILED",
            f"Txid {batch.txid} failed in attempt {newest.attempt}{self._tries(batch, newest)}: {_quoted(newest.error or '')}.",
            txid=batch.txid,
            since=_since(batch, newest),
            severity="warning",
            advice=advice,
            command=self._command("trigger", "--wait"),
            action=Action("trigger", None),
            error=code,
        )

    def _failed_before(self, batch: "WaitingBatch", before: "Try") -> Cause:
        code = remedies.code_of(before.error or "")
        return self._cause(
            "FAILED_BEFORE",
            f"Attempt {before.attempt} at txid {batch.txid} failed: {_quoted(before.error or '')}.",
            txid=batch.txid,
            since=_since(batch, before),
            severity="warning",
            advice=f"Nothing while it is tried again. {remedies.of(code, self.name, batch.txid).advice}",
            error=code,
        )

    def _in_work(self, batch: "WaitingBatch", newest: "Try") -> Cause:
        from state_store.attempts import LONGEST_SILENCE_SECONDS  # noqa: PLC0415 - loads SQLAlchemy

        where = newest.owner
        if newest.airflow_run_id is not None:
            where = f"Airflow run {newest.airflow_run_id}, task {newest.airflow_task_id}, try {newest.airflow_try}"
        story = f"attempt {newest.attempt}{self._tries(batch, newest)} by {where}"
        silence = (self.wait.row.now - (newest.seen_at or newest.started_at)).total_seconds()
        if newest.seen_at is not None and silence > LONGEST_SILENCE_SECONDS:
            return self._cause(
                "SILENT",
                f"Txid {batch.txid} is in work, in {story}, which has not been heard of for {silence:.0f} s: its process died "
                "or is suspended.",
                txid=batch.txid,
                since=newest.seen_at,
                severity="warning",
                advice="Nothing while its run lasts: another attempt takes over. If the run has ended, start another.",
                command=self._command("trigger", "--wait"),
                action=Action("trigger", None),
            )
        return self._cause("IN_WORK", f"Txid {batch.txid} is in work: {story}.", txid=batch.txid, since=newest.started_at)

    def _ready(self, batch: "WaitingBatch", newest: "Try") -> Cause:
        """Return why the sealed batch after the cursor has not committed."""
        if newest.fingerprint != self.wait.row.fingerprint:
            return self._cause(
                "STALE",
                f"Txid {batch.txid} was processed under another declaration of {self.name}, so it is processed again.",
                txid=batch.txid,
                since=newest.sealed_at,
                severity="warning",
                advice="Start a run.",
                command=self._command("trigger", "--wait"),
                action=Action("trigger", None),
            )
        if not self.wait.may_commit:
            sentence = f"Txid {batch.txid} is processed, and waits a little for others, so that they are merged together."
            return self._cause("WAITS_TO_MERGE", sentence, txid=batch.txid, since=newest.sealed_at)
        return self._cause(
            "WAITS_FOR_COMMIT",
            f"Txid {batch.txid} is processed, and its turn to commit has come.",
            txid=batch.txid,
            since=newest.sealed_at,
            advice="Nothing while a run lasts: it commits within seconds. If no run is left, start one.",
            command=self._command("trigger", "--wait"),
            action=Action("trigger", None),
        )

    def _tries(self, batch: "WaitingBatch", newest: "Try") -> str:
        """Return which try of how many an attempt is, in its run or, where content is skipped, since the last retry."""
        declared = self.declared.pipeline
        run = newest.airflow_run_id or newest.owner
        failed = [one for one in batch.tries if _counts(one, batch) and run == (one.airflow_run_id or one.owner)]
        number = len(failed) + (newest.failed_at is None)
        if declared is not None and declared.on_poison == "skip" and batch.poison_tries:
            number = batch.poison_tries + (newest.failed_at is None)
        if declared is None:
            return f" (try {number})" if number > 1 else ""
        return f" (try {number} of {declared.tries})" if number <= declared.tries else f" (try {number})"

    # parts

    @property
    def _name(self) -> str:
        return remedies.quoted(self.name)

    def _command(self, verb: str, *rest: str) -> str:
        return " ".join(["tidegate", verb, self._name, *rest])

    def _error(self, code: str, sentence: str, txid: int | None = None) -> Cause:
        remedy = remedies.of(code, self.name, txid)
        return self._cause(
            code, sentence, txid=txid, severity="error", advice=remedy.advice, command=remedy.command, error=code
        )

    def _cause(
        self,
        code: str,
        sentence: str,
        *,
        txid: int | None = None,
        since: datetime | None = None,
        severity: Severity = "info",
        advice: str | None = None,
        command: str | None = None,
        action: Action | None = None,
        error: str | None = None,
    ) -> Cause:
        moment = since.astimezone(UTC).isoformat() if since else None
        return Cause(code, sentence, txid, moment, advice, command, action, severity, error)


# Causes of the first batch that a pause does not keep from passing.
_GOES_ON = ("IN_WORK", "FAILED_BEFORE", "WAITS_TO_MERGE", "WAITS_FOR_COMMIT")


def _counts(one: "Try", batch: "WaitingBatch") -> bool:
    """Return whether an attempt failed by itself, after the batch was last forgiven."""
    return one.failed_at is not None and one.attempt > batch.tries_after and not (one.error or "").startswith(FENCED)


def _since(batch: "WaitingBatch", newest: "Try") -> datetime | None:
    """Return when the newest failures in a row with one code began."""
    code, since = remedies.code_of(newest.error or ""), newest.failed_at
    for one in batch.tries:
        if one.attempt > newest.attempt or one.failed_at is None or (one.error or "").startswith(FENCED):
            continue
        if remedies.code_of(one.error or "") != code:
            break
        since = one.failed_at
    return since


def _quoted(text: str) -> str:
    """Return a text in one line, cut to LONGEST_QUOTE, without the full stop at its end."""
    line = " ".join(text.split())
    return (line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 3]}...").rstrip(".")


def _number(count: int) -> str:
    from state_store.waits import MOST_COUNTED  # noqa: PLC0415 - loads SQLAlchemy

    return f"{count} or more" if count >= MOST_COUNTED else str(count)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else {"batch": "batches"}.get(noun, f"{noun}s")
