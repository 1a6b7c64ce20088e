"""The pipelines' code, as far as it can be imported.

What the page shows comes from the ledger, so a pipeline whose module is broken or gone stays readable. The code adds its
description, and acting needs it.
"""

import logging
import time
from functools import lru_cache

from tidegate.jobs.named_queries import Query
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import all_queries, find_pipeline, pipeline_names

logger = logging.getLogger(__name__)

SECONDS_REMEMBERED = 30  # a module that raises would be run again by each poll


def declared(name: str) -> Pipeline | None:
    """Return the pipeline of this name; None if there is none in the code, or its module cannot be imported."""
    return _declared(name, int(time.monotonic() // SECONDS_REMEMBERED))


def queries() -> dict[str, Query]:
    """Return the declared queries by name; those of a module that cannot be imported are missing.

    Raises: SettingsInvalid if two have the same name.
    """
    return _queries(int(time.monotonic() // SECONDS_REMEMBERED))


@lru_cache(maxsize=1)
def _queries(_period: int) -> dict[str, Query]:
    found = all_queries()
    for pipeline, why in found.broken.items():
        logger.warning("The queries of %s are not known: %s", pipeline, why)
    return found.known


@lru_cache(maxsize=1)
def _names(_period: int) -> frozenset[str]:
    return frozenset(pipeline_names())


@lru_cache(maxsize=1000)
def _declared(name: str, period: int) -> Pipeline | None:
    if name not in _names(period):  # one search for all, also for those that there are not
        return None
    try:
        return find_pipeline(name)
    except Exception as error:  # noqa: BLE001 - an author's module may raise anything
        logger.warning("Pipeline %s cannot be imported: %s: %s", name, type(error).__name__, error)
        return None
