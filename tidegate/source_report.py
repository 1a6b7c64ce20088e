"""What lies at a pipeline's source and is not read, for people and programs."""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobs.pipeline import Pipeline
from jobs.registry import find_pipeline
from state_store.errors import SourceUnavailable, SourceUnreadable, UnknownPipeline
from state_store.settings import Settings
from tidegate import output

if TYPE_CHECKING:
    from state_store.history import Lag

SHOWN_NAMES = 20
# A mount that is gone may never answer, and that is just when people ask for the status.
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
    """Return in a line what a pipeline's source leaves alone, or why that cannot be told; None if there is nothing to tell.

    Of a pipeline that `is_new` a source that is empty, or not there yet, is no news.
    """
    try:
        found = find_pipeline(name).source.left_alone(settings)
    except UnknownPipeline:
        return None  # its code is elsewhere
    except (SourceUnavailable, SourceUnreadable) as error:
        return None if is_new else f"{name}: {error}"
    if found and found.count:
        return f"{name}: {found.sentence()} All of them: tidegate inspect {name} --source"
    told = found.sentence() if found and not is_new else None
    return told and f"{name}: {told}"


def of_all(lags: "list[Lag]", settings: Settings) -> dict[str, str]:
    """Return what `sentence` says of each pipeline, by its name; what has not answered after a while is left out, and said."""
    told: dict[str, str] = {}
    asking = threading.Thread(target=_ask_all, args=(lags, settings, told), daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if asking.is_alive():
        return {**told, "": f"Not all sources have told within {ANSWER_SECONDS} s what they leave alone."}
    return told


def _ask_all(lags: "list[Lag]", settings: Settings, told: dict[str, str]) -> None:
    for lag in lags:
        try:
            said = sentence(lag.pipeline, settings, is_new=not lag.opened)
        except Exception as error:  # noqa: BLE001 - a module is its author's; how the other pipelines are is asked all the same
            said = f"{lag.pipeline}: its source cannot be looked at: {type(error).__name__}: {error}"
        if said:
            told[lag.pipeline] = said
