"""What `explain` shows: which way batches of a pipeline take through Spark and into Postgres, without running a batch.

A path is what `tidegate.jobs.compute.shortcuts.choose` decides for a batch of a typical size, when no earlier batch is known.
"""

from dataclasses import dataclass
from typing import Literal

from tidegate.jobs.compute.shortcuts import choose, is_flagged
from tidegate.jobs.compute.stage.row_tracking import is_tracked
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sources import InputFacts
from tidegate.state_store.seal.attempts import Attempt

MEBIBYTE = 1 << 20
# Examples for sources that know size and rows of a batch in advance, and whose digests vouch for the content.
_FILES = {
    "1 file of 1 MiB, 10,000 rows": InputFacts(1, MEBIBYTE, 10_000, is_verified=True),
    "4 files of 0.5 MiB, 20,000 rows": InputFacts(4, 2 * MEBIBYTE, 20_000, is_verified=True),
    "1 file of 10 MiB, 100,000 rows": InputFacts(1, 10 * MEBIBYTE, 100_000, is_verified=True),
    "4 files of 100 MiB": InputFacts(4, 400 * MEBIBYTE, 4_000_000, is_verified=True),
}


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
