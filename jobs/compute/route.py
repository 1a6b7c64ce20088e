"""Route: the shortcuts that one attempt takes through Spark. Every route stages the same partials; SAFE takes no shortcut.

A shortcut is a guess about costs, made from facts that the source knows before Spark has read a row. If a guess is wrong, the
attempt is slower, or starts over on another route (`jobs.compute.staging.NeedsExecutors`); the result is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jobs.compute.staging import FEW_ROWS
from jobs.compute.tracking import used_columns
from jobs.pipeline import Pipeline
from jobs.sources import InputFacts
from state_store.attempts import Attempt
from state_store.batches import QUARANTINED
from state_store.declaration import StateSpec

# Up to the first size, one task takes no longer than to start others and shuffle; opening a file costs about as much as reading
# the third. Up to the second size, sharing a single file among tasks takes more work in all than it saves, as long as other
# batches keep the other cores busy; not so if a transform may be what takes the time.
UNSPLIT_BYTES, UNSHARED_BYTES, OPENING_BYTES = 4 * 1024 * 1024, 16 * 1024 * 1024, 64 * 1024


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
    """Return the route that should cost least. A function of its arguments alone."""
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
    """Return which columns of the source's rows are hashed. A digest that vouches for the content makes hashes redundant.

    Then Spark need not read columns that nothing uses: without a transform, the states' are known, and hashed all the same,
    because these hashes are followed into staging; what a transform uses, only Spark finds out.
    """
    if not facts.is_verified or is_flagged(pipeline, attempt):
        return "all"
    if pipeline.transform is not None:
        return "none"
    return "used" if used_columns(pipeline) is not None else "all"


def is_flagged(pipeline: Pipeline, attempt: Attempt) -> bool:
    """Return whether the batch's rows say which of them are bad (`Emitter.emit_records`)."""
    return QUARANTINED in attempt.source_metadata or pipeline.spec.quarantines or bool(pipeline.check)


def is_untouched(pipeline: Pipeline, attempt: Attempt) -> bool:
    """Return whether rows reach the states as the source emits them: no transform, and none is set aside."""
    return pipeline.transform is None and not is_flagged(pipeline, attempt)


def has_short_rows(pipeline: Pipeline) -> bool:
    """Return whether Spark's Python workers get only numbers and times: no text is staged, and no author's code runs there.

    Then only the number of rows in an Arrow batch is limited, for the whole session: Spark would work out the bytes per row.
    """
    columns = (column for staged in pipeline.spec.staged for column in staged.columns)
    return pipeline.transform is None and not any(column.type.has_any_length for column in columns)


def _states_of_few_partials(pipeline: Pipeline, attempt: Attempt, rows: int | None) -> frozenset[str]:
    """Return the states that are expected to get few partials of limited size, judging by recent batches and the rows."""

    def has_few(spec: StateSpec) -> bool:
        most = attempt.rows_before.get(spec.name, rows) if spec.keys else 1
        if pipeline.transform is None and rows is not None and most is not None:
            most = min(most, rows)
        has_texts = any(value.type.has_any_length for value in spec.values)
        return most is not None and most <= FEW_ROWS and not has_texts

    return frozenset(name for name, state in pipeline.states.items() if has_few(state.spec(name)))
