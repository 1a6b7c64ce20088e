"""A batch's life: plan, process, commit; what a task of Airflow, `tidegate run` and a test all call."""
