"""Runs when triggered, in Airflow: one pipeline with every kind of state."""

from tidegate.dags.batch_dag import batch_dag

dag = batch_dag("kinds")
