"""What sources and attempts both need of Spark: its errors, files of its tasks, private parts of libraries."""
