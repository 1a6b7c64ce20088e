"""Why pipelines and batches wait, in the page's shape; `tidegate.explain.why` finds it out."""

from collections.abc import Iterable
from dataclasses import asdict

from tidegate.explain import why
from tidegate.page.shared_models import Cause
from tidegate.state_store.base.errors import UnknownPipeline
from tidegate.state_store.read_ledger.ledger_reader import Moment


def root_causes(moment: Moment, pipelines: Iterable[str]) -> dict[str, Cause]:
    """Return for each pipeline why it waits in the end."""
    return {name: _cause(cause) for name, cause in why.root_causes(moment, pipelines).items()}


def causes(moment: Moment, pipeline: str, txid: int | None) -> list[Cause]:
    """Return why a pipeline, or one of its batches, waits: first the nearest cause.

    Raises: UnknownPipeline, without the names of the others, of which the user may not know; UnknownBatch.
    """
    return [_cause(cause) for cause in _explained(moment, pipeline, txid)]


def root_and_causes(moment: Moment, pipeline: str) -> tuple[Cause, list[Cause]]:
    """Return why a pipeline waits in the end, and the chain of `causes`.

    Raises: UnknownPipeline, as `causes`.
    """
    found = _explained(moment, pipeline, None)
    return _cause(why.root_of(found)), [_cause(cause) for cause in found]


def _explained(moment: Moment, pipeline: str, txid: int | None) -> tuple[why.Cause, ...]:
    try:
        return why.explain(moment, pipeline, txid).causes
    except UnknownPipeline:
        raise UnknownPipeline(f"There is no pipeline {pipeline}.", pipeline=pipeline) from None


def _cause(cause: why.Cause) -> Cause:
    return Cause.model_validate(asdict(cause))
