"""Route: the shortcuts that one attempt takes through Spark, and which of them `explain` shows.

Every route stages the same partials; SAFE takes no shortcut.

A shortcut is a guess about costs, made from facts that the source knows before Spark has read a row. If a guess is wrong, the
attempt is slower, or starts over on another route (`tidegate.jobs.compute.stage.stage_partials.NeedsExecutors`); the result is
the same. A path is the route of a batch of a typical size, when no earlier batch is known, for authors to see.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tidegate.jobs.compute.stage.row_tracking import is_tracked
from tidegate.jobs.compute.stage.stage_partials import FEW_ROWS
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sources import InputFacts
from tidegate.state_store.attempt.attempts import Attempt
from tidegate.state_store.declarations.pipeline_spec import StateSpec
from tidegate.state_store.ledger.batches import QUARANTINED

# One task reads a batch of up to UNSPLIT_BYTES in no more time than several tasks and a shuffle take. Without a transform,
# which may be what takes the time, a single file of up to UNSHARED_BYTES is left to one task, too, because other batches keep
# the other cores busy. Opening a file costs about as much as reading OPENING_BYTES.
UNSPLIT_BYTES, UNSHARED_BYTES, OPENING_BYTES = 4 * 1024 * 1024, 32 * 1024 * 1024, 64 * 1024
MEBIBYTE = 1 << 20
# Examples for sources that know size and rows of a batch in advance, and whose digests vouch for the content.
_FILES = {
    "1 file of 1 MiB, 10,000 rows": InputFacts(1, MEBIBYTE, 10_000, is_verified=True),
    "4 files of 0.5 MiB, 20,000 rows": InputFacts(4, 2 * MEBIBYTE, 20_000, is_verified=True),
    "1 file of 10 MiB, 100,000 rows": InputFacts(1, 10 * MEBIBYTE, 100_000, is_verified=True),
    "4 files of 100 MiB": InputFacts(4, 400 * MEBIBYTE, 4_000_000, is_verified=True),
}


@dataclass(frozen=True)
class Route:
    """How one attempt is computed."""

    one_task: bool = False  # one Spark task reads and groups the batch, without a shuffle
    is_brief: bool = False  # the query is short: after a broken connection it is repeated, not reattached
    hashed: Literal["all", "used", "none"] = "all"  # columns of source rows; "used" by states, "none": rows are counted only
    follows_partials: int | None = None  # the number of rows that the partials must add up to; None follows each row
    in_process: frozenset[str] = frozenset()  # states whose partials this process stages, not Spark's tasks
    most_in_process: int = FEW_ROWS  # partials of a state; with more, all are staged by Spark's tasks


SAFE = Route()
Routing = Callable[[Pipeline, Attempt, InputFacts], Route]


def choose(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Route:
    """Return the route that should cost least; it depends on the arguments alone."""
    limit = UNSPLIT_BYTES if pipeline.transform or facts.files != 1 else UNSHARED_BYTES
    one_task = facts.files > 0 and facts.bytes is not None and facts.bytes + (facts.files - 1) * OPENING_BYTES <= limit
    rows = facts.rows if one_task else None
    is_whole = facts.is_verified and is_untouched(pipeline, attempt)
    return Route(
        one_task=one_task,
        is_brief=one_task and (facts.bytes or 0) <= UNSPLIT_BYTES,
        hashed=_hashed_columns(pipeline, attempt, facts),
        follows_partials=rows if is_whole and not pipeline.lost_tracking else None,
        in_process=_states_of_few_partials(pipeline, attempt, rows),
    )


def _hashed_columns(pipeline: Pipeline, attempt: Attempt, facts: InputFacts) -> Literal["all", "used", "none"]:
    """Return which columns of the source's rows are hashed: all, unless digests of the source vouch for the content.

    Then Spark need not read columns that nothing uses. Without a transform, the columns of the states are hashed all the same,
    because staging is compared with these hashes. Which columns a transform uses, only Spark finds out.

    Checks and the policy for bad records play no part in it: they may change between two attempts whose rows are compared.
    """
    if not facts.is_verified or QUARANTINED in attempt.source_metadata:
        return "all"
    if pipeline.transform is not None:
        return "none"
    return "used" if is_tracked(pipeline) else "all"


def is_flagged(pipeline: Pipeline, attempt: Attempt) -> bool:
    """Return whether the batch's rows have a column that says why a row is bad."""
    return QUARANTINED in attempt.source_metadata or pipeline.spec.quarantines or bool(pipeline.check)


def is_untouched(pipeline: Pipeline, attempt: Attempt) -> bool:
    """Return whether rows reach the states as the source emits them: without transform, and unflagged."""
    return pipeline.transform is None and not is_flagged(pipeline, attempt)


def has_short_rows(pipeline: Pipeline) -> bool:
    """Return whether Spark's Python workers get only numbers and times: no text is staged, and no author's code runs there.

    If so, the session limits Arrow batches by rows alone: to limit their bytes, Spark would compute the size for each row.
    """
    columns = (column for staged in pipeline.spec.staged for column in staged.columns)
    return pipeline.transform is None and not any(column.type.has_any_length for column in columns)


def _states_of_few_partials(pipeline: Pipeline, attempt: Attempt, rows: int | None) -> frozenset[str]:
    """Return the states that should get few partials, without texts, judging by recent batches and the number of rows."""

    def has_few(spec: StateSpec) -> bool:
        most = attempt.rows_before.get(spec.name, rows) if spec.keys else 1
        if pipeline.transform is None and rows is not None and most is not None:
            most = min(most, rows)
        has_texts = any(value.type.has_any_length for value in spec.values)
        return most is not None and most <= FEW_ROWS and not has_texts

    return frozenset(name for name, state in pipeline.states.items() if has_few(state.spec(name)))


@dataclass(frozen=True)
class Path:
    """The way of batches of one size.

    `tasks` read and group the batch. `reads` is how often its rows are read and transformed. `hashed` are the columns of the
    source's rows that are hashed for comparison with a replay, `follows` is what is counted and compared on the way into
    staging, and `in_process` names the states that are staged without Spark's tasks.
    """

    batch: str
    tasks: Literal["one", "many"]
    reads: int
    hashed: Literal["all", "used", "none"]
    follows: Literal["rows", "partials", "nothing"]
    in_process: tuple[str, ...]


def paths(pipeline: Pipeline) -> list[Path]:
    """Return the paths of a pipeline's batches: one per typical size, if the source knows sizes."""
    attempt = Attempt(pipeline.name, 1, 1, {}, rows_before={})
    return [
        _path(pipeline, attempt, batch, facts)
        for batch, facts in (_FILES if pipeline.source.reads_files else {"any": InputFacts()}).items()
    ]


def _path(pipeline: Pipeline, attempt: Attempt, batch: str, facts: InputFacts) -> Path:
    route = choose(pipeline, attempt, facts)
    follows: Literal["rows", "partials", "nothing"] = "rows"
    if route.follows_partials is not None:
        follows = "partials"
    elif not is_tracked(pipeline):
        follows = "nothing"
    return Path(
        batch=batch,
        tasks="one" if route.one_task else "many",
        reads=len(pipeline.states) + (1 if is_flagged(pipeline, attempt) and pipeline.spec.quarantines else 0),
        hashed="none" if pipeline.tracking == "off" else route.hashed,
        follows=follows,
        in_process=tuple(sorted(route.in_process)),
    )
