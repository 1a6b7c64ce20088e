"""A source of Postgres tables."""
