"""Why pipelines and batches wait, in the page's shape; `tidegate.why` finds it out."""

from collections.abc import Iterable
from dataclasses import asdict

from state_store.reader import Moment
from tidegate import why
from tidegate.page.models import Cause


def root_causes(moment: Moment, pipelines: Iterable[str]) -> dict[str, Cause]:
    """Return for each pipeline why it waits in the end."""
    return {name: _cause(cause) for name, cause in why.root_causes(moment, pipelines).items()}


def causes(moment: Moment, pipeline: str, txid: int | None) -> list[Cause]:
    """Return why a pipeline, or one of its batches, waits: first the nearest cause.

    Raises: UnknownPipeline, UnknownBatch.
    """
    return [_cause(cause) for cause in why.explain(moment, pipeline, txid).causes]


def _cause(cause: why.Cause) -> Cause:
    return Cause.model_validate(asdict(cause))
