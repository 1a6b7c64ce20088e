"""The operator's page: a plugin of Airflow that shows ledger and states, says why a batch waits, and acts.

    plugin             what Airflow loads in each of its processes; light
    app                the FastAPI app, which only the api-server builds
    access             who asks, and what Airflow lets them read and do
    ledger_connection  reads as `pg_reader`, acts as `pg_user`
    http_answers       JSON with an ETag, errors, headers that browsers enforce
    routes             a module for each group of routes, and what Prometheus reads

They hold no SQL: queries are in `state_store`.
"""

PREFIX = "/tidegate"
