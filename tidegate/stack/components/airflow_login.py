"""Login of Airflow's asynchronous driver to Postgres: its setting ``sql_alchemy_connect_args_async`` names CONNECT_ARGS.

asyncpg sends the password in clear if the server asks for that, and has no option against it. So it gets the password only
when the port belongs to our server. On another machine that is not known: there the address may ask for TLS.

The password is the address' own, or in the file that its `passfile`, or libpq's ``PGPASSFILE``, names.
"""

import os
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tidegate.jobs.spark.port_owner import Server, loopback_address

ADDRESS_VARIABLE = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC"
POSTGRES_USER_VARIABLE = "TIDEGATE_POSTGRES_USER"  # the account of the embedded Postgres, if it is not ours


def password() -> str:
    """Return the password for a new connection.

    Raises: ListenerNotTrusted if another account listens on the port, LookupError if the password file has no entry.
    """
    address = urlsplit(os.environ[ADDRESS_VARIABLE])
    port = address.port or 5432
    if loopback := loopback_address(address.hostname):
        user = os.environ.get(POSTGRES_USER_VARIABLE)
        Server(loopback, port, "the password of Airflow's database", [int(user)] if user else []).check()
    if address.password is not None:
        return unquote(address.password)
    named = parse_qs(address.query).get("passfile") or [os.environ.get("PGPASSFILE", "")]
    if not named[0]:
        raise LookupError(f"The address in {ADDRESS_VARIABLE} has no password and no passfile, and PGPASSFILE is not set.")
    file = Path(named[0])
    target = address.hostname, str(port), address.path.lstrip("/"), unquote(address.username or "")
    for line in file.read_text().splitlines():
        *patterns, found = line.split(":", 4)
        if len(patterns) == len(target) and all(pattern in ("*", part) for pattern, part in zip(patterns, target, strict=True)):
            return found
    raise LookupError(f"{file} has no password of {address.username} for {address.hostname}:{port}.")


CONNECT_ARGS = {"password": password}
