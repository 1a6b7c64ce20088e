"""Spark's tasks that read parts by their numbers, for `DataFrame.mapInArrow`."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.jobs.spark.task_errors import MARK, reporting


@dataclass(frozen=True)
class NumberedTasks(ABC):
    """Reads what belongs to each of the numbers that a Spark task gets; errors of ours are raised as `reporting` does.

    It is a class, which Spark pickles by name; for an inner function, it would look through all imported modules.
    """

    mark: str = field(default=MARK, kw_only=True)

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read what belongs to these numbers."""
        with reporting(self.mark):
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    yield from self.read_task(number)

    @abstractmethod
    def read_task(self, number: int) -> Iterator[pa.RecordBatch]:
        """Read what belongs to one number."""
