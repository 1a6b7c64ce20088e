"""Why a pipeline, or one of its batches, waits (paused, failing plans, another pipeline): causes, each with what to do.

The facts are the ledger's, as of one moment; tries and policy are the declared pipeline's. Airflow is not asked.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tidegate.explain import remedies, source_report
from tidegate.explain.batch_causes import BatchCauses, Button, Cause, cause, quoted, starts_a_run
from tidegate.jobs import registry
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline, has_pipeline, pipeline_names, unknown
from tidegate.output import counted
from tidegate.state_store.base.errors import Fault, TidegateError, UnknownBatch, UnknownPipeline, class_and_text, code_and_fault

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.read_ledger.wait_facts import Moment, Wait, WaitingBatch

__all__ = ["Button", "Cause", "Why", "explain", "of_error", "root_causes", "root_of"]

# Of the first uncommitted batch, those that pass without a new run.
_GOES_ON = ("IN_WORK", "FAILED_BEFORE", "WAITS_TO_MERGE")


@dataclass(frozen=True)
class Why:
    """A chain of causes: the nearest first, the root cause last."""

    causes: tuple[Cause, ...]


def explain(
    ledger: "StateStore | Moment", pipeline: Pipeline | str, txid: int | None = None, *, ask_source: "StateStore | None" = None
) -> Why:
    """Return why a txid has not committed, or what the pipeline waits for as a whole.

    A txid that has committed has one cause, which says so; a pipeline with nothing to do has the cause IDLE first, one whose
    plans fail PLAN_FAILED. With the store `ask_source`, the source is asked, for some seconds at most, what a plan would refuse
    now and, without open batches, what it holds back; without it, runs are started on Airflow's page.

    Raises: UnknownPipeline if the pipeline is neither declared nor registered; UnknownBatch; StoreUnavailable.
    """
    declared = _declared(pipeline)
    name = declared.name
    wait = ledger.waits({name: txid}).get(name)
    if wait is None:
        return Why((_unregistered(declared),))
    if txid is not None and wait.requested is None:
        raise UnknownBatch(f"{name} has no txid {txid}. See: tidegate inspect {name}")
    of_source = None
    if ask_source is not None and txid is None and declared.pipeline is not None:
        of_source = _of_source(declared.pipeline, ask_source)
    run = starts_a_run(name, None if ask_source is None else ask_source.settings)
    return Why(tuple(_causes(wait, declared, run, of_source)))


def root_causes(ledger: "StateStore | Moment", pipelines: Iterable[Pipeline | str]) -> dict[str, Cause]:
    """Return the root cause of each of these pipelines that is registered, from a constant number of statements."""
    names = pipeline_names()  # one search for all of them
    declared = {known.name: known for known in (_declared(pipeline, names) for pipeline in pipelines)}
    found = ledger.waits(dict.fromkeys(declared))
    return {name: root_of(list(_causes(wait, declared[name], starts_a_run(name, None)))) for name, wait in found.items()}


def root_of(causes: Sequence[Cause]) -> Cause:
    """Return the last cause that needs attention; if none does, the last one."""
    return next((cause for cause in reversed(causes) if cause.severity in ("warning", "error")), causes[-1])


def of_error(error: TidegateError) -> Cause:
    """Return an error that keeps the ledger from being read as a cause: then only that is known."""
    return _error(error.code, f"{quoted(str(error))}.")


class _Declared(NamedTuple):
    """A pipeline as the code declares it; None if the code does not, or, with the reason, cannot be loaded."""

    name: str
    pipeline: Pipeline | None
    unknown: UnknownPipeline | None = None
    reason: str | None = None


def _declared(pipeline: Pipeline | str, names: Collection[str] | None = None) -> _Declared:
    if isinstance(pipeline, Pipeline):
        return _Declared(pipeline.name, pipeline)
    if names is not None and pipeline not in names:
        return _Declared(pipeline, None, unknown=unknown(pipeline, names))
    try:
        return _Declared(pipeline, find_pipeline(pipeline))
    except UnknownPipeline as error:
        return _Declared(pipeline, None, unknown=error)
    except Exception as error:  # noqa: BLE001 - an author's module may raise anything; that is the cause then
        return _Declared(pipeline, None, reason=class_and_text(error))


def _unregistered(declared: _Declared) -> Cause:
    if declared.unknown is not None:
        raise declared.unknown
    return cause(
        "NOT_REGISTERED",
        f"{declared.name} is declared, and not registered in this database.",
        advice="Write the migration of its state tables if they are new (tidegate migrate --new MESSAGE), then register it.",
        command="tidegate migrate",
        severity="error",
        error="SCHEMA_OUT_OF_DATE",
    )


def _causes(wait: "Wait", declared: _Declared, run: Mapping[str, Any], of_source: Cause | None = None) -> Iterator[Cause]:
    """Yield the causes, nearest first; `run` is what starts a run."""
    requested, first = wait.requested, wait.first
    if requested is not None and requested.txid <= wait.cursor.txid:
        yield _committed(wait, requested)
        return
    if wait.row.retired_at is not None:
        yield _retired(wait)
        return
    if wait.loss is not None:  # nothing of the pipeline goes on, whatever its batches look like
        yield _lost(wait, wait.loss)
        return
    batches = BatchCauses(wait, declared.pipeline, run)
    if requested is not None and first is not None and requested.txid > first.txid:
        yield from batches.of_later(requested)
    if first is None:
        yield from _without_batches(wait, run, of_source)
        yield from _paused(wait)
    else:
        chain = list(batches.of_first(first))
        yield from chain
        yield from _failing_plans(wait, run)
        if of_source is not None and of_source.severity == "error" and not wait.row.failed_plans:
            yield of_source
        if chain[-1].code not in _GOES_ON:  # what is processed commits during a pause, too, but no run begins for it
            yield from _undeclared(declared)
            yield from _paused(wait)
    yield from _blocked(wait, declared)


def _without_batches(wait: "Wait", run: Mapping[str, Any], of_source: Cause | None) -> Iterator[Cause]:
    """Yield why no batch is open: if plans fail, there may be much to do, which none has begun."""
    is_refused = of_source is not None and of_source.severity == "error"
    failing = list(_failing_plans(wait, run))
    if of_source is not None and is_refused and of_source.error not in {known.error for known in failing}:
        failing.append(of_source)
    if of_source is not None and of_source.code == "UNREAD" and not failing:
        up_to = f" All batches up to txid {wait.row.opened} have committed." if wait.row.opened else ""
        failing, of_source = [replace(of_source, sentence=f"{of_source.sentence}{up_to}")], None
    yield from failing or _idle(wait, run)
    yield from _needs_attention(wait, run)
    if of_source is not None and not is_refused:
        yield of_source


def _idle(wait: "Wait", run: Mapping[str, Any]) -> Iterator[Cause]:
    row = wait.row
    done = f"Nothing to do. All batches up to txid {row.opened} have committed."
    idle = done if row.opened else "Nothing waits: no run has opened a batch yet."
    yield cause("IDLE", idle, since=row.committed_at, severity="ok", command=run["command"])


def _failing_plans(wait: "Wait", run: Mapping[str, Any]) -> Iterator[Cause]:
    row = wait.row
    if not row.failed_plans:
        return
    code, is_away = remedies.code_of(row.short_plan_error), code_and_fault(row.short_plan_error or "")[1] is Fault.SERVER
    times = f" {row.failed_plans} times" if row.failed_plans > 1 else ""
    goes_on = "A run tries again by itself; if that has ended, start another." if is_away else "Then start a run."
    yield cause(
        "PLAN_FAILED",
        f"Planning has failed{times} ({quoted(row.failed_run)}): {quoted(row.short_plan_error)}.",
        since=row.plans_failing_since,
        severity="warning" if is_away else "error",
        advice=f"{remedies.fix_of_plan(code)} {goes_on}",
        error=code,
        **run,
    )


def _needs_attention(wait: "Wait", run: Mapping[str, Any]) -> Iterator[Cause]:
    row, name = wait.row, wait.row.pipeline
    if row.acks_due:
        yield cause(
            "ACK_OUTSTANDING",
            f"The source has not had its ack for {counted(row.acks_due, 'committed batch', 'committed batches')}.",
            advice="The next run gives it; if that fails again, the log of its plan says why.",
            **run,
        )
    if row.new_columns:
        from tidegate.state_store.ledger import undeclared_columns  # noqa: PLC0415 - loads SQLAlchemy

        yield cause(
            "NEW_COLUMNS",
            undeclared_columns.sentence(row.new_columns),
            advice="Add them to the schema and raise the pipeline's version, or name them in the source's ignored_columns.",
            command="tidegate migrate",
        )
    if row.quarantined:
        replay = remedies.command("quarantine", "replay", name, "--reason", "...")
        yield cause(
            "QUARANTINED",
            f"{counted(row.quarantined, 'bad record waits', 'bad records wait')} in quarantine.",
            advice=f"Look at the reasons; when their cause is fixed, take them up again ({replay}).",
            command=remedies.command("quarantine", "list", name),
            action=Button("replay"),
        )


def _of_source(pipeline: Pipeline, store: "StateStore") -> Cause | None:
    """Return what the source holds back, or why it or a plan is refused; None if a run would take all that is there."""
    try:
        if (late := source_report.held_back(pipeline, store.settings)) is None and source_report.has_more(pipeline, store):
            return cause(
                "UNREAD",
                "The source has data that no batch has taken.",
                severity="warning",
                advice="Start a run, unless one has just been started.",
                **starts_a_run(pipeline.name, store.settings),
            )
    except TidegateError as error:
        return replace(of_error(error), advice=remedies.fix_of_plan(error.code), command=remedies.command("error", error.code))
    except Exception as error:  # noqa: BLE001 - an author's source may raise anything; that is the cause then
        story = f"The source cannot be asked: {type(error).__name__}: {quoted(str(error))}."
        return cause(
            "NOT_LOADED", story, severity="error", advice="Correct the pipeline's source.", command="tidegate pipelines"
        )
    return cause("SOURCE_LATE", late, advice="Nothing: a later run takes it, once the source has settled.") if late else None


def refused_next(name: str, store: "StateStore") -> Iterator[str]:
    """Yield a line if the next plan of a pipeline would find its source changed, though its batches may go on now."""
    found = _of_source(find_pipeline(name), store) if has_pipeline(name) else None
    if found is not None and found.error == "SOURCE_CHANGED":
        yield f"{name}: batches that are open go on, and the next plan is refused. {found.sentence} {found.advice}"


def _paused(wait: "Wait") -> Iterator[Cause]:
    row = wait.row
    if row.paused_at is not None:
        yield cause(
            "PAUSED",
            f"{row.pipeline} was paused by {row.paused_by}: {quoted(row.paused_reason)}. No run and no batch begins.",
            since=row.paused_at,
            severity="warning",
            advice="When the reason is gone, let runs start again; the next one takes up what is left over.",
            command=remedies.command("resume", row.pipeline, "--reason", "..."),
            action=Button("resume"),
            error="PIPELINE_PAUSED",
        )


def _retired(wait: "Wait") -> Cause:
    row = wait.row
    rebuild = registry.named_rebuild(row.pipeline)
    may_go_on = not row.has_dropped and rebuild is None
    advice = "Nothing. To let it go on where it stood, reinstate it." if may_go_on else "Nothing: it cannot go on."
    if rebuild is not None:
        advice = f"Nothing. For another rebuild, raise the version of {rebuild.pipeline} above {rebuild.version}."
    return cause(
        "RETIRED",
        f"{row.pipeline} was retired by {row.retired_by}: {quoted(row.retired_reason)}. No batch of it counts any more.",
        since=row.retired_at,
        severity="ok",
        advice=advice,
        command=remedies.command("reinstate", row.pipeline) if may_go_on else None,
        error="PIPELINE_RETIRED",
    )


def _undeclared(declared: _Declared) -> Iterator[Cause]:
    if declared.unknown is not None:
        yield cause(
            "NOT_DECLARED",
            f"No code here declares {declared.name}, so no run can take it up.",
            severity="error",
            advice=f"Bring its file back to {registry.folder()}, or install its package.",
            command="tidegate pipelines",
            error=declared.unknown.code,
        )


def _blocked(wait: "Wait", declared: _Declared) -> Iterator[Cause]:
    name = wait.row.pipeline
    if declared.reason is not None:
        yield cause(
            "NOT_LOADED",
            f"The code of {name} cannot be loaded: {quoted(declared.reason)}.",
            severity="error",
            advice="Correct the pipeline's file; until then no run of it can begin.",
            command="tidegate pipelines",
        )
    elif declared.pipeline is not None and declared.pipeline.spec.fingerprint != wait.row.fingerprint:
        yield _error("DECLARATION_CHANGED", f"The declaration of {name} is not the registered one.")
    if wait.refusal is not None:
        yield of_error(wait.refusal)
    if wait.is_standby:
        yield _error("STORE_UNAVAILABLE", "This Postgres is a standby, and commits need the primary.")


def _lost(wait: "Wait", loss: str) -> Cause:
    """Return what is lost or damaged: only the loss of commits may be accepted."""
    advice, command = remedies.fix_of("HOLE_DETECTED"), remedies.command_of("HOLE_DETECTED")
    if wait.may_go_on_without:
        advice = f"Check which commits are lost, and what depends on them ({command}); then go on without them."
        command = remedies.command("migrate", "--accept-epoch")
    elif wait.damaged is None:
        advice = "Restore the rows of the ledger that were changed, from a backup; then start a run."
    return cause("HOLE_DETECTED", loss, advice=advice, command=command, severity="error", error="HOLE_DETECTED")


def _committed(wait: "Wait", batch: "WaitingBatch") -> Cause:
    known: dict[str, Any] = {"txid": batch.txid, "since": batch.committed_at, "severity": "ok"}
    if batch.committed_at is None:
        story = f"The cursor of {wait.row.pipeline} has passed txid {batch.txid}, which has no commit."
        return _error("HOLE_DETECTED", story, txid=batch.txid)
    if batch.skipped_reason is None:
        return cause("COMMITTED", f"Txid {batch.txid} has committed.", **known)
    story = f"Txid {batch.txid} was skipped, without its rows: {quoted(batch.skipped_reason)}."
    return cause("SKIPPED", story, error=remedies.code_in(batch.skipped_reason), **known)


def _error(code: str, sentence: str, txid: int | None = None) -> Cause:
    advice, command = remedies.fix_of(code), remedies.command_of(code)
    return cause(code, sentence, txid=txid, severity="error", advice=advice, command=command, error=code)
