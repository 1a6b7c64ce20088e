"""The formats of `jobs.sources.files`, a module for each, with the parts that Spark's tasks run in modules of their own."""
