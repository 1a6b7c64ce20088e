"""The verbs that explain: why, explain, error."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from tidegate import completion, output
from tidegate.commands import AT_LEAST_ONE, as_json, connected, pipeline_name
from tidegate.explain import airflow_report, error_pages
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import AccessRefused, SchemaOutOfDate, StoreUnavailable, TidegateError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.explain.why import Cause, Why
    from tidegate.state_store import StateStore


@click.command()
@pipeline_name
@click.argument("txid", type=AT_LEAST_ONE, required=False, help="Why this txid has not committed [default: the next one].")
@as_json
def why(pipeline: str, txid: int | None, as_json: bool) -> None:
    """Explain what a pipeline, or one txid, waits for: the nearest cause first, and what to do about each."""
    found = _explain(pipeline, txid)
    if as_json:
        output.print_json(asdict(found))
    else:
        output.write(*_lines(pipeline if txid is None else f"{pipeline} {txid}", found))


@click.command()
@pipeline_name
@as_json
def explain(pipeline: str, as_json: bool) -> None:
    """Show which way batches of a pipeline take: Spark's tasks, what is hashed and followed, how they are committed."""
    from tidegate.jobs.compute.shortcuts import paths  # noqa: PLC0415 - loads pyspark

    declared = find_pipeline(pipeline)
    found, spec = paths(declared), declared.spec
    if as_json:
        alone = {"commits_alone": spec.commits_alone, "why_alone": spec.why_alone, "window": spec.window}
        output.print_json({"pipeline": pipeline, "paths": [asdict(path) for path in found], **alone})
        return
    rows = [
        [
            path.batch,
            f"{path.tasks} task{'s' if path.tasks == 'many' else ''}",
            path.reads,
            {"all": "all columns", "used": "columns of states", "none": "nothing"}[path.hashed],
            path.follows,
            ", ".join(path.in_process) or "Spark's tasks",
        ]
        for path in found
    ]
    output.print_table(f"Batches of {pipeline}", ["batch", "read by", "times", "hashed", "followed", "staged in process"], rows)
    if spec.commits_alone:
        output.say(f"Batches are committed one at a time: {'; '.join(spec.why_alone)}.")
    else:
        output.say("Batches that are ready are committed together.")


def _explain(pipeline: str, txid: int | None) -> "Why":
    from tidegate.explain import why as causes  # noqa: PLC0415 - `error` does without

    try:
        with connected() as store:
            found = causes.explain(store, pipeline, txid, ask_source=store)
            return causes.Why((*found.causes, *_of_airflow(pipeline, store, found.causes)))
    except (StoreUnavailable, AccessRefused, SchemaOutOfDate) as error:
        return causes.Why((causes.of_error(error),))


def _of_airflow(pipeline: str, store: "StateStore", found: "Sequence[Cause]") -> "list[Cause]":
    """Return what Airflow adds to causes under which no process is at work on the pipeline."""
    root = next((cause.code for cause in reversed(found) if not cause.is_beside), None)
    if not store.settings.has_airflow or root not in airflow_report.ASKED_AFTER:
        return []
    return airflow_report.causes(store.settings, pipeline, store.waits({pipeline: None})[pipeline].row.planned_at)


def _lines(title: str, found: "Why") -> Iterator[str]:
    yield f"{title}:"
    for position, cause in enumerate(found.causes):
        link = "" if not position else "Besides: " if cause.is_beside else "Because: "
        yield ""
        yield f"  {link}{cause.sentence}{_since(cause)}"
        if cause.advice:
            yield f"    What to do: {cause.advice}"
        if cause.command:
            yield f"    $ {cause.command}"
        if cause.error and cause.command != f"tidegate error {cause.error}" and error_pages.has_page(cause.error):
            yield f"    More: tidegate error {cause.error}"


def _since(cause: "Cause") -> str:
    if cause.since is None:
        return ""
    since = datetime.fromisoformat(cause.since).astimezone(UTC)
    return f" Since {since:%Y-%m-%d %H:%M:%S} UTC."


@click.command()
@click.argument(
    "code",
    required=False,
    shell_complete=completion.error_codes,
    help="The error's code, as messages and the ledger show it [default: list all].",
)
@as_json
def error(code: str | None, as_json: bool) -> None:
    """Explain an error: how it comes about, what the ledger did, and what to do, step by step."""
    if code is not None:
        page = error_pages.markdown(code)
        if as_json:
            output.print_json({"page": page})
        else:
            output.write(error_pages.plain(code, _known_settings()).rstrip("\n"))
        return
    summaries = {known: error_pages.summary(known) for known in error_pages.codes()}
    if as_json:
        output.print_json(summaries)
    else:
        output.print_table("Errors", ["code", "what it means"], [list(row) for row in summaries.items()])


def _known_settings() -> Settings | None:
    try:
        return Settings.load()
    except TidegateError:  # settings that cannot be used have a page too
        return None
