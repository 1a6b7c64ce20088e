"""Where an embedded stack keeps its things and which ports it uses; what both `up` and the supervisor need to know."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from state_store.settings import STACK_FOLDER, Settings
from tidegate.stack import component as components
from tidegate.stack.airflow import USER, EmbeddedAirflow
from tidegate.stack.postgres import EmbeddedPostgres
from tidegate.stack.spark import EmbeddedSpark

USUAL_PORTS = {
    "postgres": 15432,  # not 5432, where an installed Postgres may come and go
    "spark": 15002,
    "airflow": 8080,
}


@dataclass(frozen=True)
class Layout:
    """The parts of one stack."""

    folder: Path
    ports: dict[str, int]
    postgres: EmbeddedPostgres
    spark: EmbeddedSpark
    airflow: EmbeddedAirflow

    @classmethod
    def load(cls, home: Path) -> "Layout":
        """Return the layout that `choose` wrote down."""
        content = json.loads((home / STACK_FOLDER / "stack.json").read_text())
        return cls._of(home / STACK_FOLDER, content["ports"])

    @classmethod
    def choose(cls, home: Path, until: contextlib.ExitStack) -> "Layout":
        """Choose ports, the ones of last time if they are free, and write the settings that lead to them.

        The ports are this stack's until `until` closes.
        """
        folder = home / STACK_FOLDER
        folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        try:
            wanted = json.loads((folder / "stack.json").read_text())["ports"]
        except (OSError, ValueError, KeyError):
            wanted = USUAL_PORTS
        ports = {name: components.reserve_port(wanted.get(name, usual), until) for name, usual in USUAL_PORTS.items()}
        layout = cls._of(folder, ports)
        components.write_whole(folder / "stack.json", json.dumps({"ports": ports, "settings": layout.settings()}, indent=2))
        return layout

    def settings(self) -> dict[str, str | int]:
        """Return Tidegate's settings for this stack, by their names."""
        return {
            "pg_host": "127.0.0.1",
            "pg_port": self.ports["postgres"],
            "pg_passfile": str(self.postgres.passfile),
            # Spark's client sends a token without TLS to this very name only, not to 127.0.0.1.
            "spark_remote": f"sc://localhost:{self.ports['spark']}",
            "spark_token_file": str(self.spark.token_file),
            "airflow_url": self.airflow.url,
            "airflow_user": USER,
            "airflow_password_file": str(self.airflow.password_file),
        }

    def migrate(self) -> None:
        """Bring Tidegate's own tables to this code's revision and register the pipelines."""
        import migrations  # noqa: PLC0415 - Alembic is for the supervisor only
        from jobs.registry import all_pipelines  # noqa: PLC0415

        settings = Settings.load({"TIDEGATE_HOME": str(self.folder.parent)})
        migrations.upgrade(settings, [pipeline.spec for pipeline in all_pipelines()])

    @classmethod
    def _of(cls, folder: Path, ports: dict[str, int]) -> "Layout":
        postgres = EmbeddedPostgres(folder, ports["postgres"])
        spark = EmbeddedSpark(folder, ports["spark"], postgres.stager_passfile)
        return cls(folder, ports, postgres, spark, EmbeddedAirflow(folder, ports, ports["postgres"], postgres.passfile))
