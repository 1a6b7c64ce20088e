"""The engine: plan, process, commit; used by Airflow's tasks, `tidegate run` and tests alike."""
