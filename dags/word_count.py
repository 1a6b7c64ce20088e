"""Airflow runs word_count when somebody triggers this Dag: how often each word occurs in the text files."""

from tidegate import batch_dag

dag = batch_dag("word_count", schedule=None)
