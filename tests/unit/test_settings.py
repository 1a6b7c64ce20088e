"""Settings come from the first place that has them, name that place, and hold no password."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tidegate.doctor_checks import _witness
from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SettingsInvalid

FIELDS = [field for field in dataclasses.fields(Settings) if field.name != "home"]
VARIABLES = Settings.environment_names()


def value_for(field: dataclasses.Field[Any], number: int) -> Any:
    """Return a setting's value, different for each number."""
    if choices := field.metadata["choices"]:
        return choices[-number % len(choices)]
    if field.type is int:
        return 1000 + number
    return (str if field.type in {str, str | None} else Path)(f"/somewhere/{number}")


def write_toml(home: Path, content: str) -> Path:
    home.mkdir(exist_ok=True)
    (file := home / "tidegate.toml").write_text(content)
    return file


def write_stack(home: Path, **content: Any) -> Path:
    file = home / ".tidegate" / "stack.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"ports": {}, **content}, default=str))
    return file


def sources(home: Path, **environ: str) -> tuple[Settings, dict[str, str]]:
    return Settings.sources({"TIDEGATE_HOME": str(home), **environ})


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_each_setting_comes_from_the_first_place_that_has_it(tmp_path: Path, field: dataclasses.Field[Any]) -> None:
    def check(value: Any, origin: object, **environ: str) -> None:
        found, origins = sources(tmp_path, **environ)
        assert (getattr(found, field.name), origins[field.name]) == (value, str(origin))

    check(field.default, "default")
    first, second, third = (value_for(field, number) for number in (1, 2, 3))
    check(first, write_stack(tmp_path, settings={field.name: first}))
    check(second, write_toml(tmp_path, f"{field.name} = {json.dumps(second, default=str)}"))
    variable = VARIABLES[field.name]
    check(third, f"environment {variable}", **{variable: str(third)})


def test_a_copied_project_does_not_lead_to_the_stack_of_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = str(tmp_path / "project/.tidegate")
    write_stack(tmp_path / "project", settings={"pg_port": 15432}, folder=folder)
    shutil.copytree(tmp_path / "project", tmp_path / "copy")
    assert sources(tmp_path / "project")[0].pg_port == 15432
    assert sources(tmp_path / "copy")[1]["pg_port"] == "default"
    assert f"leads to the stack in {folder}: it was copied or moved" in caplog.text


def test_the_connection_uses_the_names_that_libpq_knows() -> None:
    short = ("host", "port", "database", "user", "passfile", "sslmode", "sslrootcert", "sslcert", "sslkey")
    expected = {f"pg_{name}": f"PG{name.upper()}" for name in short} | {"pg_require_auth": "PGREQUIREAUTH"}
    assert {name: variable for name, variable in VARIABLES.items() if not variable.startswith("TIDEGATE_")} == expected
    assert len(set(VARIABLES.values())) == len(VARIABLES)


@pytest.mark.promise("error:SETTINGS_INVALID")
@pytest.mark.parametrize("raw", ["abc", -1, 1.5, True, 2_147_484])
def test_a_value_that_is_not_a_number_is_refused_with_its_place(tmp_path: Path, raw: Any) -> None:
    file = write_toml(tmp_path, f"lock_timeout_seconds = {json.dumps(raw)}")
    said = f"lock_timeout_seconds must be a whole number from 1 to 2147483, but {file} says {raw!r}."
    with pytest.raises(SettingsInvalid, match=f"^{re.escape(said)}$"):
        sources(tmp_path)


def test_a_path_of_an_account_that_there_is_not_is_refused_with_its_place(tmp_path: Path) -> None:
    said = "pg_passfile must be the path .* but environment PGPASSFILE says '~nosuchaccount/x'"
    with pytest.raises(SettingsInvalid, match=said):
        sources(tmp_path, PGPASSFILE="~nosuchaccount/x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second account")
def test_what_is_in_a_closed_folder_is_not_there_and_a_witness_cannot_be_written(tmp_path: Path) -> None:
    os.setresuid(65_534, 65_534, 0)
    try:
        assert not Settings(airflow_password_file=tmp_path / "secrets" / "password").has_airflow
        assert [*_witness(Settings(witness_folder=tmp_path / "closed" / "witness"))]
    finally:
        os.setresuid(0, 0, 0)


def test_a_setting_that_does_not_exist_is_refused_with_those_that_do_and_none_is_a_password(tmp_path: Path) -> None:
    secret = "open sesame"
    found, origins = sources(tmp_path, PGPASSWORD=secret, TIDEGATE_PASSWORD=secret, TIDEGATE_AIRFLOW_PASSWORD=secret)
    assert secret not in f"{found!r} {origins!r} {found.conninfo()!r}"
    assert "password" not in found.conninfo()
    for field in FIELDS:
        if any(word in field.name for word in ("pass", "secret", "token", "key")):
            assert field.type == Path | None, f"{field.name} would hold a secret"
    file = write_toml(tmp_path, f"pg_hots = 'db'\npassword = '{secret}'")
    with pytest.raises(SettingsInvalid) as refusal:
        sources(tmp_path)
    assert str(refusal.value).startswith(f"{file} has no setting password, pg_hots. Known settings: ")
    assert "pg_host" in str(refusal.value)
    assert secret not in str(refusal.value)


def found_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, dict[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    return Settings.sources({})


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or")
def test_a_settings_file_that_all_may_write_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own, file = write_toml(tmp_path, "pg_port = 1111"), write_toml(tmp_path / "shared", "pg_port = 2222")
    file.chmod(0o646)
    found, origins = found_from(tmp_path / "shared" / "deep", monkeypatch)
    assert (found.pg_port, origins["pg_port"]) == (1111, str(own))
    assert f"{str(file)!r} can be written by every account, so it is ignored" in caplog.text
    assert f"export TIDEGATE_HOME={str(file.parent)!r}" in caplog.text
    assert Settings.load({"TIDEGATE_HOME": str(file.parent)}).pg_port == 2222


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another account: run the tests as root")
def test_a_foreign_settings_file_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    foreign, stack, linked = tmp_path / "foreign", tmp_path / "stack", tmp_path / "linked/tidegate.toml"
    os.chown(write_toml(foreign, "pg_port = 2222"), 61_000, 61_000)
    os.chown(write_stack(stack, settings={"pg_port": 3333}).parent, 61_000, 61_000)
    linked.parent.mkdir()
    linked.symlink_to(write_toml(tmp_path, "pg_port = 1111"))
    os.chown(linked, 61_000, 61_000, follow_symlinks=False)
    for folder in (foreign, foreign / "below", stack, linked.parent):
        found, _ = found_from(folder, monkeypatch)
        assert (found.pg_port, found.home) == (1111, tmp_path), folder
    assert caplog.text.count("belongs to user 61000, so it is ignored") == 3
