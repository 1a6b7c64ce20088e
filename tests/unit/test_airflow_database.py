"""The password of Airflow's asynchronous connection, wherever a machine keeps it."""

from pathlib import Path

import pytest

from tidegate.stack.components.airflow_login import ADDRESS_VARIABLE, password


@pytest.fixture
def passfile(tmp_path: Path) -> Path:
    file = tmp_path / "pgpass"
    file.write_text("other:*:*:airflow:wrong\ndb.example:5432:*:airflow:from the file\n")
    return file


def test_the_address_may_have_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, "postgresql+asyncpg://airflow:p%40ss@db.example/airflow")
    assert password() == "p@ss"


def test_the_address_may_name_a_file_and_else_the_environment_does(monkeypatch: pytest.MonkeyPatch, passfile: Path) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, f"postgresql+asyncpg://airflow@db.example/airflow?passfile={passfile}")
    assert password() == "from the file"
    monkeypatch.setenv(ADDRESS_VARIABLE, "postgresql+asyncpg://airflow@db.example/airflow")
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    assert password() == "from the file"
    monkeypatch.delenv("PGPASSFILE")
    with pytest.raises(LookupError, match="PGPASSFILE is not set"):
        password()
