"""Files of a Spark session, such as a password file, as parameters of connections that Spark's tasks open.

A parameter names such a file, and the task finds the file in the session's folder on its executor. So a query's plan, and what
Spark logs of it, has the file's name and never its content.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import SparkFiles


@dataclass(frozen=True)
class SessionFile:
    """The name of a file that travels with the session."""

    name: str


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
