"""The names that an author needs to declare a pipeline. Importing them loads no pyspark."""

from jobs.aggregates import (
    Avg,
    BitAnd,
    BitOr,
    BitXor,
    BoolAnd,
    BoolOr,
    CollectList,
    CollectSet,
    Count,
    First,
    Histogram,
    Largest,
    Last,
    Max,
    Min,
    Smallest,
    StdDev,
    Sum,
    Variance,
)
from jobs.checks import Check
from jobs.pipeline import Pipeline
from jobs.sources import Source
from jobs.sources.changes import Changes
from jobs.sources.files.source import Files
from jobs.sources.fixed_batches import FixedBatches
from jobs.sources.kafka.source import Kafka
from jobs.sources.postgres.source import PostgresTable
from jobs.states import Newest, Rows, State, Update

__all__ = [
    "Avg",
    "BitAnd",
    "BitOr",
    "BitXor",
    "BoolAnd",
    "BoolOr",
    "Changes",
    "Check",
    "CollectList",
    "CollectSet",
    "Count",
    "Files",
    "First",
    "FixedBatches",
    "Histogram",
    "Kafka",
    "Largest",
    "Last",
    "Max",
    "Min",
    "Newest",
    "Pipeline",
    "PostgresTable",
    "Rows",
    "Smallest",
    "Source",
    "State",
    "StdDev",
    "Sum",
    "Update",
    "Variance",
]
