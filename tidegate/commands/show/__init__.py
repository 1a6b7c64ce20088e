"""Verbs that only show: batches, states, queries, causes, errors."""
