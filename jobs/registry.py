"""Find pipelines by name: modules of `jobs.pipelines`, then entry points of the group ``tidegate.pipelines``."""

import difflib
import pkgutil
from importlib import import_module
from importlib.metadata import entry_points

import jobs.pipelines
from jobs.pipeline import Pipeline
from state_store.errors import SettingsInvalid, UnknownPipeline

ENTRY_POINTS = "tidegate.pipelines"


def pipeline_names() -> list[str]:
    """Return all names in alphabetical order; imports no pipeline."""
    return sorted({*_own_names(), *entry_points(group=ENTRY_POINTS).names})


def find_pipeline(name: Pipeline | str) -> Pipeline:
    """Return the pipeline of this name; a pipeline is returned as it is.

    Raises: UnknownPipeline with the names there are; SettingsInvalid if its module holds no such `PIPELINE`.
    """
    if isinstance(name, Pipeline):
        return name
    # Packages are searched only for names that are not our own: reading all entry points costs a tenth of a second.
    if name in _own_names():
        place, found = f"jobs.pipelines.{name}", import_module(f"jobs.pipelines.{name}")
    else:
        points = entry_points(group=ENTRY_POINTS, name=name)
        if not points:
            known = pipeline_names()
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise UnknownPipeline(f"There is no pipeline {name}. {hint}Pipelines: {', '.join(known) or 'none'}.", pipeline=name)
        point = next(iter(points))
        place, found = point.value, point.load()
    pipeline = getattr(found, "PIPELINE", found)
    if not isinstance(pipeline, Pipeline) or pipeline.name != name:
        raise SettingsInvalid(f"{place} must define PIPELINE = Pipeline({name!r}, ...).", pipeline=name)
    return pipeline


def all_pipelines() -> list[Pipeline]:
    """Return every pipeline, in the order of their names."""
    return [find_pipeline(name) for name in pipeline_names()]


def _own_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(jobs.pipelines.__path__)]
