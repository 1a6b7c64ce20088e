"""Settings: read once by the command line or a task, and passed to what they call.

Each setting has one name and is looked up in this order; the first place that has it wins:

1. environment: ``TIDEGATE_<NAME>``; for the connection libpq's own ``PGHOST``, ``PGPORT``, ``PGDATABASE``, ``PGUSER``,
   ``PGPASSFILE``, ``PGREQUIREAUTH``, ``PGSSLMODE``, ``PGSSLROOTCERT``, ``PGSSLCERT`` and ``PGSSLKEY``
2. ``tidegate.toml`` in the project folder
3. ``.tidegate/stack.json``, written by ``tidegate up`` with the ports it chose
4. the default

Which folder is the project's: `tidegate.state_store.base.project`. Files that another account could have put there are ignored,
with a warning.

Passwords are not settings. libpq finds the database's by itself (``PGPASSFILE``, ``~/.pgpass``, ``PGPASSWORD``); the others
are given as the name of the file that holds them. So a table of settings contains no secrets.
"""

import dataclasses
import json
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.state_store.base import project
from tidegate.state_store.base.errors import SettingsInvalid
from tidegate.state_store.base.project import HOME_VARIABLE, SETTINGS_FILE, STACK_FOLDER

CONNECT_TIMEOUT_SECONDS = 10
# Staged rows are sent as UTF-8. Postgres would take them for text in the encoding that a role, the database, the server or
# PGCLIENTENCODING sets, and store other characters without an error.
CLIENT_ENCODING = "UTF8"
# A server that has vanished, as in a failover, sends nothing: with these, its connections are given up after about a minute.
KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
LONGEST_TIMEOUT_SECONDS = (2**31 - 1) // 1000  # Postgres counts milliseconds
SYSTEM = "system"  # as pg_sslrootcert, stands for the certificates that the operating system trusts


def _setting(
    default: Any,
    help_text: str,
    *,
    env: str | None = None,
    least: int = 1,
    most: int = 2**31 - 1,
    choices: Collection[str] = (),
) -> Any:
    return field(default=default, metadata={"help": help_text, "env": env, "least": least, "most": most, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """Everything that may differ from one installation to the next."""

    home: Path = _setting(Path(), "project folder: relative source folders start here")
    pg_host: str = _setting(
        "127.0.0.1", "Postgres server that holds ledger and state; or several (a,b), the primary is found", env="PGHOST"
    )
    pg_port: int = _setting(5432, "its port", env="PGPORT", most=65_535)
    pg_database: str = _setting("tidegate", "its database", env="PGDATABASE")
    pg_user: str = _setting("tidegate", "role that plans, processes and commits", env="PGUSER")
    pg_passfile: Path | None = _setting(None, "libpq password file", env="PGPASSFILE")
    pg_require_auth: str = _setting(
        "scram-sha-256", "how the server may ask for the password: libpq's require_auth, as in md5 or none", env="PGREQUIREAUTH"
    )
    pg_sslmode: str = _setting(
        "prefer",
        "TLS to it: verify-full checks the server's certificate and name",
        env="PGSSLMODE",
        choices=("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
    )
    pg_sslrootcert: Path | None = _setting(
        None, "certificates of the authorities that may have signed the server's, or system", env="PGSSLROOTCERT"
    )
    pg_sslcert: Path | None = _setting(None, "this client's certificate, if the server asks for one", env="PGSSLCERT")
    pg_sslkey: Path | None = _setting(None, "the key of that certificate", env="PGSSLKEY")
    pg_failover: str = _setting(
        "halt",
        "after a standby was promoted: halt, or go-on where only synchronous standbys are promoted",
        choices=("halt", "go-on"),
    )
    pg_owner: str = _setting("tidegate_owner", "role that owns the tables and migrates them")
    pg_stager: str = _setting("tidegate_stager", "role that Spark's executors stage rows with")
    pg_reader: str = _setting("tidegate_reader", "role that reads ledger and states for the page and its metrics")
    spark_remote: str = _setting("sc://127.0.0.1:15002", "Spark Connect address")
    spark_token_file: Path | None = _setting(None, "file with the Spark Connect server's token")
    spark_packages: str = _setting("", "Maven packages (group:artifact:version, ...) that the embedded Spark loads")
    spark_executors: str = _setting("auto", "where its executors run: here, elsewhere, or auto: here if it is on loopback")
    executor_modules: str = _setting("", "further modules of yours that run in Spark's tasks (name, ...)")
    executor_passfile: Path | None = _setting(None, "libpq password file of pg_stager that goes to executors elsewhere")
    executor_conninfo: str = _setting("", "libpq parameters that differ for executors elsewhere, as in host=db sslmode=require")
    kafka_bootstrap: str | None = _setting(None, "Kafka brokers (host:port, ...)")
    kafka_properties_file: Path | None = _setting(None, "librdkafka properties file with how to log in to them")
    airflow_url: str = _setting("http://127.0.0.1:8080", "Airflow's api-server")
    airflow_user: str = _setting("admin", "its user")
    airflow_password_file: Path | None = _setting(None, "file with that user's password")
    metrics_token_file: Path | None = _setting(None, "file with the token that opens /tidegate/metrics to Prometheus")
    airflow_history_days: int = _setting(30, "how long the stack keeps Airflow's runs and the logs of its tasks", most=700_000)
    trusted_users: str = _setting("", "accounts whose Spark and Airflow on loopback get token and password (name, ... or *)")
    witness_folder: Path | None = _setting(
        None, "where it is marked how far pipelines have committed, outside Postgres [.tidegate/witness]"
    )
    lock_timeout_seconds: int = _setting(
        60, "longest wait for a lock, so for another commit's merge", most=LONGEST_TIMEOUT_SECONDS
    )
    commit_timeout_seconds: int = _setting(600, "longest single statement of a commit", most=LONGEST_TIMEOUT_SECONDS)
    idle_timeout_seconds: int = _setting(
        30, "longest pause between two statements of a commit before it is cut off", most=LONGEST_TIMEOUT_SECONDS
    )
    attempt_timeout_seconds: int = _setting(3600, "an unsealed attempt older than this may be replaced by a commit")
    min_file_age_seconds: int = _setting(
        5, "a source file that changed more recently may still be written: it is not planned yet", least=0
    )
    staging_connections: int = _setting(8, "most partitions, so most connections, that stage one batch at once")
    staging_retention_hours: int = _setting(24, "how long staged rows of a committed batch are kept", most=50_000_000)

    @classmethod
    def load(cls, environ: Mapping[str, str] = os.environ, *, without_stack: bool = False) -> "Settings":
        """Read the settings, as `sources` does.

        Raises: SettingsInvalid, which names the setting, the place and the value.
        """
        return cls.sources(environ, without_stack=without_stack)[0]

    @classmethod
    def sources(
        cls, environ: Mapping[str, str] = os.environ, *, without_stack: bool = False
    ) -> tuple["Settings", dict[str, str]]:
        """Return the settings, and the place that each came from.

        `without_stack` leaves out the file that `tidegate up` wrote, for verbs that must work even if it is damaged.

        Raises: SettingsInvalid.
        """
        home = project.find(environ) or Path.cwd().resolve()
        toml_file, stack_file = home / SETTINGS_FILE, home / STACK_FOLDER / "stack.json"
        trusted = {file: project.is_named(environ) or project.is_trusted(file) for file in (toml_file, stack_file)}
        places: list[tuple[str, dict[str, Any]]] = [
            (str(toml_file), _read(toml_file, tomllib.loads) if trusted[toml_file] else {}),
            (str(stack_file), _read_stack(stack_file) if trusted[stack_file] and not without_stack else {}),
        ]
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(places[0][1]) - known):
            raise SettingsInvalid(
                f"{toml_file} has no setting {', '.join(unknown)}. Known settings: {', '.join(sorted(known))}."
            )

        values: dict[str, Any] = {"home": home}
        origins = {"home": f"environment {HOME_VARIABLE}" if environ.get(HOME_VARIABLE) else "the folder you are in"}
        variables = cls.environment_names()
        for f in dataclasses.fields(cls):
            if f.name == "home":
                continue
            variable = variables[f.name]
            candidates = [(f"environment {variable}", environ[variable])] if environ.get(variable) else []
            candidates += [(place, content[f.name]) for place, content in places if f.name in content]
            if candidates:
                origins[f.name], raw = candidates[0]
                values[f.name] = _convert(f, raw, origins[f.name], home)
            else:
                origins[f.name] = "default"
        return cls(**values), origins

    @classmethod
    def environment_names(cls) -> dict[str, str]:
        """Return the environment variable of each setting."""
        return {f.name: f.metadata["env"] or f"TIDEGATE_{f.name.upper()}" for f in dataclasses.fields(cls)}

    @property
    def stack_folder(self) -> Path:
        """The folder in which the embedded stack keeps its data, logs and secrets."""
        return self.home / STACK_FOLDER

    @property
    def marks_folder(self) -> Path:
        """The folder of the witness, in which it is marked how far pipelines have committed."""
        return self.witness_folder or self.stack_folder / "witness"

    @property
    def trusts_promotions(self) -> bool:
        """Whether a promoted standby is taken to have all commits."""
        return self.pg_failover == "go-on"

    @property
    def has_airflow(self) -> bool:
        """Whether runs can be started in Airflow: there is a password for it."""
        file = self.airflow_password_file
        return file is not None and os.path.exists(file)  # noqa: PTH110 - not Path's, which raises in a closed folder

    def conninfo(self, *, user: str | None = None) -> dict[str, Any]:
        """Return libpq's connection parameters, without a password.

        By default libpq accepts only a server that proves, by SCRAM, that it knows the password. Of several hosts it takes the
        first that accepts writes.
        """
        parameters = {
            "host": self.pg_host,
            "port": self.pg_port,
            "dbname": self.pg_database,
            "user": user or self.pg_user,
            "connect_timeout": CONNECT_TIMEOUT_SECONDS,
            "client_encoding": CLIENT_ENCODING,
            "require_auth": self.pg_require_auth,
            "sslmode": self.pg_sslmode,
            **KEEPALIVE,
        }
        if "," in self.pg_host:
            parameters["target_session_attrs"] = "read-write"
        files = {
            "passfile": self.pg_passfile,
            "sslrootcert": self.pg_sslrootcert,
            "sslcert": self.pg_sslcert,
            "sslkey": self.pg_sslkey,
        }
        return parameters | {name: str(file) for name, file in files.items() if file}


def _read(file: Path, parse: Any) -> dict[str, Any]:
    try:
        content = parse(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SettingsInvalid(f"{file} cannot be read: {error}. {_remedy(file)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings", {}), dict):
        raise SettingsInvalid(f"{file} must hold a table of settings. {_remedy(file)}")
    return content


def _read_stack(file: Path) -> dict[str, Any]:
    """Return the settings that `tidegate up` wrote; none, with a warning, if the project was copied or moved since."""
    content = _read(file, json.loads)
    if isinstance(folder := content.get("folder"), str) and not _is_same(Path(folder), file.parent):
        project.warn(
            f"{file} leads to the stack in {folder}: it was copied or moved, so it is ignored. Start one here: tidegate up"
        )
        return {}
    return dict(content.get("settings", {}))


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # there is no such folder any more
        return False


def _remedy(file: Path) -> str:
    return "`tidegate up` writes it again." if file.parent.name == STACK_FOLDER else "Fix or remove it."


def _convert(setting: dataclasses.Field[Any], raw: Any, origin: str, home: Path) -> Any:
    name, kind, least, most = setting.name, setting.type, setting.metadata["least"], setting.metadata["most"]
    if kind is int:
        try:
            number = int(raw) if isinstance(raw, str) or type(raw) is int else least - 1  # 1.5 and true are not whole numbers
        except (TypeError, ValueError):
            number = least - 1
        if not least <= number <= most:
            raise SettingsInvalid(f"{name} must be a whole number from {least} to {most}, but {origin} says {raw!r}.")
        return number
    if not isinstance(raw, str):
        raise SettingsInvalid(f"{name} must be a text in quotes, but {origin} says {raw!r}.")
    if (choices := setting.metadata["choices"]) and raw not in choices:
        raise SettingsInvalid(f"{name} must be one of {', '.join(choices)}, but {origin} says {raw!r}.")
    if kind in {str, str | None} or (name == "pg_sslrootcert" and raw == SYSTEM):
        return raw if kind in {str, str | None} else Path(raw)
    return _path(name, raw, origin, home)


def _path(name: str, raw: str, origin: str, home: Path) -> Path:
    try:
        return home / Path(raw).expanduser()
    except RuntimeError as error:  # ~ of an account that there is not
        raise SettingsInvalid(f"{name} must be the path of a file or folder, but {origin} says {raw!r}: {error}") from error
