"""Combiners: an author's own aggregates, in Spark for the rows of a batch and in SQL for what is kept.

    @dataclass(frozen=True)
    class CappedSum(Combiner):
        column: str
        type: str = "bigint"
        zero = 0

        def partial(self, values):
            return F.least(F.sum(values), F.lit(1000))

        def combine(self, kept, new):
            return sa.func.least(kept + new, 1000)

Both are expressions, so that Postgres merges whole batches under the cursor's lock, and no value travels to Python.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tidegate.jobs.aggregates import Part, Plain

if TYPE_CHECKING:
    from pyspark.sql import Column
    from sqlalchemy import ColumnElement


class Combiner(Plain, ABC):
    """An author's own aggregate of a column: a frozen dataclass that inherits this, whose fields are part of its meaning.

    It must give the same in any split and order of the rows: `combine` is associative and commutative, and `zero` changes
    nothing. `tidegate.jobs.testing.check_aggregate` tries that on an author's rows, with Spark and Postgres. Rounding breaks
    it.

    `type` is the Postgres type that is kept, `read_as` that of the column, if it differs. A value that does not fit exactly
    fails the batch.

    `zero` is the value of no values, or of NULLs alone. Without it, this is a reducer: NULL until there is a value.

    Raise `version` if the meaning of the code changes. Like any changed aggregate, it is then refused for a state that has
    committed batches. A pipeline with a combiner commits one batch at a time.
    """

    column: str
    type: str
    read_as: str | None = None
    zero: ClassVar[Any] = None
    version: ClassVar[int] = 1

    @abstractmethod
    def partial(self, values: "Column") -> "Column":
        """Return the value over the rows of a key in a batch, some of which have a value, as an aggregate of Spark."""

    @abstractmethod
    def combine(self, kept: "ColumnElement[Any]", new: "ColumnElement[Any]") -> "ColumnElement[Any]":
        """Return the value of both, as an expression of SQLAlchemy. Neither is NULL. What does not fit is an `Overflow`."""

    def parts(self, name: str) -> Sequence[Part]:
        """Return the kept column."""
        if not is_dataclass(self):
            raise TypeError(f"{type(self).__name__} has to be a frozen dataclass: its fields are part of the declaration.")
        return [Part(name, self.type, "own", "own", self.column, self.read_as, combiner=self)]
