"""Find pipelines by name: modules of `jobs.pipelines`, then entry points of the group ``tidegate.pipelines``."""

import difflib
import pkgutil
from collections.abc import Collection
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points

import jobs.pipelines
from jobs.pipeline import Pipeline
from state_store.errors import SettingsInvalid, UnknownPipeline

ENTRY_POINTS = "tidegate.pipelines"


def pipeline_names() -> list[str]:
    """Return the current names in alphabetical order; import no pipeline."""
    _entry_points.cache_clear()
    return sorted({*_own_names(), *_entry_points().names})


def has_pipeline(name: str) -> bool:
    """Return whether there is a pipeline of this name; import none."""
    return name in _own_names() or _entry_point(name) is not None


def find_pipeline(name: Pipeline | str) -> Pipeline:
    """Return the pipeline of this name; a pipeline is returned as it is.

    Raises: UnknownPipeline with the existing names; SettingsInvalid if its module holds no such `PIPELINE`.
    """
    if isinstance(name, Pipeline):
        return name
    if name in _own_names():
        place, found = f"jobs.pipelines.{name}", import_module(f"jobs.pipelines.{name}")
    elif point := _entry_point(name):
        place, found = point.value, point.load()
    else:
        raise unknown(name, pipeline_names())
    pipeline = getattr(found, "PIPELINE", found)
    if not isinstance(pipeline, Pipeline) or pipeline.name != name:
        raise SettingsInvalid(f"{place} must define PIPELINE = Pipeline({name!r}, ...).", pipeline=name)
    return pipeline


def unknown(name: str, known: Collection[str]) -> UnknownPipeline:
    """Return the error that there is no pipeline of this name, with the names of those that there are."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return UnknownPipeline(f"There is no pipeline {name}. {hint}Pipelines: {', '.join(known) or 'none'}.", pipeline=name)


def all_pipelines() -> list[Pipeline]:
    """Return every pipeline, in the order of their names."""
    return [find_pipeline(name) for name in pipeline_names()]


def _own_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(jobs.pipelines.__path__)]


def _entry_point(name: str) -> EntryPoint | None:
    """Return a package's entry point of this name, even if it was installed after the last search."""
    if name not in _entry_points().names:
        _entry_points.cache_clear()
    return next(iter(_entry_points().select(name=name)), None)


@cache
def _entry_points() -> EntryPoints:
    """Return the packages' entry points. The search is slow, so Airflow's tasks inherit it (`airflow_local_settings`)."""
    return entry_points(group=ENTRY_POINTS)
