"""One attempt at a batch with Spark, from reading to the seal. Only this package loads pyspark."""
