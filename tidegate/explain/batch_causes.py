"""A cause of a wait, and the causes that lie in one batch: planned, at work, failed, given up, ready to commit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from tidegate.explain import remedies
from tidegate.explain.remedies import Verb
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import named_rebuild
from tidegate.state_store.base.errors import skip_command
from tidegate.state_store.declarations.pipeline_spec import followed_by

if TYPE_CHECKING:
    from tidegate.state_store import Settings
    from tidegate.state_store.read_ledger.wait_facts import Try, Wait, WaitingBatch

Severity = Literal["ok", "info", "warning", "error"]
LONGEST_QUOTE = 1900  # characters of an error in a sentence: the batch's history has all of it
FENCED = "ATTEMPT_FENCED"
# Causes beside one another, rather than one because of the next.
_BESIDES = ("ACK_OUTSTANDING", "AIRFLOW_UNKNOWN", "RUN_ACTIVE", "NEW_COLUMNS", "QUARANTINED", "SOURCE_LATE", "PLAN_FAILED")


@dataclass(frozen=True)
class Button:
    """A button that helps: an operator's verb, and the txid that it concerns."""

    verb: Verb
    txid: int | None = None


@dataclass(frozen=True)
class Cause:
    """One cause: what it is in a sentence, since when (ISO 8601), what to do, and the command or button that does it.

    `code` names the kind of cause, `error` the error behind it, which `tidegate error CODE` explains. One that `is_beside` the
    causes before it is not their cause.
    """

    code: str
    sentence: str
    txid: int | None = None
    since: str | None = None
    advice: str | None = None
    command: str | None = None
    action: Button | None = None
    severity: Severity = "info"
    error: str | None = None
    is_beside: bool = False


def cause(code: str, sentence: str, *, since: datetime | None = None, **known: Any) -> Cause:
    """Return a cause whose time is written as text."""
    at = since.astimezone(UTC).isoformat() if since else None
    return Cause(code, sentence, since=at, is_beside=code in _BESIDES, **known)


def starts_a_run(pipeline: str, settings: "Settings | None") -> dict[str, Any]:
    """Return the command and the button that start a run (`remedies.run_of`); a rebuild has no Dag, and so no button."""
    button = {} if named_rebuild(pipeline) is not None else {"action": Button("trigger")}
    return {"command": remedies.run_of(pipeline, settings), **button}


def quoted(text: str | None) -> str:
    """Return a text in one line without the full stop at its end; a long one is cut between two words, to end in two points."""
    line = " ".join((text or "").split())
    if len(line) <= LONGEST_QUOTE:
        return line.rstrip(".")
    cut = line[: LONGEST_QUOTE - 3]
    space = cut.rfind(" ", LONGEST_QUOTE // 2)  # a longer word, such as a path, is cut itself
    return f"{cut[:space] if space > 0 else cut}.."


class BatchCauses:
    """The causes of one pipeline that lie in its batches; `declared` is None where its code is not known.

    `run` is what starts a run of it.
    """

    def __init__(self, wait: "Wait", declared: Pipeline | None, run: Mapping[str, Any]) -> None:
        self._wait = wait
        self._run = run
        self._declared = declared
        self._pipeline = wait.row.pipeline

    def of_first(self, batch: "WaitingBatch") -> Iterator[Cause]:
        """Yield what the first uncommitted batch waits for."""
        sealed = _sealed(batch)
        if sealed is None:
            yield from self._own(batch, turn="its turn has come, so the next run skips it")
        elif sealed.fingerprint != self._wait.row.fingerprint:
            story = f"Txid {batch.txid} was processed under another declaration, so it is processed again."
            yield self._of(batch, "STALE", story, since=sealed.sealed_at, severity="warning", advice="Start a run.", run=True)
        elif not self._wait.may_commit:
            story = f"Txid {batch.txid} is processed, and waits a little for others that could be merged with it."
            yield self._of(batch, "WAITS_TO_MERGE", story, since=sealed.sealed_at)
        else:
            advice = "Nothing while a run lasts: it commits within seconds. If no run is left, start one."
            story = f"Txid {batch.txid} is processed, and its turn to commit has come."
            if (pid := self._wait.holder) is not None:
                story = f"{story[:-1]}. Session {pid} of Postgres holds its cursor, as each commit does for seconds."
                advice += f" If session {pid} stays for minutes, look at its process: it may be stopped, or wait for a disk."
            yield self._of(batch, "WAITS_FOR_COMMIT", story, since=sealed.sealed_at, advice=advice, run=True)

    def of_later(self, batch: "WaitingBatch") -> Iterator[Cause]:
        """Yield what a later batch waits for, last the first uncommitted one."""
        row, following = self._wait.row, self._wait.cursor.txid + 1
        order = f"Txid {batch.txid} waits for txid {following} to commit: batches commit in the order of their txids."
        sealed = _sealed(batch)
        is_planned = batch.phase == "planned" and batch.skip_reason is None
        if is_planned and (read := self._reads_of_previous()):
            story = (
                f"Txid {batch.txid} may begin when txid {batch.txid - 1} has committed: it reads {read} as that has left it. "
                f"Txid {following} commits next."
            )
            yield self._of(batch, "WAITS_FOR_STATE", story, since=batch.opened_at)
            return
        if is_planned and not self._wait.has_room(batch.txid):
            story = (
                f"Txid {batch.txid} may begin when txid {batch.txid - row.in_flight} has committed: the window is full, as no "
                f"more than {row.in_flight} may be begun and not committed, and txid {following} commits next."
            )
            yield self._of(batch, "WINDOW_FULL", story, since=batch.opened_at)
            return
        if sealed is None:
            yield from self._own(batch, turn="it waits for its turn to be skipped")
        yield self._of(batch, "WAITS_FOR_TXID", order, since=sealed.sealed_at if sealed else None)

    def _reads_of_previous(self) -> str:
        reads = self._wait.row.queries
        return " and ".join(read["of"] for read in reads if read["as_of"] == "previous txid")

    def _own(self, batch: "WaitingBatch", *, turn: str) -> Iterator[Cause]:
        if batch.skip_reason is not None:
            yield self._given_up(batch, turn)
        elif batch.phase == "halted":
            yield self._halted(batch)
        elif batch.phase == "planned":
            yield self._planned(batch)
        elif batch.phase == "failed":
            yield self._failed(batch, batch.tries[0])
        else:
            yield self._in_work(batch, batch.tries[0])
            if before := next((one for one in batch.tries[1:] if _counts(one, batch)), None):
                yield self._failed_before(batch, before)

    def _given_up(self, batch: "WaitingBatch", turn: str) -> Cause:
        story = f"Txid {batch.txid} was given up by {batch.skip_owner}, and {turn}: {quoted(batch.skip_reason)}."
        advice = "If it can be fixed, fix and retry it before it is skipped; otherwise nothing, as long as runs start."
        since = batch.tries[0].failed_at if batch.tries else None
        error = remedies.code_in(batch.skip_reason)
        return self._of(batch, "GIVEN_UP", story, since=since, severity="warning", advice=advice, retry=True, error=error)

    def _halted(self, batch: "WaitingBatch") -> Cause:
        code = remedies.code_of(batch.halted_reason)
        story = f"Txid {batch.txid} waits for a person: {quoted(batch.halted_reason)}."
        known: dict[str, Any] = {"since": batch.halted_at, "severity": "error", "error": code}
        if code in remedies.ENDS_IN_SKIP:
            known["command"] = skip_command(self._pipeline, batch.txid)
            return self._of(batch, "HALTED", story, advice=self._fix(batch, code), action=Button("skip", batch.txid), **known)
        is_rebuild = named_rebuild(self._pipeline) is not None
        advice = self._fix(batch, code, then=", then let the rebuild go on" if is_rebuild else ", then retry it")
        return self._of(batch, "HALTED", story, advice=advice, run=is_rebuild, retry=not is_rebuild, **known)

    def _fix(self, batch: "WaitingBatch", code: str | None, *, then: str = "") -> str:
        """Return what to do about an error of a batch.

        What a follower has counted, and its source has lost, each later batch lacks too: to skip this one does not help.
        """
        follows = self._declared is not None and bool(followed_by(self._declared.source.identity))
        may_skip = not (follows and code == "SOURCE_CHANGED")
        return remedies.fix_of_batch(code, self._pipeline, batch.txid, then=then, may_skip=may_skip)

    def _planned(self, batch: "WaitingBatch") -> Cause:
        busy = self._wait.row.in_work
        story = f"Txid {batch.txid} is planned, and waits for a run that processes it;"
        if busy is not None:
            return self._of(batch, "PLANNED", f"{story} one is at work on txid {busy}.", since=batch.opened_at)
        advice = "Start a run, unless one has just been started."
        known: dict[str, Any] = {"since": batch.opened_at, "severity": "warning", "advice": advice}
        return self._of(batch, "PLANNED", f"{story} no run is at work.", run=True, **known)

    def _failed(self, batch: "WaitingBatch", newest: "Try") -> Cause:
        code = remedies.code_of(newest.error)
        story = f"Txid {batch.txid} failed in attempt {newest.attempt}{self._number(batch, newest)}: {quoted(newest.error)}."
        has_one_try = self._declared is not None and self._declared.tries == 1
        then = "Then start a run." if has_one_try else "Its run tries again by itself; if that has ended, start another."
        advice = f"{self._fix(batch, code)} {then}"
        known: dict[str, Any] = {"since": _since(batch, newest), "severity": "warning", "error": code}
        return self._of(batch, "FAILED", story, advice=advice, run=True, **known)

    def _failed_before(self, batch: "WaitingBatch", before: "Try") -> Cause:
        code = remedies.code_of(before.error)
        story = f"Attempt {before.attempt} at txid {batch.txid} failed: {quoted(before.error)}."
        advice = f"{remedies.fix_of_batch(code, self._pipeline, batch.txid, may_skip=False)} It is tried again at this moment."
        known: dict[str, Any] = {"since": _since(batch, before), "severity": "warning", "error": code}
        return self._of(batch, "FAILED_BEFORE", story, advice=advice, **known)

    def _in_work(self, batch: "WaitingBatch", newest: "Try") -> Cause:
        from tidegate.state_store.attempt.heartbeats import LONGEST_SILENCE_SECONDS  # noqa: PLC0415 - loads SQLAlchemy

        by = newest.owner
        if newest.airflow_run_id is not None:
            by = f"Airflow's run {newest.airflow_run_id}, task {newest.airflow_task_id}, its try {newest.airflow_try}"
        story = f"Txid {batch.txid} is in work: attempt {newest.attempt}{self._number(batch, newest)}, by {by}"
        if not newest.is_silent:
            return self._of(batch, "IN_WORK", f"{story}.", since=newest.started_at)
        story += f". It has not been heard of for more than {LONGEST_SILENCE_SECONDS} s: its process died or is suspended."
        advice = "Nothing while its run lasts: another attempt takes over. If the run has ended, start another."
        return self._of(batch, "SILENT", story, since=newest.seen_at, severity="warning", advice=advice, run=True)

    def _number(self, batch: "WaitingBatch", newest: "Try") -> str:
        """Return which try of how many an attempt is: in its run; or, where content is skipped, since the last retry."""
        declared, run = self._declared, newest.airflow_run_id or newest.owner
        failed = [one for one in batch.tries if _counts(one, batch) and run == (one.airflow_run_id or one.owner)]
        number = len(failed)
        if declared is not None and declared.on_poison == "skip" and batch.poison_tries:
            number = batch.poison_tries
        number += newest.failed_at is None
        if declared is not None and 1 <= number <= declared.tries:
            return f", in try {number} of {declared.tries}"
        return f", in try {number}" if number > 1 else ""

    def _of(
        self, batch: "WaitingBatch", code: str, sentence: str, *, run: bool = False, retry: bool = False, **known: Any
    ) -> Cause:
        if run:
            known |= self._run
        if retry:
            known |= {"command": remedies.command("retry", self._pipeline, batch.txid), "action": Button("retry", batch.txid)}
        return cause(code, sentence, txid=batch.txid, **known)


def _sealed(batch: "WaitingBatch") -> "Try | None":
    """Return the attempt whose result waits to commit; None if the batch waits for something else."""
    return batch.tries[0] if batch.phase == "processed" and batch.skip_reason is None else None


def _counts(one: "Try", batch: "WaitingBatch") -> bool:
    """Return whether an attempt failed by itself, after an operator last let the batch be tried again."""
    return one.failed_at is not None and one.attempt > batch.tries_after and not (one.error or "").startswith(FENCED)


def _since(batch: "WaitingBatch", newest: "Try") -> datetime | None:
    """Return when the newest failures in a row with the same code began."""
    code, since = remedies.code_of(newest.error), newest.failed_at
    for one in batch.tries:
        if one.attempt > newest.attempt or one.failed_at is None or (one.error or "").startswith(FENCED):
            continue
        if remedies.code_of(one.error) != code:
            break
        since = one.failed_at
    return since
