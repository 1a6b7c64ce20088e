"""Translate the database driver's errors into Tidegate's, by SQLSTATE: a server may have its messages in any language."""

import re

from tidegate.state_store.base import errors
from tidegate.state_store.connections.answer_deadlines import NoAnswer
from tidegate.state_store.connections.lock_holders import LOCK_NOT_AVAILABLE

_RETRYABLE_STATES = {
    "40001": "a serialization failure",
    "40P01": "a deadlock",
    "53000": "too few resources",
    "53100": "a full disk",
    "53200": "too little memory",
    "53300": "too many connections",
    LOCK_NOT_AVAILABLE: "a lock timeout",
    "57014": "a statement timeout",
    "25P03": "an idle transaction that was ended",
    "25P04": "a transaction timeout",
    "57P01": "a server that shuts down",
    "57P02": "a server that crashed",
    "57P03": "a server that starts up",
}
_READ_ONLY_STATE, _NOT_READY_STATE = "25006", "55000"
_OF_STANDBYS = "xlogfuncs.c"  # the file of Postgres' code that raises the latter on a standby
# Not every SSL error: a server that dies breaks the connection with one, too.
_TLS = ("certificate", "does not support SSL", "no encryption", "private key file", " alert ")
_ACCESS_STATES = {"28000", "28P01", "3D000", "42501"}
# What to do about a refusal, by the function of Postgres' code that raises it.
_ON_REFUSAL = {
    "aclcheck_error": "Run: tidegate migrate, which grants what new declarations need. If a privilege was revoked, grant it "
    "again; or check PGUSER (tidegate settings).",
    "ExecWithCheckOptions": "Drop the policy, as it hides rows; or, as an administrator: ALTER ROLE ... BYPASSRLS",
}
_RAISED = re.compile(r"PL/pgSQL (function \S+)")  # such as that of a team's trigger
_ON_DEPENDENTS = {"reportDependentObjects", "heap_truncate_check_FKs"}  # the functions that refuse what would take others along
# The server's answer to a connection: how severe the error is, in its language, two blanks, and the message.
_REFUSED = re.compile(r"failed: \S+:  ")
_OF_A_HOST = "connection to server "  # begins what libpq says of each host that it has tried
# Words in the message of a refused connection, which has no SQLSTATE, and the one that they stand for.
_REFUSALS = [
    (["password authentication failed"], "28P01"),
    (["no password supplied"], "28P01"),
    (['role "', "does not exist"], "28000"),
    (['role "', "not permitted to log in"], "28000"),
    (['database "', "does not exist"], "3D000"),
    (["permission denied for database"], "42501"),
    (["too many clients"], "53300"),
    (["remaining connection slots"], "53300"),
    (["too many connections for"], "53300"),  # a role, a database
    (["no such database"], "3D000"),  # of PgBouncer, as are the next two
    (["no such user"], "28000"),
    (["no more connections allowed"], "53300"),
    (["is starting up"], "57P03"),
    (["is shutting down"], "57P03"),
    (["in recovery mode"], "57P03"),
]
_MISSING_STATES = {"42P01", "3F000", "42703"}
_DUPLICATE_STATE = "42P07"
_STAGING = re.compile(r"\bstaging\.")
_CHECK_STATE = "23514"  # also a row whose partition is missing
_OVERFLOW_STATES = {"22003"}
_TOO_LARGE_STATE, _ROWS_IN_PAGES = "54000", "hio.c"  # the file of Postgres' code that puts rows into pages
# Constraints of one row or several: NOT NULL, foreign key, unique, check, exclusion.
_CONSTRAINT_STATES = {"23502", "23503", "23505", _CHECK_STATE, "23P01"}
_DETAIL_CHARACTERS = 300
# A NUL, a text that is no value of its column's type, no date, no time zone, a key longer than an index row.
_BAD_KEY_STATES = {"22021", "22P02", "22007", "22008", "22009", _TOO_LARGE_STATE}


def dependents(error: BaseException | None) -> str | None:
    """Return as text what depends on what a statement would drop or truncate; None if the driver's error is another one."""
    detail = _detail(error, "message_detail")
    if not detail or _detail(error, "source_function") not in _ON_DEPENDENTS:
        return None
    return "; ".join(detail.removesuffix(".").splitlines())


def translate(error: BaseException | None, doing: str, holder: str = "") -> errors.TidegateError:
    """Return the error that a psycopg2 error means to the caller; `holder` is what `lock_holders.of` says of it."""
    message = message_of(error)
    state = getattr(error, "pgcode", None) or _state_of_refusal(error)
    if refusal := _of_the_server(error, state, message, doing):
        return refusal
    if state in _ACCESS_STATES:
        usual = "Check PGUSER, PGDATABASE and the password file (tidegate settings)."
        advice = _ON_REFUSAL.get(_detail(error, "source_function"), usual)
        return errors.AccessRefused(f"Postgres refused while {doing}: {message}. {advice}")
    if of_table := _of_a_table(error, state, message, doing):
        return of_table
    if state in _OVERFLOW_STATES:
        return errors.Overflow(f"A value left its column's range while {doing}: {message}. Widen the column's type.")
    if state in _BAD_KEY_STATES:
        return errors.BadKey(f"Postgres cannot store a value while {doing}: {message}.")
    if state in _RETRYABLE_STATES:
        return _given_up(state, f"Postgres gave up while {doing}: {_RETRYABLE_STATES[state]} ({message}).", holder)
    if state is None or state.startswith("08"):
        return errors.StoreUnavailable(
            f"Postgres did not answer while {doing}: {message}. Start it (tidegate up) or check PGHOST and PGPORT; where a "
            "connection pooler is in front of it, look at the pooler's log."
        )
    raised = _RAISED.match(_detail(error, "context"))
    where, hint = f" in {raised[1]}" if raised else "", _detail(error, "message_hint")
    return errors.PermanentError(f"Postgres failed while {doing}: {message} (SQLSTATE {state}{where}). {hint}".rstrip())


def _given_up(state: str, story: str, holder: str) -> errors.StoreUnavailable:
    if state == LOCK_NOT_AVAILABLE:
        return errors.LockHeld(f"{story} {holder or 'Another session holds it: look at pg_locks.'}")
    return errors.StoreUnavailable(story)


def is_too_large_row(error: BaseException | None) -> bool:
    """Return whether a row does not fit into a page of Postgres, which names neither the row nor its table."""
    return getattr(error, "pgcode", None) == _TOO_LARGE_STATE and _detail(error, "source_file") == _ROWS_IN_PAGES


def _of_the_server(error: BaseException | None, state: str | None, message: str, doing: str) -> errors.TidegateError | None:
    """Return the error if the server does not prove its identity, is not protected by TLS, or is no primary; else None."""
    if isinstance(error, NoAnswer):
        return errors.StoreUnavailable(
            f"Postgres did not answer while {doing}: {message}. Look at this process on the server's machine. While it is "
            "stopped, it keeps its locks, and pg_terminate_backend does not end it: let it go on (kill -CONT)."
        )
    if "authentication method requirement" in message:
        return errors.AccessRefused(
            f"The server does not prove that it is the right one, so the password was not sent, while {doing}: {message}. "
            "If it is the right one, name its way to log in: PGREQUIREAUTH=md5, for example (tidegate settings)."
        )
    if state is None and any(word in message for word in _TLS):
        return errors.AccessRefused(
            f"The connection to Postgres is not protected as it has to be, while {doing}: {message}. Check PGSSLMODE, "
            "PGSSLROOTCERT and the name in PGHOST (tidegate settings; docs/postgres.md)."
        )
    if state is None and "pg_hba.conf" in message:
        return errors.AccessRefused(
            f"Postgres refused while {doing}: {message}. Let its administrator add a line to pg_hba.conf, or check PGUSER and "
            "PGDATABASE (tidegate settings)."
        )
    if state is None and _REFUSED.search(message):
        return errors.StoreUnavailable(
            f"Postgres refused the connection while {doing}: {message}. Check PGUSER, PGDATABASE, the password file, and how "
            "many connections are free. Where its messages are not in English, this is tried again whatever the reason: set "
            "lc_messages = 'C' in the server's configuration (docs/postgres.md)."
        )
    if state == _READ_ONLY_STATE or (state == _NOT_READY_STATE and _detail(error, "source_file") == _OF_STANDBYS):
        return errors.StoreUnavailable(
            f"Postgres is a standby, or only reads, while {doing}: {message}. A primary is awaited; check PGHOST, PGOPTIONS."
        )
    return None


def _of_a_table(error: BaseException | None, state: str | None, message: str, doing: str) -> errors.TidegateError | None:
    """Return the error if a table is missing, or the partition that a row belongs to, or if one is in the way."""
    if state in _MISSING_STATES and _STAGING.search(message):
        return errors.Unprocessed(
            f"Staging is gone while {doing}: {message}. The batch has committed by another attempt, or is processed again."
        )
    if state == _DUPLICATE_STATE:
        return errors.SchemaOutOfDate(
            f"A table is in the way while {doing}: {message}. If it is a detached partition, rename it, move it to another "
            "schema, or drop it; then try again."
        )
    if (depends := dependents(error)) is not None:
        return errors.PermanentError(
            f"Postgres refused while {doing}: {message}: {depends}. Drop that first, then repeat the command."
        )
    if state in _MISSING_STATES:
        return errors.SchemaOutOfDate(f"A table is missing while {doing}: {message}. Run: tidegate migrate")
    if of_constraint := _of_a_constraint(error, state, message, doing):
        return of_constraint
    if state == _CHECK_STATE and not _detail(error, "constraint_name"):
        return errors.SchemaOutOfDate(
            f"A partition is missing while {doing}: {message}. Attach it again; tidegate migrate says what is missing."
        )
    return None


def _of_a_constraint(error: BaseException | None, state: str | None, message: str, doing: str) -> errors.TidegateError | None:
    """Return the error if a constraint of a state's table refuses a row; None for a row that no partition takes."""
    name, value = _detail(error, "constraint_name"), _detail(error, "message_detail")[:_DETAIL_CHARACTERS]
    if state not in _CONSTRAINT_STATES or _detail(error, "schema_name") != "state" or not (name or state == "23502"):
        return None
    rule = f"constraint {name}" if name else f"column {_detail(error, 'column_name')}"
    return errors.PermanentError(
        f"Table state.{_detail(error, 'table_name')} refuses a row by its {rule} while {doing}: {message}. {value} Tidegate "
        "has made no such constraint. Drop it, or have the transform leave such rows out and raise the pipeline's version; "
        "then retry."
    )


def has_no_free_connection(error: BaseException) -> bool:
    """Return whether a connection was refused because the server, the database or the role has too many."""
    return _state_of_refusal(error) == "53300"


def message_of(error: BaseException | None) -> str:
    """Return the first line of a driver's error or, if several hosts refused a connection, what each said."""
    return "; ".join(_refusals(error) or [_first_line(error)])


def _refusals(error: BaseException | None) -> list[str]:
    return [line.strip().rstrip(".") for line in str(error).splitlines() if line.startswith(_OF_A_HOST)]


def _state_of_refusal(error: BaseException | None) -> str | None:
    """Return the SQLSTATE that the text of a refused connection, which carries none, stands for; None for an unreached host.

    Of several reasons, one that may pass counts: the other host may be a standby that is never asked.
    """
    states = [_state_in(line) for line in _refusals(error) or [_first_line(error)]]
    return next((state for state in states if state not in _ACCESS_STATES), states[0])


def _state_in(message: str) -> str | None:
    return next((state for words, state in _REFUSALS if all(word in message for word in words)), None)


def _detail(error: BaseException | None, what: str) -> str:
    """Return a field of the server's error that is the same in every language; "" if it has none."""
    return getattr(getattr(error, "diag", None), what, None) or ""


def _first_line(error: BaseException | None) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
