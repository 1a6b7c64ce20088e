"""Verbs that set up: projects, the stack, tables, the demo."""
