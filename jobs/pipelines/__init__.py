"""The pipelines of the project: a module each, named like its pipeline. In no project, there are none.

Each has its `PIPELINE`. Modules whose names begin with ``_`` are no pipelines; these import them: ``from ._prices import ...``.
"""

from pathlib import Path

from tidegate.state_store.base import project

# On Spark's executors, what has travelled is in an archive beside this module.
if Path(__file__).is_file() and (_own := project.own("pipelines")) is not None:
    __path__ = [str(_own)]
