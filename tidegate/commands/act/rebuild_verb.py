"""The verb rebuild: it computes the committed batches of a pipeline again, for states that are declared otherwise now."""

import logging
from typing import TYPE_CHECKING

import click

from tidegate import output
from tidegate.commands import as_json, connected, log_json, pipeline_name, verbose, yes
from tidegate.commands.act import run_verbs
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store.declarations.pipeline_spec import PipelineSpec
    from tidegate.state_store.pipeline_changes.rebuilds import Progress


@click.command()
@pipeline_name
@yes
@verbose
@log_json
@as_json
def rebuild(pipeline: str, yes: bool, verbose: bool, log_json: bool, as_json: bool) -> None:
    """Compute a pipeline's committed batches again, into new states; `migrate` then puts these in the place of the others.

    For a change of states into which batches have committed. Readers keep the present states until then. Safe to repeat: it
    goes on where it stood, also with what the pipeline has committed meanwhile.
    """
    output.show_log(logging.INFO if verbose or log_json else logging.ERROR, as_json=log_json)
    settings, declared = Settings.load(), find_pipeline(pipeline)
    spec = declared.spec
    progress = _begin(settings, spec, is_confirmed=yes)
    if not yes:
        raise UsageError(f"{_outlook(spec, progress)} Add --yes to do it.")
    while progress.rebuilt < progress.committed:
        run_verbs.run_here(progress.rebuild, {}, quiet=as_json)
        progress = _begin(settings, spec, is_confirmed=True)
    with connected() as store:
        while store.drop_old_staging(declared.rebuild().spec):
            pass
    message = (
        f"{progress.rebuild} has committed all {_batches(progress.committed)} of {pipeline}. If a migration of the changed "
        f'states is missing, write it: tidegate migrate --new "..."; then let them take their place: tidegate migrate'
    )
    output.report(message, {"pipeline": pipeline, **progress._asdict()}, as_json)


def _begin(settings: Settings, spec: "PipelineSpec", *, is_confirmed: bool) -> "Progress":
    from tidegate.state_store import StateStore  # noqa: PLC0415 - loads SQLAlchemy, which other verbs do without

    with StateStore(settings, user=settings.pg_owner) as store:
        return store.begin_rebuild(spec, is_confirmed=is_confirmed)


def _outlook(spec: "PipelineSpec", progress: "Progress") -> str:
    left = progress.committed - progress.rebuilt
    return (
        f"{_batches(left)} of {spec.name} would be computed again for version {spec.version}, as pipeline {progress.rebuild}. "
        "Until you run tidegate migrate, readers keep the present states, and the changed code adds no batches to them."
    )


def _batches(count: int) -> str:
    return output.counted(count, "batch", "batches")
