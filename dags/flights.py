"""The Dag of pipeline flights, run when triggered: daily figures per carrier, from the files of 2013."""

from tidegate import batch_dag

dag = batch_dag("flights", schedule=None)
