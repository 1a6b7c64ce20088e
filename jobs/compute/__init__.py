"""One attempt at a batch with Spark: read, transform, aggregate, stage, reconcile, seal. Only this package loads pyspark."""
