"""README's own project on a complete stack: real Airflow, Spark and Postgres."""

import json
import os
import subprocess
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import in_process
from tests.cli.conftest import check_schema, verb_of
from tests.integration.conftest import holding, until
from tests.readme.console import Shell
from tests.stack.conftest import Stack
from tests.statements import execute
from tests.store import HOME_VARIABLE
from tidegate.airflow_client import AirflowClient
from tidegate.state_store import Settings

SHOPS = ("Lisbon", "Porto", "Faro")
wait_for = partial(until, seconds=400, every=0.1)
STATES = {"orders": "revenue", "returns": "returned"}  # of the pipelines that add up what shops sell or take back


@dataclass
class Shop:
    """The project of README, whose pipeline orders adds up the revenue of each shop; colleagues' pipelines; their stack."""

    home: Path
    settings: Settings
    shell: Shell

    @cached_property
    def client(self) -> AirflowClient:
        return AirflowClient(self.settings)

    @property
    def stack(self) -> Stack:
        return Stack(self.home)

    def tidegate(self, *arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = in_process.run(arguments, {**os.environ, HOME_VARIABLE: str(self.home)}, self.home)
        assert done.returncode == exit_code, f"tidegate {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        return done

    def json(self, *arguments: str) -> Any:
        found = json.loads(self.tidegate(*arguments, "--json").stdout)
        check_schema(verb_of(arguments), found)
        return found

    def sell(self, files: int, pipeline: str = "orders") -> list[int]:
        """Let files arrive; return the txids that they will get."""
        (folder := self.home / "data" / pipeline).mkdir(exist_ok=True)
        last = len(list(folder.iterdir()))
        for number in range(last + 1, last + files + 1):
            rows = [{"shop": SHOPS[(number + row) % 3], "cents": 100 * number + row} for row in range(5)]
            (folder / f"2027-{number:04}.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return list(range(last + 1, last + files + 1))

    def check(self, pipeline: str = "orders") -> None:
        """Each row has counted once: the state is what plain Python adds up, and all files have committed."""
        files = list((self.home / "data" / pipeline).iterdir())
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        count, cents = Counter(row["shop"] for row in rows), Counter[str]()
        for row in rows:
            cents[row["shop"]] += row["cents"]
        assert self.state(pipeline) == [(shop, count[shop], cents[shop]) for shop in sorted(count)]
        assert self.committed(pipeline) == len(files)

    def state(self, pipeline: str = "orders") -> list[tuple[Any, ...]]:
        return self.ask(f"SELECT shop, orders, cents FROM state.{STATES[pipeline]} ORDER BY shop")

    def ledger(self, pipeline: str = "orders") -> list[tuple[Any, ...]]:
        query = "SELECT t::text FROM tidegate.{} t WHERE pipeline = %s ORDER BY 1"
        return [row for table in ("cursor", "batch", "attempt", "commit") for row in self.ask(query.format(table), pipeline)]

    def run(self, pipeline: str) -> str:
        run_id = self.client.trigger(pipeline, {})
        assert self.end_of(pipeline, run_id) == "success"
        return run_id

    def end_of(self, pipeline: str, run_id: str) -> str:

        def state() -> str | None:
            return found if (found := self.client.run_state(pipeline, run_id)) in ("success", "failed") else None

        return str(wait_for(state, f"the end of a run of {pipeline}", every=0.5))

    def tasks(self, run_id: str, task_id: str, pipeline: str = "orders") -> dict[str, str]:
        found = [task for task in self.client.task_instances(pipeline, run_id) if task["task_id"] == task_id]
        return {t["rendered_map_index"]: t["state"] for t in sorted(found, key=lambda task: task["map_index"])}

    def committed(self, pipeline: str) -> int:
        return int(self.ask("SELECT txid FROM tidegate.cursor WHERE pipeline = %s", pipeline)[0][0])

    def phases(self, txids: list[int], pipeline: str = "orders") -> list[str]:
        query = "SELECT phase FROM tidegate.batches WHERE pipeline = %s AND txid = ANY (%s) ORDER BY txid"
        return [phase for (phase,) in self.ask(query, pipeline, txids)]

    def ask(self, query: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Query the ledger and the states directly: a verb for each look would keep a core busy."""
        return execute(self.settings.conninfo(user="postgres"), query, arguments or None)

    def held(self, table: str) -> AbstractContextManager[Any]:
        """Hold a lock on a table of the ledger, so that the next process that writes it waits until the block ends."""
        return holding(self.settings, f"LOCK TABLE tidegate.{table} IN EXCLUSIVE MODE")

    def secrets(self) -> dict[str, str]:
        found = {}
        for file in sorted((self.stack.folder / "secrets").iterdir()):
            content = file.read_text()
            if file.name.startswith("pgpass"):
                found |= {f"{file.name} {line.split(':')[3]}": line.split(":")[4] for line in content.splitlines()}
            elif file.name == "spark.conf":
                settings = dict(line.split(maxsplit=1) for line in content.splitlines())
                found[file.name] = settings["spark.connect.authenticate.token"]
            elif file.suffix == ".json":
                found |= {f"{file.name} {user}": password for user, password in json.loads(content).items()}
            else:
                found[file.name] = content.strip()
        return found


# Airflow's tasks make themselves undumpable, so that only root sees which connections are theirs.
SEES_CONNECTIONS_OF_TASKS = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root sees which connection belongs to a task of Airflow; run the tests as root"
)


def waiting_process(settings: Settings, statement: str) -> psutil.Process:
    """Wait for a process whose statement is like this and waits for a lock; return the process."""

    def ends_of_its_connection() -> tuple[Any, ...] | None:
        query = "SELECT client_port, inet_server_port() FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        return next(iter(execute(settings.conninfo(user="postgres"), query, [f"{statement}%"])), None)

    # One local port may belong to connections to several servers at once: both ends identify the process.
    ends = wait_for(ends_of_its_connection, f"waiting in {statement!r}")
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.raddr and (c.laddr.port, c.raddr.port) == ends}
    assert pid is not None, "the system hides whose connection this is"  # without a number, psutil means this very process
    return psutil.Process(pid)
