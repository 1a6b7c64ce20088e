"""What a shell completes: names that are found without loading what a verb needs to run."""

import contextlib
import io
from collections.abc import Callable, Iterable

import click


def pipelines(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the pipelines' names; no pipeline is imported, so a broken one disturbs no other."""
    del context, parameter
    from tidegate.jobs.registry import pipeline_names  # noqa: PLC0415 - verbs without a pipeline do without

    return _starting(incomplete, pipeline_names())


def states(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the states that can be read of the pipeline that was named before; none if it cannot be imported."""
    del parameter
    from tidegate.jobs.registry import find_pipeline  # noqa: PLC0415

    # click leaves arguments aside where an option lacks its value, which is just being completed.
    pipeline = context.params.get("pipeline") or next(iter(context.args), "")
    needs_changes = context.info_name == "changes"

    def names() -> list[str]:
        return [s.name for s in find_pipeline(pipeline).spec.readable if s.stream or not needs_changes]

    return _starting(incomplete, _of_authors(names))


def queries(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the queries whose modules can be imported."""
    del parameter
    from tidegate.jobs.registry import all_queries  # noqa: PLC0415

    is_named = context.params.get("name") or context.args
    return [] if is_named else _starting(incomplete, _of_authors(lambda: all_queries().known))


def error_codes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the codes that have a page."""
    del context, parameter
    from tidegate.explain import error_pages  # noqa: PLC0415

    return _starting(incomplete.upper(), error_pages.codes())


def _of_authors(names: Callable[[], Iterable[str]]) -> Iterable[str]:
    """Return names that authors' modules declare; none if these raise, which the verb itself will report."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Exception):  # what they print is not for the shell
        return names()
    return []


def _starting(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
