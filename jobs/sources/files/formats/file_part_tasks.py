"""What Spark's tasks do to read files of every format: parts of files become Arrow batches, bad records are named.

Flagged rows have three more columns, HIDDEN: origin, refusal and payload. Otherwise the first bad record ends the query.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.jobs.sources import HIDDEN
from tidegate.jobs.spark.numbered_tasks import NumberedTasks
from tidegate.state_store.base.errors import MalformedRecord, storable

SHOWN_RECORD_CHARACTERS = 200
# The message about a record that a source's schema does not fit.
MISFIT = (
    "{place}: the record does not fit the schema: {why}. It is {record!r}. Correct the schema and raise the pipeline's "
    "version; a planned file must stay as it is."
)


@dataclass(frozen=True)
class TaskReader(NumberedTasks):
    """Reads the parts of a batch's files, divided among tasks."""

    tasks: Sequence[Sequence[Any]]

    def read_task(self, number: int) -> Iterator[pa.RecordBatch]:
        """Read the parts of one task."""
        for part in self.tasks[number]:
            yield from self.read(part)

    @abstractmethod
    def read(self, part: Any) -> Iterator[pa.RecordBatch]:
        """Read one part."""


def flagged_batch(
    columns: dict[str, pa.Array],
    bad: dict[int, str],
    origins: list[str],
    payload: Callable[[int], str],
    *,
    keeps_all: bool = False,
) -> pa.RecordBatch:
    """Return columns with ORIGIN, REFUSAL and PAYLOAD; the values of a bad record are NULL.

    Only bad records have a payload, unless `keeps_all`, because Spark has yet to check columns of the others.
    """
    count = len(origins)
    refusals: list[str | None] = [None] * count
    payloads: list[str | None] = [payload(number) for number in range(count)] if keeps_all else [None] * count
    is_good = np.ones(count, np.bool_)
    for number, reason in bad.items():
        refusals[number], payloads[number], is_good[number] = storable(reason), payload(number), False
    if bad:
        places = pa.array(np.where(is_good, np.arange(count), 0), mask=~is_good)
        columns = {name: column.take(places) for name, column in columns.items()}
    hidden = [pa.array(values, pa.string()) for values in (origins, refusals, payloads)]
    return pa.RecordBatch.from_pydict({**columns, **dict(zip(HIDDEN, hidden, strict=True))})


def malformed(place: str, reason: str, record: str) -> MalformedRecord:
    """Return the error for a bad record."""
    return MalformedRecord(MISFIT.format(place=place, why=reason, record=record[:SHOWN_RECORD_CHARACTERS]))
