"""The pipelines of this project: one module each, named like its pipeline, with its `PIPELINE`."""
