"""Reports on what pipelines' sources leave unread, for people and programs."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate import output
from tidegate.explain import remedies
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import SourceUnavailable, SourceUnreadable, UnknownPipeline, class_and_text, describe
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.read_ledger.pipeline_overview import Lag

_T = TypeVar("_T")
SHOWN_NAMES = 20
# A mount that is gone may never answer, and a status is needed just then.
ANSWER_SECONDS = 10


def show(pipeline: Pipeline, settings: Settings, limit: int | None, as_json: bool) -> None:
    """Print each name that the source leaves alone, with the reason.

    Raises: SourceUnavailable, SourceUnreadable.
    """
    found = pipeline.source.left_alone(settings)
    if as_json:
        names: Mapping[str, Any] = found.names if found else {}
        place, pattern, read = (found.place, found.pattern, found.read) if found else (None, None, None)
        output.print_json({"place": place, "pattern": pattern, "read": read, "left_alone": names})
        return
    if found is None:
        output.say(f"The source of {pipeline.name} leaves nothing alone: it has no names to choose from.")
        return
    rows = sorted((name, f"it {why}") for why, names in found.names.items() for name in names)
    shown = limit or SHOWN_NAMES
    output.print_table(f"Left alone in {found.place}", ["name", "why"], rows[:shown])
    output.say(f"{found.read} name(s) match {found.pattern}, {found.count} are left alone.")
    if len(rows) > shown:
        output.say("There are more names: --limit N shows more, --json all of them.")


def sentence(name: str, settings: Settings, *, is_new: bool = False) -> str | None:
    """Return a line on what a pipeline's source leaves alone, or why that is unknown; None if there is nothing to report.

    If the pipeline `is_new`, a source that is empty or missing is not reported.
    """
    try:
        found = find_pipeline(name).source.left_alone(settings)
    except UnknownPipeline:
        return None  # its code is not in this checkout
    except (SourceUnavailable, SourceUnreadable) as error:
        return None if is_new else f"{name}: {error}"
    if found and found.count:
        return f"{name}: {found.sentence()} All of them: tidegate inspect {name} --source"
    message = found.sentence() if found and not is_new else None
    return message and f"{name}: {message}"


def of_all(lags: "list[Lag]", settings: Settings) -> tuple[dict[str, str], dict[str, str]]:
    """Return, by pipeline, the `sentence` of each that has one; and what a run would find if all batches have committed.

    That is, that the source has more, or an error. Sources that do not answer within ANSWER_SECONDS are left out; a sentence
    under the empty name says so.
    """
    sentences: dict[str, str] = {}
    unread: dict[str, str] = {}
    try:
        _in_time(lambda: _ask_all(lags, settings, sentences, unread))
    except TimeoutError:
        sentences = {**sentences, "": f"Not all sources have answered within {ANSWER_SECONDS} s."}
    return sentences, {**unread}


def held_back(pipeline: Pipeline, settings: Settings) -> str | None:
    """Return a sentence on what the source holds back, because it may still change; None if it holds back nothing.

    Raises: SourceUnavailable if the source does not answer within ANSWER_SECONDS; what `Source.held_back` raises.
    """
    try:
        return _in_time(lambda: pipeline.source.held_back(settings))
    except TimeoutError:
        message = f"The source has not answered within {ANSWER_SECONDS} s."
        raise SourceUnavailable(message, pipeline=pipeline.name) from None


def has_more(pipeline: Pipeline, store: "StateStore") -> bool:
    """Return whether a run would plan a batch; False if a plan takes longer than ANSWER_SECONDS. Opens none.

    Raises: the source's errors.
    """
    with suppress(TimeoutError):
        return _in_time(lambda: _would_plan(pipeline, store))
    return False


def _would_plan(pipeline: Pipeline, store: "StateStore") -> bool:
    from tidegate.jobs.engine.planning import next_batch  # noqa: PLC0415 - loads SQLAlchemy

    return next_batch(store, pipeline) is not None


def _ask_all(lags: "list[Lag]", settings: Settings, sentences: dict[str, str], unread: dict[str, str]) -> None:
    from tidegate.jobs.sources.files.folder_listing import listed_once  # noqa: PLC0415
    from tidegate.state_store import StateStore  # noqa: PLC0415

    with StateStore.connect(settings) as store:
        for lag in lags:
            name = lag.pipeline
            with listed_once():
                try:
                    message = sentence(name, settings, is_new=not lag.opened)
                except Exception as error:  # noqa: BLE001 - an author's module may raise anything; the others are still asked
                    sentences[name] = f"{name}: its source cannot be looked at: {class_and_text(error)}"
                    continue
                if message:
                    sentences[name] = message
                if found := _unread(lag, store, settings):
                    unread[name] = found


def _unread(lag: "Lag", store: "StateStore", settings: Settings) -> str | None:
    """Return what a run of a pipeline would find if all its batches have committed: more data, or an error."""
    name = lag.pipeline
    if lag.pending or lag.paused_at or lag.plan_error:
        return None
    try:
        has_more = _would_plan(find_pipeline(name), store)
    except (UnknownPipeline, SourceUnavailable, SourceUnreadable):
        return None  # its code is not in this checkout; or its sentence says so
    except Exception as error:  # noqa: BLE001 - an author's source may raise anything; the others are still asked
        return f"{name}: a run would fail now: {describe(error)}"
    return f"{name}: its source has data that no batch has taken. {remedies.run_of(name, settings)}" if has_more else None


def _in_time(ask: Callable[[], _T]) -> _T:
    """Return an answer.

    Raises: TimeoutError after ANSWER_SECONDS; what `ask` raises.
    """
    asked = Future[_T]()

    def answer() -> None:
        try:
            asked.set_result(ask())
        except BaseException as error:  # noqa: BLE001 - raised again where the answer is awaited
            asked.set_exception(error)

    threading.Thread(target=answer, daemon=True).start()
    return asked.result(ANSWER_SECONDS)
