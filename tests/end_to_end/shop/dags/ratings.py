"""A batch that fails is given up at once; a run covers two batches, so that a few files are a backlog."""

from tidegate import batch_dag

dag = batch_dag("ratings", batches_per_run=2)
