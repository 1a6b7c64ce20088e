"""Connections of Spark's tasks to Postgres: their parameters, and the files that these name, such as a password file.

A file travels with the Spark session if executors are on other machines, and a task finds it in the session's folder. So a
query's plan, and what Spark logs of it, has the file's name and never its content.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from psycopg2 import ProgrammingError
from psycopg2.extensions import parse_dsn
from pyspark import SparkFiles

from tidegate.jobs.spark.port_owner import loopback_address
from tidegate.state_store.base.errors import SettingsInvalid
from tidegate.state_store.base.settings import Settings

HERE, ELSEWHERE, AUTO = "here", "elsewhere", "auto"
# The connection's parameters that name a file.
FILES = ("passfile", "sslrootcert", "sslcert", "sslkey")


@dataclass(frozen=True)
class SessionFile:
    """The name of a file that travels with the session."""

    name: str


def are_elsewhere(settings: Settings) -> bool:
    """Return whether executors may be on other machines, or under another account that cannot read this project.

    Raises: SettingsInvalid.
    """
    if settings.spark_executors not in (HERE, ELSEWHERE, AUTO):
        raise SettingsInvalid(
            f"spark_executors must be {HERE}, {ELSEWHERE} or {AUTO}, not {settings.spark_executors!r}. See: tidegate settings"
        )
    if settings.spark_executors == AUTO:
        try:
            return loopback_address(urlsplit(settings.spark_remote).hostname) is None
        except ValueError:
            return False  # no address: `check_reachable` refuses it
    return settings.spark_executors == ELSEWHERE


def conninfo_of_tasks(settings: Settings) -> dict[str, Any]:
    """Return the connection parameters of tasks, for `on_executor`; none of them is a password.

    An executor in another process finds the password itself, unless a password file travels to it.

    Raises: SettingsInvalid.
    """
    conninfo = {**settings.conninfo(user=settings.pg_stager), "application_name": "tidegate staging"}
    if not are_elsewhere(settings):
        conninfo.pop("passfile", None)
        return conninfo
    own = {name: value for name, value in conninfo.items() if name not in FILES or value == "system"}
    names = {parameter: SessionFile(name) for parameter, (name, _) in sent_files(settings).items()}
    return {**own, **names, **_parameters(settings)}


def on_executor(conninfo: Mapping[str, Any]) -> dict[str, Any]:
    """Return connection parameters with the paths that the session's files have on this executor, private to its account.

    Spark lets all accounts execute the files that it fetches; libpq ignores a password file over which others have any right.
    """
    parameters = dict(conninfo)
    for name, value in conninfo.items():
        if isinstance(value, SessionFile):
            path = Path(SparkFiles.get(value.name))
            path.chmod(0o600)
            parameters[name] = str(path)
    return parameters


def sent_files(settings: Settings) -> dict[str, tuple[str, bytes]]:
    """Return the connection's files that travel, by parameter: the name in a session, and the content.

    Those for which the setting executor_conninfo names another file do not travel.

    Raises: SettingsInvalid.
    """
    conninfo = {**settings.conninfo(user=settings.pg_stager), "passfile": settings.executor_passfile}
    theirs = _parameters(settings)
    files: dict[str, tuple[str, bytes]] = {}
    for parameter in FILES:
        path = conninfo.get(parameter)
        if path and path != "system" and parameter not in theirs:
            try:
                content = Path(path).read_bytes()
            except OSError as error:
                raise SettingsInvalid(f"The file {path} for Spark's executors cannot be read: {error.strerror}.") from error
            files[parameter] = f"tidegate_{parameter}_{_fingerprint(content)}", content
    return files


@lru_cache
def _fingerprint(secret: bytes) -> str:
    """Return a name for a content that may be secret: slow to compute, so a password cannot be guessed by trying."""
    return hashlib.scrypt(secret, salt=b"tidegate", n=2**14, r=8, p=1, dklen=10).hex()


def _parameters(settings: Settings) -> dict[str, str]:
    """Return libpq's parameters that are different for executors."""
    try:
        parameters: dict[str, str] = parse_dsn(settings.executor_conninfo) if settings.executor_conninfo else {}
    except ProgrammingError:  # whose message quotes a part, which may be one of a password
        raise SettingsInvalid(
            "executor_conninfo cannot be read: it is no libpq connection string, as in host=db sslmode=require."
        ) from None
    if "password" in parameters or "sslpassword" in parameters:
        raise SettingsInvalid(
            "executor_conninfo holds a password, which Spark would write into its plans. Name a password file: "
            "executor_passfile (tidegate settings)."
        )
    return parameters
