"""Airflow runs pipeline word_count when this Dag is triggered: how often each word occurs in the text files."""

from tidegate import batch_dag

dag = batch_dag("word_count", schedule=None)
