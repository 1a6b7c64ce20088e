"""What an author needs to declare a pipeline. Importing it loads no pyspark."""

from jobs.aggregates import Count, Max, Min, Sum
from jobs.pipeline import Pipeline, State
from jobs.sources import Source
from jobs.sources.files import Files
from jobs.sources.kafka import Kafka

__all__ = ["Count", "Files", "Kafka", "Max", "Min", "Pipeline", "Source", "State", "Sum"]
