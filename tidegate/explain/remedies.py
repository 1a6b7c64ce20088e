"""What to do about each error, in one sentence; `docs/errors` tells the whole story of each."""

import re
import shlex
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal

from tidegate.jobs.registry import named_rebuild
from tidegate.state_store.base import errors
from tidegate.state_store.base.errors import TidegateError, skip_command
from tidegate.state_store.base.settings import Settings

Verb = Literal["retry", "skip", "pause", "resume", "replay", "trigger"]
_CODE = re.compile(r"\b[A-Z]+(?:_[A-Z]+)*(?=:)")
# Ends the advice to change code that is compared with what is registered.
_REGISTERED = ", raise the pipeline's version and register it (tidegate migrate)"
_FIXES = {
    "ACCESS_REFUSED": "Correct the user, the password or the grant (tidegate settings).",
    "ATTEMPT_TIMED_OUT": "Find out why it takes so long, or allow more time (message_timeout_seconds).",
    "BAD_KEY": f"Correct the key by the transform{_REGISTERED}; or declare null_keys=True and rebuild.",
    "CHECK_FAILED": f"Correct the check, which needs no registration, or the transform{_REGISTERED}.",
    "DECLARATION_CHANGED": "Register the declaration (tidegate migrate), after a rebuild if that asks for one, or undo it.",
    "DECLARATION_INVALID": f"Correct the transform or the states{_REGISTERED}.",
    "EXECUTORS_UNPREPARED": "Install what is missing on Spark's executors.",
    "GUARD_MISMATCH": "Do what the error says; rows that another program wrote have to be put back as they were.",
    "HOLE_DETECTED": "Do what the error says; before, check which commits are lost, and what depends on them.",
    "LISTENER_NOT_TRUSTED": "End the other account's process, or name the account in TIDEGATE_TRUSTED_USERS.",
    "LOCK_HELD": "Wait until the session that the error names has ended, or end it (tidegate error LOCK_HELD).",
    "MALFORMED_RECORD": f"Correct the schema{_REGISTERED}.",
    "METADATA_CORRUPT": "Restore the batch's row of the ledger from a backup.",
    "OVERFLOW": f"Correct the value by the transform{_REGISTERED}.",
    "PERMANENT_ERROR": "Do what the error says.",
    "PIPELINE_RETIRED": "Take its file and its Dag away, or let it go on where it stood (tidegate reinstate).",
    "PARTITION_UNAVAILABLE": "Bring the partition back.",
    "RANGE_EXPIRED": "Its rows are gone at the source: lengthen the retention, and give the batch up.",
    "ROWS_LOST": "If it comes back, look for what makes the transform return other rows each time.",
    "SCHEMA_OUT_OF_DATE": "Run tidegate migrate, update what is older, or make anew a ledger that other code has made.",
    "SETTINGS_INVALID": "Correct the setting (tidegate settings).",
    "SOURCE_CHANGED": "Put the source back as it was planned.",
    "SOURCE_UNAVAILABLE": "Bring the source back: its server, its mount, its network.",
    "SOURCE_UNREADABLE": "Make the source readable, as it is declared.",
    "SPARK_FAILED": "Read Spark's error and its log (tidegate status names it).",
    "SPARK_UNAVAILABLE": "Start Spark (tidegate up), or wait until it answers.",
    "STORE_UNAVAILABLE": "Start Postgres (tidegate up), or wait until it answers.",
    "TRANSFORM_FAILED": f"Correct the transform{_REGISTERED}.",
}
_UNKNOWN_OF_PLAN = "Read the whole error (tidegate status --json) and fix its cause."
# Of plans, which have no batch that could be given up.
_FIXES_OF_PLANS = {
    "MALFORMED_RECORD": "Correct the rows at the source, or the pipeline's declaration.",
    "RANGE_EXPIRED": "Put back what is gone at the source, or declare where to go on (tidegate error RANGE_EXPIRED).",
    "SOURCE_CHANGED": "Put the source back as it was, or declare what it is now (tidegate error SOURCE_CHANGED).",
}
# The command that begins the way out, where that is not to try the batch again.
_COMMANDS = {
    "ACCESS_REFUSED": "tidegate settings",
    "DECLARATION_CHANGED": "tidegate migrate",
    "HOLE_DETECTED": "tidegate error HOLE_DETECTED",
    "SCHEMA_OUT_OF_DATE": "tidegate migrate",
    "SETTINGS_INVALID": "tidegate settings",
    "STORE_UNAVAILABLE": "tidegate up",
}
# Errors after which only a person's decision to leave the batch out helps.
ENDS_IN_SKIP = ("RANGE_EXPIRED",)
# Errors of content and sources that need not be put right for the order to go on.
_MAY_SKIP = ("BAD_KEY", "CHECK_FAILED", "MALFORMED_RECORD", "OVERFLOW", "SOURCE_CHANGED", "TRANSFORM_FAILED")


def fix_of(code: str | None) -> str:
    """Return what to do about an error of this code, as a sentence; for an unknown error, None, how to find out."""
    return _FIXES.get(code or "", "Read the whole error and fix its cause.")


def fix_of_batch(code: str | None, pipeline: str, txid: int, *, then: str = "", may_skip: bool = True) -> str:
    """Return what to do about an error of a batch, as a sentence: correct its cause and do what comes `then`.

    Or, where that is a way out and the batch `may_skip`, give it up. A rebuild takes corrected code as it is: it is of one
    version, which counts once it has been registered.
    """
    unknown = f"Read the whole error ({command('inspect', pipeline, '--txid', txid)}) and fix its cause."
    fix = _FIXES.get(code or "", unknown)
    if named_rebuild(pipeline) is not None:
        fix = fix.replace(_REGISTERED, "")
    or_skip = f"; or give the batch up ({skip_command(pipeline, txid)})" if may_skip and code in _MAY_SKIP else ""
    return f"{fix.removesuffix('.')}{then}{or_skip}."


def fix_of_plan(code: str | None) -> str:
    """Return what to do about an error of this code that made a plan fail, as a sentence."""
    return _FIXES_OF_PLANS.get(code or "") or _FIXES.get(code or "", _UNKNOWN_OF_PLAN)


def command_of(code: str) -> str:
    """Return the command that begins the way out of an error that concerns no single batch."""
    return _COMMANDS.get(code, f"tidegate error {code}")


def command(*words: object) -> str:
    """Return a command line of `tidegate` to copy; `...` stands for what the reader fills in."""
    return " ".join(["tidegate", *(word if word == "..." else shlex.quote(str(word)) for word in map(str, words))])


def run_of(pipeline: str, settings: Settings | None, parameters: Mapping[str, int] = MappingProxyType({})) -> str:
    """Return the command that starts a run: in Airflow or, if the settings have none, in the process of the command.

    Without settings, a page in Airflow asks. A rebuild has no Dag, and no parameters.
    """
    given = [word for name, value in parameters.items() for word in (f"--{name.replace('_', '-')}", value)]
    if (rebuild := named_rebuild(pipeline)) is not None:
        return command("rebuild", rebuild.pipeline, "--yes")
    through_airflow = settings is None or settings.has_airflow
    return command("trigger", pipeline, *given, "--wait") if through_airflow else command("run", pipeline, *given)


def code_of(story: str | None) -> str | None:
    """Return the code at the beginning of an error's story in the ledger; None if it is not one of ours."""
    code = (story or "").partition(":")[0]
    return code if code in codes() else None


def code_in(story: str | None) -> str | None:
    """Return the first code of ours anywhere in a story, such as that of a batch that was given up."""
    return next((code for code in _CODE.findall(story or "") if code in codes()), None)


@cache
def codes() -> tuple[str, ...]:
    """Return the codes that the ledger may hold, in alphabetical order: those of `tidegate.state_store.base.errors`."""
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TidegateError)]
    return tuple(sorted(kind("").code for kind in kinds))
