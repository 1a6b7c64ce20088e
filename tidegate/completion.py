"""What a shell completes: names that are found without loading what a verb needs to run."""

import contextlib
import io
from collections.abc import Iterable

import click


def pipelines(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the pipelines' names; no pipeline is imported, so a broken one disturbs no other."""
    del context, parameter
    from tidegate.jobs.registry import pipeline_names  # noqa: PLC0415 - verbs without a pipeline do without

    return _starting(incomplete, pipeline_names())


def states(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the states of the pipeline that was named before; none if it cannot be imported."""
    del parameter
    from tidegate.jobs.registry import find_pipeline  # noqa: PLC0415

    # click leaves arguments aside where an option lacks its value, which is just being completed.
    pipeline = context.params.get("pipeline") or next(iter(context.args), "")
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what an author's module prints is not for the shell
            return _starting(incomplete, find_pipeline(pipeline).states)
    except Exception:  # noqa: BLE001 - an author's module may raise anything; the verb itself will tell
        return []


def queries(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the queries whose modules can be imported."""
    del parameter
    from tidegate.jobs.registry import all_queries  # noqa: PLC0415

    if context.params.get("name") or context.args:
        return []
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what an author's module prints is not for the shell
            return _starting(incomplete, all_queries().known)
    except Exception:  # noqa: BLE001 - the verb itself will tell
        return []


def error_codes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the codes that have a page."""
    del context, parameter
    from tidegate.explain import error_pages  # noqa: PLC0415

    return _starting(incomplete.upper(), error_pages.codes())


def verbs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the words of the verbs that have a schema."""
    from tidegate import json_schemas  # noqa: PLC0415

    before = [*(context.params.get(parameter.name or "") or ())]
    words = [verb.split() for verb in json_schemas.verbs()]
    following = {verb[len(before)] for verb in words if verb[: len(before)] == before and len(verb) > len(before)}
    return _starting(incomplete, sorted(following))


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
