"""The status of stack and pipelines, and the progress of a run."""
