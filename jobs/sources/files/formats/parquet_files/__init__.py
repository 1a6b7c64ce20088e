"""Parquet files: which stored column may be read as which, and reading in tasks."""
