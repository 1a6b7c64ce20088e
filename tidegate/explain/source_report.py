"""Reports on what pipelines' sources leave unread, for people and programs."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, TypeVar

from tidegate import output
from tidegate.explain import remedies
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.registry import find_pipeline
from tidegate.state_store.base.errors import SourceUnavailable, SourceUnreadable, UnknownPipeline, class_and_text, describe
from tidegate.state_store.base.settings import Settings

if TYPE_CHECKING:
    from tidegate.state_store import StateStore
    from tidegate.state_store.read_ledger.registered_pipelines import Lag

_T = TypeVar("_T")
SHOWN_NAMES = 20
# A mount that is gone may never answer, and a status is needed just then.
ANSWER_SECONDS = 10
SILENCE_SECONDS = 1


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

    That is, that the source has more, or an error. All are asked within ANSWER_SECONDS: one that is silent for SILENCE_SECONDS
    is left to its thread, and another thread goes on with the others. A source that has not answered in the end is named; a
    sentence under the empty name says that some have not been asked.
    """
    asked = _Asked(settings, iter(lags))
    silent = {lag.pipeline for lag in lags}
    deadline = time.monotonic() + ANSWER_SECONDS
    while silent and time.monotonic() < deadline:
        threading.Thread(target=asked.go_on, daemon=True).start()
        with suppress(Empty):
            while silent and time.monotonic() < deadline:
                ended = asked.ended.get(timeout=SILENCE_SECONDS)
                if isinstance(ended, BaseException):
                    raise ended
                silent.discard(ended)
    sentences, unread = dict(asked.sentences), dict(asked.unread)
    for name in sorted(silent & asked.begun):
        sentences[name] = f"{name}: its source has not answered within {ANSWER_SECONDS} s."
    if silent - asked.begun:
        sentences[""] = f"Not all sources could be asked within {ANSWER_SECONDS} s."
    return sentences, unread


def held_back(pipeline: Pipeline, settings: Settings) -> str | None:
    """Return a sentence on what the source holds back, because it may still change; None if it holds back nothing.

    Raises: SourceUnavailable if the source does not answer within ANSWER_SECONDS; what `Source.held_back` raises.
    """
    try:
        return _in_time(lambda: pipeline.source.held_back(settings))
    except TimeoutError:
        message = f"The source has not answered within {ANSWER_SECONDS} s."
        raise SourceUnavailable(message) from None


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


class _Asked:
    """Sources that are asked one after the other, by a thread or several."""

    def __init__(self, settings: Settings, lags: "Iterator[Lag]") -> None:
        self.sentences: dict[str, str] = {}
        self.unread: dict[str, str] = {}
        self.begun: set[str] = set()
        self.ended: Queue[str | BaseException] = Queue()  # the name of each pipeline whose source has answered, or an error
        self._settings, self._lags = settings, lags

    def go_on(self) -> None:
        """Ask those that no thread has begun to ask."""
        from tidegate.state_store import StateStore  # noqa: PLC0415

        try:
            with StateStore.connect(self._settings) as store:
                for lag in self._lags:
                    self.begun.add(lag.pipeline)
                    self._ask(lag, store)
                    self.ended.put(lag.pipeline)
        except BaseException as error:  # noqa: BLE001 - raised again where the answers are awaited
            self.ended.put(error)

    def _ask(self, lag: "Lag", store: "StateStore") -> None:
        name = lag.pipeline
        try:
            message = sentence(name, self._settings, is_new=not lag.opened)
        except Exception as error:  # noqa: BLE001 - an author's module may raise anything; the others are still asked
            self.sentences[name] = f"{name}: its source cannot be looked at: {class_and_text(error)}"
            return
        if message:
            self.sentences[name] = message
        if found := _unread(lag, store, self._settings):
            self.unread[name] = found


def _unread(lag: "Lag", store: "StateStore", settings: Settings) -> str | None:
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
