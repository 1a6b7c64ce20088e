"""The status of stack and pipelines, as it is now or as it changes."""
