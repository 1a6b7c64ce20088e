"""Verbs that start runs or act on batches and pipelines."""
