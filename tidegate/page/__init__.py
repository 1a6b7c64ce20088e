"""What operators look at in Airflow's own server: a page, and metrics for Prometheus."""
