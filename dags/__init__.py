"""The Dags: one small file per pipeline, built by `batch_dag`. The only package that knows Airflow."""

if __name__ != "tidegate.dags":  # a checkout on the path has this folder, too: it would be loaded twice
    raise ImportError("Import tidegate.dags: there is no package dags.")
