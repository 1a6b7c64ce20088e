"""Checks that an aggregate has the same value for any split and order of rows, in Spark and Postgres, without tables."""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import grpc
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from tidegate.jobs.aggregates import Aggregate
from tidegate.jobs.compute.partials.rows_to_partials import aggregate
from tidegate.jobs.spark.spark_errors import meaning_of
from tidegate.jobs.spark.task_errors import reported_in
from tidegate.jobs.states import State
from tidegate.state_store.base.settings import Settings
from tidegate.state_store.declarations.column_spec import ValueColumn
from tidegate.state_store.store import StateStore

MOST_BATCHES, MOST_ALONE = 8, 30  # batches of a random split; rows that get a batch of their own, in another split
BATCH = "number_of_the_batch"
Texts = Mapping[str, str | None]  # a partial, by column
Split = list[Sequence[Any]]  # the rows of each batch


class BrokenPromise(AssertionError):
    """A source or an aggregate breaks what all of its kind promise."""


class AggregateBench:
    """Computes partials of random batches in Spark, and merges them in random order in Postgres."""

    def __init__(self, tried: Aggregate, rows: DataFrame, settings: Settings, rng: random.Random) -> None:
        self._keyed = State(key={BATCH: "bigint"}, aggregates={"value": tried})
        self._overall = State(aggregates={"value": tried})
        self._spec = self._overall.spec("tried")
        self._rows = rows
        self._settings = settings
        self._rng = rng

    def check(self, splits: int) -> None:
        """Compare splits with one pass over all rows; check that merges commute and associate.

        Raises: BrokenPromise; the errors of a batch and of its commit.
        """
        rows = [tuple(row) for row in self._rows.collect()]
        one_by_one: Split = [[row] for row in rows[:MOST_ALONE]] + ([rows[MOST_ALONE:]] if len(rows) > MOST_ALONE else [])
        batches: list[Split] = [[rows], one_by_one, *(self._split(rows) for _ in range(splits))]
        (empty,) = self._partials_of(self._overall, []).values()
        by_number = self._partials_of(self._keyed, [batch for split in batches for batch in split])
        numbers = count()
        partials = [[by_number.get(next(numbers), empty) for _ in split] for split in batches]
        with StateStore.connect(self._settings) as store:
            self._store = store
            whole = self._merge(None, partials[0][0])
            for one, other in ((empty, partials[0][0]), (partials[0][0], empty)):
                _check_equal("no rows change nothing", whole, self._merge(one, other))
            for split in partials[1:]:
                kept: Texts | None = None
                for partial in self._rng.sample(split, len(split)):
                    kept = self._merge(kept, partial)
                _check_equal("any split and order of the rows gives the value of one pass", whole, kept or whole)
            self._check_laws([partial for split in partials[1:] for partial in split])

    def _split(self, rows: Sequence[Any]) -> Split:
        mixed = self._rng.sample(rows, len(rows))
        cuts = sorted(self._rng.randint(0, len(rows)) for _ in range(self._rng.randint(1, MOST_BATCHES)))
        return [mixed[start:end] for start, end in pairwise([0, *cuts, len(rows)])]

    def _partials_of(self, state: State, batches: Sequence[Sequence[Any]]) -> dict[int, Texts]:
        """Return each batch's partial by batch number, as texts; a state without key has one, number 0."""
        schema = T.StructType([T.StructField(BATCH, T.LongType(), nullable=False), *self._rows.schema.fields])
        numbered = [(number, *row) for number, batch in enumerate(batches) for row in batch]
        try:
            rows = self._rows.sparkSession.createDataFrame(numbered, schema)
            number = F.col(BATCH) if state.key else F.lit(0)
            partials = aggregate(rows, schema, state, state.spec("tried"))
            texts = partials.select(number.alias(BATCH), *map(_text, self._spec.values)).collect()
        except (PySparkException, grpc.RpcError) as error:
            raise reported_in(error) or meaning_of(error) from error
        return {row[BATCH]: {value.name: row[value.name] for value in self._spec.values} for row in texts}

    def _merge(self, kept: Texts | None, partial: Texts) -> Texts:
        return self._store.try_merge(self._spec, kept, partial)

    def _check_laws(self, partials: Sequence[Texts]) -> None:
        for one, two, three in _triples(partials):
            both = self._merge(one, two)
            _check_equal(f"the order of two partials does not matter, {one} and {two}", both, self._merge(two, one))
            left, right = self._merge(both, three), self._merge(one, self._merge(two, three))
            _check_equal(f"the grouping of partials does not matter, {one}, {two} and {three}", left, right)


def _triples(partials: Sequence[Texts]) -> Iterator[Sequence[Texts]]:
    return (partials[start : start + 3] for start in range(len(partials) - 2))


def _text(value: ValueColumn) -> Column:
    """Return partials as text that Postgres reads; arrays are text already."""
    column = F.col(value.name)
    if value.type.name == "timestamptz":
        column = F.date_format(column, "yyyy-MM-dd HH:mm:ss.SSSSSSXXX")
    elif value.type.name == "bytea":
        column = F.concat(F.lit("\\x"), F.hex(column))
    return column.cast("string").alias(value.name)


def _check_equal(promise: str, expected: Texts, actual: Texts) -> None:
    for name in expected:
        if expected[name] != actual[name]:
            raise BrokenPromise(f"{promise}: {name} is {expected[name]} and {actual[name]}.")
