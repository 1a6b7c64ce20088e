"""Connections to Postgres: pools, transactions, locks, COPY, and its errors by SQLSTATE."""
