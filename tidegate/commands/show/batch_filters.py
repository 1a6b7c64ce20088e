"""The conditions by which `inspect` finds batches: phase, error, time and txid."""

import difflib
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from tidegate import completion
from tidegate.commands import AT_LEAST_ONE
from tidegate.explain.remedies import codes
from tidegate.state_store.base.errors import UsageError
from tidegate.state_store.read_ledger.batch_phases import PHASES

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AGO = re.compile(r"(\d{1,6})\s*([smhdw])")
EXAMPLES = "Write a duration until now, such as 90m, 2h or 3d, or a time such as 2026-11-25 or 2026-11-25T10:30Z (UTC)."


class Moment(click.ParamType[datetime]):
    """A time: ISO 8601, in UTC unless it names a zone, or a duration until now."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the time; fail with a usage error that shows how times are written."""
        try:
            if ago := _AGO.fullmatch(value.strip()):
                return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * _SECONDS[ago[2]])
            found = datetime.fromisoformat(value.strip())
            return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no time. {EXAMPLES}", param, ctx)


class ErrorCode(click.ParamType[str]):
    """An error of a batch: one of Tidegate's codes, or the name of an exception."""

    name = "code"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the code as the ledger has it; fail with a usage error if it looks like a code and is none."""
        text = str(value).strip()
        if text.upper() in codes():
            return text.upper()
        if not re.fullmatch(r"(?=.*[a-z])[A-Za-z_][\w.]*", text):
            close = difflib.get_close_matches(text.upper(), codes(), n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            self.fail(f"{text!r} is no error code.{hint} Codes: {', '.join(codes())}; or the name of an exception.", param, ctx)
        return text


phase = click.option("--phase", type=click.Choice(PHASES), help="Only batches in this phase.")
error = click.option(
    "--error",
    metavar="CODE",
    type=ErrorCode(),
    shell_complete=completion.error_codes,
    help="Only batches whose newest attempt ended with it.",
)
since = click.option(
    "--since", metavar="TIME", type=Moment(), help="Only batches with an event since then: 2h, 3d, 2026-11-25."
)
until = click.option("--until", metavar="TIME", type=Moment(), help="Only batches without an event after that.")
from_txid = click.option("--from-txid", metavar="TXID", type=AT_LEAST_ONE, help="Only this txid and later ones.")
to_txid = click.option("--to-txid", metavar="TXID", type=AT_LEAST_ONE, help="Only this txid and earlier ones.")


def check(
    *, since: datetime | None, until: datetime | None, from_txid: int | None, to_txid: int | None, **_others: str | None
) -> None:
    """Refuse conditions that no batch can fulfil.

    Raises: UsageError.
    """
    if since is not None and since > datetime.now(UTC):
        raise UsageError(f"--since {since:%Y-%m-%d %H:%M} UTC lies in the future. {EXAMPLES}")
    if since is not None and until is not None and since > until:
        raise UsageError(f"--since ({since:%Y-%m-%d %H:%M} UTC) is later than --until ({until:%Y-%m-%d %H:%M} UTC).")
    if from_txid is not None and to_txid is not None and from_txid > to_txid:
        raise UsageError(f"--from-txid {from_txid} is larger than --to-txid {to_txid}.")
