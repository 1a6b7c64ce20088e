"""Partials and bad records go into staging tables, and no row is lost on the way."""
