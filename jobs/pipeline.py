"""Pipeline and State: what an author declares. Both check themselves on construction; nothing here imports pyspark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jobs.aggregates import Aggregate
from state_store.declaration import ColumnType, KeyColumn, PipelineSpec, StateSpec, ValueColumn

if TYPE_CHECKING:
    from jobs.sources import Source

# A DataFrame in, a DataFrame out; Any keeps pyspark out of this module.
Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class State:
    """One row per key, with its aggregates: a table of the same name in schema ``state``.

    `key` maps key columns to Postgres types, `aggregates` value columns to aggregates. A row whose key has a NULL fails the
    batch, unless `null_keys` keeps such rows as a group of their own.
    """

    key: Mapping[str, str]
    aggregates: Mapping[str, Aggregate]
    null_keys: bool = False

    def spec(self, name: str) -> StateSpec:
        """Return the store's view of this state."""
        keys = tuple(KeyColumn(column, ColumnType(kind), self.null_keys) for column, kind in self.key.items())
        values = tuple(
            ValueColumn(column, ColumnType(a.type), a.merge, computed=f"{a.function}({a.column or '*'})")
            for column, a in self.aggregates.items()
        )
        return StateSpec(name, keys, values)


@dataclass(frozen=True)
class Pipeline:
    """A source, a transform, and the states that its rows are aggregated into.

    `transform` takes and returns a DataFrame. It must be a function of its rows alone: the same rows in, the same rows out,
    whenever and however often it runs. It sees no txid, no attempt and no connection.

    `window` is how many batches are processed at once. Raise `version` when the transform's meaning or the source changes:
    attempts that an older version computed then never count, and batches that have committed stay as they are.
    """

    name: str
    source: "Source"
    states: Mapping[str, State]
    transform: Transform | None = None
    window: int = 4
    version: int = 1
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"Pipeline {self.name} has a window of {self.window}; it must be at least 1.")
        if self.version < 1:
            raise ValueError(f"Pipeline {self.name} has version {self.version}; it must be at least 1.")
        if self.source.kind != "transactional":
            raise ValueError(f"Pipeline {self.name}: a {self.source.kind} source does not give exactly-once with these states.")
        _ = self.spec

    @cached_property
    def spec(self) -> PipelineSpec:
        """Return the store's view of this pipeline."""
        states = tuple(state.spec(name) for name, state in self.states.items())
        return PipelineSpec(self.name, self.source.kind, self.source.identity, states, self.version)
