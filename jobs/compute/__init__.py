"""One attempt at a batch with Spark, from reading to the seal. Declaring a pipeline loads nothing of this package."""
