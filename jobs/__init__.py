"""The names that an author needs to declare a pipeline. Importing them loads no pyspark."""

from jobs.aggregates import Count, Max, Min, Sum
from jobs.pipeline import Pipeline, State
from jobs.sources import Source
from jobs.sources.files.source import Files
from jobs.sources.fixed_batches import FixedBatches
from jobs.sources.kafka.source import Kafka
from jobs.sources.postgres.source import PostgresTable

__all__ = ["Count", "Files", "FixedBatches", "Kafka", "Max", "Min", "Pipeline", "PostgresTable", "Source", "State", "Sum"]
