"""What to do about each error, in one sentence with one command; `docs/errors` has the whole story of each."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from state_store import errors
from state_store.errors import TidegateError

Verb = Literal["retry", "skip", "pause", "resume", "replay", "trigger"]
_CODE = re.compile(r"\b[A-Z]+(?:_[A-Z]+)*(?=:)")


@dataclass(frozen=True)
class Action:
    """A button that helps: the operator's verb, and the txid that it concerns."""

    verb: Verb
    txid: int | None


class Remedy(NamedTuple):
    """What to do about an error, and the command to copy."""

    advice: str
    command: str | None


_RETRY = "tidegate retry {pipeline} {txid}"
_TRIGGER = "tidegate trigger {pipeline} --wait"
_UNKNOWN = Remedy("Read the whole error, fix its cause, and let the batch be tried again.", _RETRY)
_REMEDIES = {
    "MALFORMED_RECORD": Remedy("Correct the file or the pipeline's schema, then retry; or give the batch up.", _RETRY),
    "TRANSFORM_FAILED": Remedy("Correct the transform or the records, then retry; or give the batch up.", _RETRY),
    "BAD_KEY": Remedy("Correct the key, in the records or by the transform, then retry; or give the batch up.", _RETRY),
    "OVERFLOW": Remedy("Correct the value, or declare a wider type in a new state, then retry.", _RETRY),
    "SOURCE_CHANGED": Remedy("Put the source back as it was planned, then retry.", _RETRY),
    "SOURCE_UNREADABLE": Remedy("Make the source readable as it is declared, then retry.", _RETRY),
    "RANGE_EXPIRED": Remedy(
        "The rows are gone at the source: lengthen its retention, and give the batch up.",
        "tidegate skip {pipeline} {txid} --reason ...",
    ),
    "SOURCE_UNAVAILABLE": Remedy("Bring the source back: its server, its mount, its network.", _TRIGGER),
    "PARTITION_UNAVAILABLE": Remedy("Bring the partition back.", _TRIGGER),
    "STORE_UNAVAILABLE": Remedy("Start Postgres, or wait until it answers.", "tidegate up"),
    "SPARK_UNAVAILABLE": Remedy("Start Spark, or wait until it answers.", "tidegate up"),
    "AIRFLOW_UNAVAILABLE": Remedy("Start Airflow, or wait until it answers.", "tidegate up"),
    "SPARK_FAILED": Remedy("Read Spark's error in the batch's history.", "tidegate inspect {pipeline} --txid {txid}"),
    "DECLARATION_CHANGED": Remedy("Register the declaration, or take the change back.", "tidegate migrate"),
    "DECLARATION_INVALID": Remedy("Correct the pipeline's transform or states, then retry.", _RETRY),
    "SCHEMA_OUT_OF_DATE": Remedy("Bring the database to this code's revision.", "tidegate migrate"),
    "METADATA_CORRUPT": Remedy("Restore the batch's row from a backup, then retry.", _RETRY),
    "GUARD_MISMATCH": Remedy("Find the program that wrote the state table, and undo that, then retry.", _RETRY),
    "HOLE_DETECTED": Remedy(
        "Check which commits are lost and what has read them, before anything goes on.", "tidegate error HOLE_DETECTED"
    ),
    "ACCESS_REFUSED": Remedy("Correct the user, the password or the database in the settings.", "tidegate settings"),
    "SETTINGS_INVALID": Remedy("Correct the setting.", "tidegate settings"),
    "PIPELINE_PAUSED": Remedy("When the reason is gone, let runs start again.", "tidegate resume {pipeline} --reason ..."),
}


def of(code: str | None, pipeline: str | None = None, txid: int | None = None) -> Remedy:
    """Return what to do about an error of this code; without a code, what to do about an unknown one."""
    advice, command = _REMEDIES.get(code or "", _UNKNOWN)
    needed = {"pipeline": None if pipeline is None else quoted(pipeline), "txid": txid}
    if command is not None and any(value is None and f"{{{name}}}" in command for name, value in needed.items()):
        command = None
    return Remedy(advice, command and command.format(**needed))


def quoted(name: str) -> str:
    """Return a name as one word of a shell's command."""
    return shlex.quote(name)


def code_of(story: str) -> str | None:
    """Return the code at the beginning of an error's story in the ledger; None if it is not one of ours."""
    code = story.partition(":")[0]
    return code if code in _codes() else None


def code_in(story: str) -> str | None:
    """Return the first code of ours anywhere in a story, such as that of a batch that was given up."""
    return next((code for code in _CODE.findall(story) if code in _codes()), None)


@cache
def _codes() -> frozenset[str]:
    """Return the codes that the ledger may hold: those of `state_store.errors`."""
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TidegateError)]
    return frozenset(kind("").code for kind in kinds)
