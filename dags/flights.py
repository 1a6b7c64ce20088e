"""Airflow runs flights when somebody triggers this Dag: daily figures per carrier, from the files of 2013."""

from tidegate import batch_dag

dag = batch_dag("flights", schedule=None)
