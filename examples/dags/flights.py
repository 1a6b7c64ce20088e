"""Airflow runs pipeline flights when this Dag is triggered: daily figures per carrier, from the files of 2013."""

from tidegate import batch_dag

dag = batch_dag("flights", schedule=None)
