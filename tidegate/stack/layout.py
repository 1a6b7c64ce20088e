"""The components, folders and usual ports of an embedded stack, for `up` and the supervisor."""

import contextlib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from tidegate.stack.components import server_process as components
from tidegate.stack.components.airflow import USER, EmbeddedAirflow
from tidegate.stack.components.kafka import SPARK_PACKAGES, EmbeddedKafka
from tidegate.stack.components.postgres import EmbeddedPostgres
from tidegate.stack.components.spark import EmbeddedSpark
from tidegate.stack.machine.private_files import private_folder
from tidegate.state_store.base.project import STACK_FOLDER
from tidegate.state_store.base.settings import Settings

USUAL_PORTS = {
    "postgres": 15432,  # not 5432, which an installed Postgres may use
    "spark": 15002,
    "airflow": 8080,
    "kafka": 19092,  # not 9092, as for Postgres
    "kafka_controller": 19093,
}


@dataclass(frozen=True)
class Layout:
    """The components of one stack, with its folder and ports."""

    folder: Path
    ports: dict[str, int]
    postgres: EmbeddedPostgres
    spark: EmbeddedSpark
    airflow: EmbeddedAirflow
    kafka: EmbeddedKafka
    extras: tuple[str, ...] = ()

    @classmethod
    def load(cls, home: Path) -> "Layout":
        """Return the layout that `choose` has saved.

        Raises: FileNotFoundError if there is none, ValueError if it is damaged.
        """
        content = json.loads((home / STACK_FOLDER / "stack.json").read_text())
        ports = content.get("ports", {}) if isinstance(content, dict) else None
        if not isinstance(ports, dict) or not all(type(port) is int for port in ports.values()):
            raise ValueError(f"{home / STACK_FOLDER / 'stack.json'} holds no ports")
        return cls._of(home / STACK_FOLDER, {**USUAL_PORTS, **ports}, content.get("extras", ()))

    @classmethod
    def find(cls, home: Path) -> "Layout | None":
        """Return the layout that `choose` has saved; None if there is none, or it is damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            return cls.load(home)
        return None

    @classmethod
    def choose(cls, home: Path, until: contextlib.ExitStack, extras: Collection[str] = ()) -> "Layout":
        """Choose ports, the previous ones if they are free, and save the layout and its settings.

        The ports are reserved for this stack until `until` closes.
        """
        folder = home / STACK_FOLDER
        private_folder(folder, passable=os.geteuid() == 0)
        previous = cls.find(home)
        usual = previous.ports if previous else USUAL_PORTS
        ports = {name: components.reserve_port(usual[name], until) for name in USUAL_PORTS}
        layout = cls._of(folder, ports, extras)
        layout._write()
        return layout

    def forget_extras(self) -> None:
        """Save the layout without extras; their ports stay in it."""
        if self.extras:
            replace(self, extras=())._write()

    def settings(self) -> dict[str, str | int]:
        """Return Tidegate's settings for this stack, by name."""
        kafka = {"kafka_bootstrap": self.kafka.bootstrap, "kafka_properties_file": str(self.kafka.client_properties)}
        return {
            "pg_host": "127.0.0.1",
            "pg_port": self.ports["postgres"],
            "pg_passfile": str(self.postgres.passfile),
            "spark_remote": self.spark.remote,
            "spark_token_file": str(self.spark.token_file),
            "airflow_url": self.airflow.url,
            "airflow_user": USER,
            "airflow_password_file": str(self.airflow.password_file),
            "metrics_token_file": str(self.airflow.metrics_token_file),
            **(kafka if "kafka" in self.extras else {}),
        }

    def migrate(self) -> list[str]:
        """Make the ledger, run the project's migrations and register the pipelines.

        A pipeline that cannot be imported or registered does not stop the others: a returned sentence names it, with the reason
        and what to do.
        """
        from tidegate import migrations  # noqa: PLC0415 - only the supervisor needs Alembic
        from tidegate.jobs.registry import all_pipelines  # noqa: PLC0415

        settings = Settings.load({"TIDEGATE_HOME": str(self.folder.parent)})
        declared = all_pipelines()
        specs = [pipeline.spec for pipeline in declared.pipelines]
        return [*declared.broken, *migrations.upgrade_all_but_broken(settings, specs).values()]

    def _write(self) -> None:
        content = {"folder": str(self.folder), "ports": self.ports, "extras": self.extras, "settings": self.settings()}
        components.write_whole(self.folder / "stack.json", json.dumps(content, indent=2), durable=True)

    @classmethod
    def _of(cls, folder: Path, ports: dict[str, int], extras: Collection[str]) -> "Layout":
        postgres = EmbeddedPostgres(folder, ports["postgres"])
        spark = EmbeddedSpark(folder, ports["spark"], postgres.stager_passfile)
        airflow = EmbeddedAirflow(folder, ports, postgres)
        return cls(folder, ports, postgres, spark, airflow, EmbeddedKafka(folder, ports), tuple(extras))


def spark_packages(settings: Settings, extras: Collection[str]) -> list[str]:
    """Return the Maven packages that Spark loads: those of the settings, and those that extras need in addition."""
    packages = [package.strip() for package in settings.spark_packages.split(",") if package.strip()]
    if "kafka" in extras and not any("spark-sql-kafka" in package for package in packages):
        packages += SPARK_PACKAGES
    return packages
