"""The Dags: one small file per pipeline, built by `batch_dag`. The only package that knows Airflow."""
