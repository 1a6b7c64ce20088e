"""dags: when. One small file per pipeline; `batch_dag` builds them all. The only package that knows Airflow."""
