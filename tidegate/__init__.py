"""tidegate: the command line, and the stack that it runs on one machine. Talks to Airflow by its REST API only."""
