"""Routes for batches: a page of them, the timeline, and one batch's whole story."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict

from tidegate.explain.attempt_outcome import Outcome, outcome
from tidegate.explain.why import Why, explain
from tidegate.page import PREFIX, access, ledger_connection
from tidegate.page.shared_models import LARGEST, WITHOUT_NUL, Action, Number, Txid
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.commit import quarantined_records
from tidegate.state_store.ledger import cursors
from tidegate.state_store.read_ledger import batch_details, batch_search, batch_status, registered_pipelines, wait_facts
from tidegate.state_store.read_ledger.batch_phases import PHASES, Phase
from tidegate.state_store.read_ledger.batch_search import BatchFilter
from tidegate.state_store.read_ledger.batch_status import BatchHistory
from tidegate.state_store.read_ledger.batch_timeline import MOST_BATCHES, timeline

router = APIRouter(prefix="/api/pipelines/{pipeline}")


def _of_a_real_zone(at: datetime | None) -> datetime | None:
    if at and abs(at.utcoffset() or timedelta()) >= timedelta(hours=16):  # Postgres knows none
        raise ValueError("no zone is 16 hours away from UTC")
    return at


# With its zone, and by any zone within the range of a datetime.
Moment = Annotated[
    AwareDatetime | None,
    AfterValidator(_of_a_real_zone),
    Query(ge=datetime(1900, 1, 1, tzinfo=UTC), le=datetime(9000, 1, 1, tzinfo=UTC)),
]
MOST_EXACT = 2**53  # a number of JavaScript beyond it is rounded


class BatchRow(BaseModel):
    """A batch, with the columns of the view ``tidegate.batches``, its number of attempts, and the code of its error."""

    txid: int
    phase: Phase
    attempt: int
    attempts: int
    source_rows: int | None
    key_count: int | None
    opened_at: datetime
    started_at: datetime | None
    sealed_at: datetime | None
    committed_at: datetime | None
    merged_at: datetime | None
    waits_for: str | None
    error: str | None
    owner: str | None


class Batches(BaseModel):
    """Some batches, newest first. `next` goes on below a txid: also if few were found, because each request looks at some."""

    now: datetime
    batches: list[BatchRow]
    next: int | None


class Attempt(BaseModel):
    """The times of an attempt."""

    attempt: int
    started_at: datetime
    staged_at: datetime | None
    sealed_at: datetime | None
    failed_at: datetime | None
    seen_at: datetime | None
    error: str | None
    owner: str


class Commit(BaseModel):
    """The times of a commit."""

    attempt: int
    committed_at: datetime
    merged_at: datetime
    skipped: bool


class TimelineBatch(BaseModel):
    """A batch with its newest attempts and its commit."""

    txid: int
    phase: Phase
    opened_at: datetime
    attempts: list[Attempt]
    commit: Commit | None


class Timeline(BaseModel):
    """Batches in txid order, and the last committed txid."""

    now: datetime
    cursor: int
    batches: list[TimelineBatch]


class Log(BaseModel):
    """Where Airflow shows the log of an attempt."""

    attempt: int
    url: str


class Links(BaseModel):
    """Where else to look; None if there is nothing."""

    dag_run: str | None
    logs: list[Log]


class AttemptDetail(Attempt):
    """An attempt as the ledger keeps it; sums of hashes as text, as no JavaScript number holds them."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    airflow_run_id: str | None
    airflow_task_id: str | None
    airflow_try: int | None
    spark_application: str | None
    spark_tag: str | None
    fingerprint: str
    source_digest: str
    is_poison: bool | None
    source_rows: int | None
    source_hash_sum: str | None
    quarantined_rows: int | None
    transformed_rows: int | None
    transformed_hash_sum: str | None
    staged_bytes: int | None
    dropped_at: datetime | None
    outcome: Outcome


class Seal(BaseModel):
    """What one Spark task staged, and its digest as text."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    attempt: int
    state: str
    partition: int
    task_attempt: int
    rows: int
    digest: str


class CommitDetail(BaseModel):
    """The commit that made a batch count, or skipped it."""

    attempt: int
    owner: str
    committed_at: datetime
    merged_at: datetime
    key_count: int
    quarantined_rows: int
    skipped_reason: str | None


class Check(BaseModel):
    """What a check of the batch found before it counted; None if nothing."""

    name: str
    found: str | None


class Batch(BaseModel):
    """Everything that the ledger knows of a batch, and what a view of it offers: links and actions."""

    now: datetime
    cursor: int
    has_next: bool
    may_act: bool
    batch: BatchRow
    source: Any
    source_digest: str
    attempts: list[AttemptDetail]
    seals: list[Seal]
    commit: CommitDetail | None
    actions: list[Action]
    checks: list[Check]
    quarantined: int
    set_aside: int
    why: Why
    links: Links


@router.get("/batches")
def batches(
    pipeline: access.Readable,
    before: Txid = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    phase: Annotated[str | None, Query(pattern=f"^({'|'.join(PHASES)})$")] = None,
    error: Annotated[str | None, Query(max_length=100, pattern=WITHOUT_NUL)] = None,
    since: Moment = None,
    until: Moment = None,
) -> Batches:
    """Return some batches, newest first, that fulfil all conditions."""
    wanted = BatchFilter(phase=phase, error=error or None, since=since, until=until)
    with ledger_connection.snapshot_of(pipeline, f"reading batches of {pipeline}") as connection:
        found = batch_search.search(connection, pipeline, wanted, before, limit)
        rows = batch_details.rows(connection, found.batches)
        now = registered_pipelines.moment(connection)
    return Batches(now=now, batches=[BatchRow(**row) for row in rows], next=found.before)


@router.get("/timeline")
def timeline_of(
    pipeline: access.Readable,
    last: Annotated[int, Query(ge=1, le=MOST_BATCHES)] = 100,
    first: Annotated[int | None, Query(alias="from", ge=1, le=LARGEST)] = None,
    to: Txid = None,
) -> Timeline:
    """Return the newest batches, or those of a range, for a picture of both phases."""
    if first is None and to is not None:
        first = max(to - last + 1, 1)
    if first is not None and to is not None:
        if first > to:
            raise UsageError(f"The range is upside down: from {first} is above to {to}.")
        last = to - first + 1
    with ledger_connection.snapshot_of(pipeline, f"reading the timeline of {pipeline}") as connection:
        found = timeline(connection, pipeline, first, last)
        now = registered_pipelines.moment(connection)
    return Timeline(now=now, cursor=found.cursor, batches=[TimelineBatch(**batch) for batch in found.batches])


@router.get("/batches/{txid}")
def batch(request: Request, pipeline: access.Readable, txid: Number, user: access.User) -> Batch:
    """Return everything about one batch."""
    with wait_facts.moment(ledger_connection.reader(), f"reading {pipeline} {txid}", [pipeline]) as moment:
        connection = moment.connection
        registered_pipelines.check_registered(connection, pipeline)
        known = batch_status.batch_history(connection, pipeline, txid)
        (row,) = batch_details.rows(connection, [known.status])
        totals = quarantined_records.totals(connection, pipeline, txid)
        tasks = batch_details.tasks(connection, pipeline, txid, known.attempts)
        why = explain(moment, pipeline, txid)
        has_next = bool(batch_status.batch_statuses(connection, pipeline, [txid + 1], 1))
        cursor = cursors.committed(connection, pipeline)
        now = registered_pipelines.moment(connection)
    return Batch(
        now=now,
        cursor=cursor,
        has_next=has_next,
        may_act=access.is_allowed(user, access.ACT, pipeline),
        batch=BatchRow(**row),
        source=_exactly(known.source_metadata),
        source_digest=known.source_digest,
        attempts=[AttemptDetail(**attempt, outcome=outcome(attempt, known)) for attempt in known.attempts],
        seals=[Seal(**seal) for seal in known.seals],
        commit=CommitDetail(**known.commit) if known.commit else None,
        actions=[Action(**action) for action in known.actions],
        checks=[Check(**check) for check in known.checks],
        quarantined=totals.waiting,
        set_aside=totals.set_aside,
        why=why,
        links=_links(request, known, tasks),
    )


def _exactly(value: Any) -> Any:
    """Return JSON in which whole numbers that a browser would round, such as a time in nanoseconds, are texts."""
    if isinstance(value, dict):
        return {name: _exactly(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_exactly(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) >= MOST_EXACT else value


def _links(request: Request, known: BatchHistory, tasks: list[batch_details.Task]) -> Links:
    """Return addresses in Airflow's UI: the newest attempt's run, and the log of each attempt's task."""
    airflow = request.scope["root_path"].removesuffix(PREFIX)
    runs = [f"{airflow}/dags/{quote(known.status.pipeline, safe='')}/runs/{quote(task.run_id, safe='')}" for task in tasks]
    logs = [
        Log(attempt=t.attempt, url=f"{run}/tasks/{quote(t.task_id, safe='')}/mapped/{t.position}?try_number={t.number}")
        for run, t in zip(runs, tasks, strict=True)
    ]
    return Links(dag_run=runs[-1] if runs else None, logs=logs)
