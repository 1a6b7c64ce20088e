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
from jobs.combiners import Combiner
from jobs.pipeline import Pipeline
from jobs.queries import Query
from jobs.sketches import ApproxDistinct, ApproxQuantiles
from jobs.sources import Source
from jobs.sources.changes import Changes
from jobs.sources.delta.source import Delta
from jobs.sources.files.source import Files
from jobs.sources.fixed_batches import FixedBatches
from jobs.sources.iceberg.source import Iceberg
from jobs.sources.inputs.reference import Reference
from jobs.sources.inputs.source import Inputs
from jobs.sources.kafka.source import Kafka
from jobs.sources.postgres.source import PostgresTable
from jobs.state_queries import StateQuery, state_query
from jobs.states import History, Newest, Rows, State, Update
from jobs.windows import Session, Sliding, Tumbling
from state_store.declaration import Ranges

__all__ = [
    "ApproxDistinct",
    "ApproxQuantiles",
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
    "Combiner",
    "Count",
    "Delta",
    "Files",
    "First",
    "FixedBatches",
    "Histogram",
    "History",
    "Iceberg",
    "Inputs",
    "Kafka",
    "Largest",
    "Last",
    "Max",
    "Min",
    "Newest",
    "Pipeline",
    "PostgresTable",
    "Query",
    "Ranges",
    "Reference",
    "Rows",
    "Session",
    "Sliding",
    "Smallest",
    "Source",
    "State",
    "StateQuery",
    "StdDev",
    "Sum",
    "Tumbling",
    "Update",
    "Variance",
    "state_query",
]
