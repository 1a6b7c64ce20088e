"""Find pipelines by name: modules of `tidegate.jobs.pipelines`, then entry points of the group ``tidegate.pipelines``.

A pipeline's module may also have queries, in a list `QUERIES`.
"""

import difflib
import importlib
import pkgutil
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, NamedTuple

import tidegate.jobs.pipelines
from tidegate.jobs.named_queries import Query
from tidegate.jobs.pipeline import Pipeline
from tidegate.state_store.base import process_exits, project
from tidegate.state_store.base.errors import SettingsInvalid, UnknownPipeline, UsageError, class_and_text
from tidegate.state_store.declarations.pipeline_spec import RebuildName, rebuild_named

ENTRY_POINTS = "tidegate.pipelines"
_loading = threading.RLock()  # what is changed meanwhile is the whole process's


def folder() -> str:
    """Return the folder of the pipelines' modules: the project's, or, in no project, one without any."""
    return str(tidegate.jobs.pipelines.__path__[-1])


def pipeline_names() -> list[str]:
    """Return the names of all pipelines in alphabetical order; import no pipeline."""
    _entry_points.cache_clear()
    return sorted({*_own_names(), *_entry_points().names})


def has_pipeline(name: str) -> bool:
    """Return whether there is a pipeline of this name, or that of its rebuild; import none."""
    if _is_declared(name):
        return True
    return (rebuild := named_rebuild(name)) is not None and has_pipeline(rebuild.pipeline)


def named_rebuild(name: str) -> RebuildName | None:
    """Return what a name rebuilds; None if it is no such name, or that of a declared pipeline. Import none."""
    rebuild = rebuild_named(name)  # first: the search for what is declared is slow, and is repeated for a name that is not
    return None if rebuild is None or _is_declared(name) else rebuild


def find_pipeline(name: Pipeline | str) -> Pipeline:
    """Return the pipeline of this name, or the rebuild of one; a pipeline is returned as it is.

    Raises: UnknownPipeline with the existing names, also for a rebuild of another version than the code's; SettingsInvalid if
    its module holds no such `PIPELINE`.
    """
    if isinstance(name, Pipeline):
        return name
    if name in _own_names():
        place = f"tidegate.jobs.pipelines.{name}"
        with _only_declaring(place):
            definition: Any = import_module(place)
    elif point := _entry_point(name):
        place = point.value
        with _only_declaring(place):
            definition = point.load()
    elif (rebuild := named_rebuild(name)) is not None and has_pipeline(rebuild.pipeline):
        return _rebuild(name, rebuild)
    else:
        raise unknown(name, pipeline_names())
    pipeline = getattr(definition, "PIPELINE", definition)
    if not isinstance(pipeline, Pipeline) or pipeline.name != name:
        raise SettingsInvalid(f"{place} must define PIPELINE = Pipeline({name!r}, ...).")
    return pipeline


def _rebuild(name: str, of: RebuildName) -> Pipeline:
    pipeline = find_pipeline(of.pipeline)
    if pipeline.version != of.version:
        raise UnknownPipeline(
            f"There is no pipeline {name}: it would rebuild {of.pipeline}, whose version is {pipeline.version} now."
        )
    return pipeline.rebuild()


def unknown(name: str, names: Collection[str]) -> UnknownPipeline:
    """Return the error that there is no pipeline of this name, with the names of those that there are."""
    return UnknownPipeline(f"There is no pipeline {name}. {choice(name, names)}")


def choice(name: str, names: Collection[str]) -> str:
    """Return which pipeline was probably meant, and all that there are; or what to do if there are none."""
    return _choice("Pipelines", name, names) if names else none_found()


def none_found() -> str:
    """Return a sentence that says that there are no pipelines, and what to do."""
    if project.own("pipelines") is not None:
        return f"There are no pipelines yet in {folder()}."
    return (
        f"There are no pipelines: {project.find() or Path.cwd()} is no project. Go into the folder of one, such as examples in "
        "Tidegate's repository, or make one: tidegate init FOLDER"
    )


class Declared(NamedTuple):
    """All pipelines in the order of their names, and a sentence for each of the others: why its module cannot be imported."""

    pipelines: list[Pipeline]
    broken: list[str]


def all_pipelines() -> Declared:
    """Import every pipeline; a module that fails disturbs no other."""
    declared = Declared([], [])
    for name in pipeline_names():
        try:
            declared.pipelines.append(find_pipeline(name))
        except Exception as error:  # noqa: BLE001 - an author's module may raise anything
            declared.broken.append(f"Pipeline {name} cannot be imported: {class_and_text(error)} ({_place_of(error, name)})")
    return declared


def _place_of(error: Exception, name: str) -> str:
    """Return file and line of the author's code that failed or does not parse; else where its module is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(folder())]
    others = [frame for frame in frames if not frame.filename.startswith(("<frozen ", importlib.__file__, __file__))]
    return next((f"{frame.filename}, line {frame.lineno}" for frame in reversed(own or others)), f"module {name} in {folder()}")


@contextmanager
def _only_declaring(place: str) -> Iterator[None]:
    """Import a module of an author's: what it prints goes to standard error, and it does not end this process.

    Raises: SettingsInvalid if it tries to; whatever else the module raises.
    """
    try:
        with _loading, process_exits.as_errors(), redirect_stdout(sys.stderr):
            yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        how = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else class_and_text(error)
        raise SettingsInvalid(
            f"{place} ends the process that imports it: {how}. Take that out: the module is to declare the pipeline, and "
            "nothing more."
        ) from error


class Queries(NamedTuple):
    """All queries by name, and, by pipeline, why its module, and so its queries, cannot be loaded."""

    known: dict[str, Query]
    broken: dict[str, str]

    def find(self, name: str) -> Query:
        """Return a query.

        Raises: UsageError with the existing names.
        """
        if name in self.known:
            return self.known[name]
        broken = "".join(f" Those of {pipeline} are not known: {reason}." for pipeline, reason in self.broken.items())
        raise UsageError(f"There is no query {name}. {_choice('Queries', name, self.known)}{broken}")


def all_queries() -> Queries:
    """Return the queries of all pipelines' modules, in the order of their names; a module that fails disturbs no other.

    Raises: SettingsInvalid if two queries have the same name.
    """
    by_name: dict[str, tuple[Query, str]] = {}
    broken: dict[str, str] = {}
    for pipeline in pipeline_names():
        try:
            place, queries = _queries_of(pipeline)
        except Exception as error:  # noqa: BLE001 - an author's module may raise anything
            broken[pipeline] = class_and_text(error).rstrip(".")
            continue
        for query in queries:
            other, where = by_name.setdefault(query.name, (query, place))
            if other is not query:
                raise SettingsInvalid(f"Query {query.name} is declared in {where} and in {place}. Rename one of them.")
    return Queries({name: by_name[name][0] for name in sorted(by_name)}, broken)


def _queries_of(pipeline: str) -> tuple[str, list[Query]]:
    """Return the place of a pipeline's module, and its queries."""
    point = None if pipeline in _own_names() else _entry_point(pipeline)
    place = f"tidegate.jobs.pipelines.{pipeline}" if point is None else point.module
    with _only_declaring(place):
        queries: Any = getattr(import_module(place), "QUERIES", ())
    if not isinstance(queries, list | tuple) or not all(isinstance(query, Query) for query in queries):
        raise SettingsInvalid(f"{place} must define QUERIES as a list of Query(...).")
    return place, list(queries)


def _choice(what: str, name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"Did you mean {close[0]}? " if close else ""
    return f"{hint}{what}: {', '.join(names) or 'none'}."


def _is_declared(name: str) -> bool:
    return name in _own_names() or _entry_point(name) is not None


def _own_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(tidegate.jobs.pipelines.__path__) if not module.name.startswith("_")]


def _entry_point(name: str) -> EntryPoint | None:
    """Return a package's entry point of this name, even if it was installed after the last search."""
    if name not in _entry_points().names:
        _entry_points.cache_clear()
    return next(iter(_entry_points().select(name=name)), None)


@cache
def _entry_points() -> EntryPoints:
    """Return the packages' entry points. The search is slow: Airflow's tasks inherit its result."""
    return entry_points(group=ENTRY_POINTS)
