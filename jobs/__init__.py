"""The names that an author needs to declare a pipeline. Importing them loads no pyspark."""

from tidegate.jobs.aggregates import (
    Avg,
    BitAnd,
    BitOr,
    BitXor,
    BoolAnd,
    BoolOr,
    CollectList,
    CollectSet,
    Combiner,
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
from tidegate.jobs.checks import Check
from tidegate.jobs.named_queries import Query
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.sketches import ApproxDistinct, ApproxQuantiles
from tidegate.jobs.sources import Source
from tidegate.jobs.sources.changes import Changes
from tidegate.jobs.sources.delta.source import Delta
from tidegate.jobs.sources.files.source import Files
from tidegate.jobs.sources.fixed_batches import FixedBatches
from tidegate.jobs.sources.iceberg.source import Iceberg
from tidegate.jobs.sources.inputs.reference import Reference
from tidegate.jobs.sources.inputs.source import Inputs
from tidegate.jobs.sources.kafka.source import Kafka
from tidegate.jobs.sources.postgres.source import PostgresTable
from tidegate.jobs.state_queries import StateQuery, state_query
from tidegate.jobs.states import History, Newest, Rows, State, Update
from tidegate.jobs.windows import Session, Sliding, Tumbling
from tidegate.state_store.declarations.pipeline_spec import Ranges

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

if __name__ != "tidegate.jobs":  # a checkout on the path has this folder, too: it would be loaded twice
    raise ImportError("Import tidegate.jobs: there is no package jobs.")
