"""Settings come from the first place that has them, name that place, and hold no password."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tidegate.state_store import Settings
from tidegate.state_store.base.errors import SettingsInvalid

NAMES = [f.name for f in dataclasses.fields(Settings) if f.name != "home"]
VARIABLES = Settings.environment_names()


def value_for(name: str, number: int) -> tuple[str, Any]:
    """Return a setting's text, and the value that it is read as, different for each number."""
    setting = next(f for f in dataclasses.fields(Settings) if f.name == name)
    kind = setting.type
    if choices := setting.metadata["choices"]:
        return choices[-number % len(choices)], choices[-number % len(choices)]
    if kind is int:
        return str(1000 + number), 1000 + number
    text = f"/somewhere/{number}"
    return text, text if kind in {str, str | None} else Path(text)


def write_toml(home: Path, content: str) -> Path:
    file = home / "tidegate.toml"
    file.write_text(content)
    return file


def write_stack(home: Path, settings: dict[str, Any]) -> Path:
    file = home / ".tidegate" / "stack.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"settings": settings, "ports": {}}))
    return file


def sources(home: Path, **environ: str) -> tuple[Settings, dict[str, str]]:
    return Settings.sources({"TIDEGATE_HOME": str(home), **environ})


@pytest.mark.parametrize("name", NAMES)
def test_each_setting_comes_from_the_first_place_that_has_it(tmp_path: Path, name: str) -> None:
    default = next(f.default for f in dataclasses.fields(Settings) if f.name == name)
    found, origins = sources(tmp_path)
    assert (getattr(found, name), origins[name]) == (default, "default")

    text, value = value_for(name, 1)
    stack = write_stack(tmp_path, {name: value if isinstance(value, int) else text})
    found, origins = sources(tmp_path)
    assert (getattr(found, name), origins[name]) == (value, str(stack))

    text, value = value_for(name, 2)
    toml = write_toml(tmp_path, f"{name} = {value if isinstance(value, int) else json.dumps(text)}")
    found, origins = sources(tmp_path)
    assert (getattr(found, name), origins[name]) == (value, str(toml))

    text, value = value_for(name, 3)
    found, origins = sources(tmp_path, **{VARIABLES[name]: text})
    assert (getattr(found, name), origins[name]) == (value, f"environment {VARIABLES[name]}")


def test_a_copied_project_does_not_lead_to_the_stack_of_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "project").mkdir()
    file = write_stack(tmp_path / "project", {"pg_port": 15432})
    file.write_text(json.dumps({"folder": str(file.parent), **json.loads(file.read_text())}))
    shutil.copytree(tmp_path / "project", tmp_path / "copy")
    assert sources(tmp_path / "project")[0].pg_port == 15432
    assert sources(tmp_path / "copy")[1]["pg_port"] == "default"
    assert f"leads to the stack in {file.parent}: it was copied or moved" in caplog.text


def test_the_connection_uses_the_names_that_libpq_knows() -> None:
    expected = {
        "pg_host": "PGHOST",
        "pg_port": "PGPORT",
        "pg_database": "PGDATABASE",
        "pg_user": "PGUSER",
        "pg_passfile": "PGPASSFILE",
        "pg_require_auth": "PGREQUIREAUTH",
        "pg_sslmode": "PGSSLMODE",
        "pg_sslrootcert": "PGSSLROOTCERT",
        "pg_sslcert": "PGSSLCERT",
        "pg_sslkey": "PGSSLKEY",
    }

    assert {name: variable for name, variable in VARIABLES.items() if not variable.startswith("TIDEGATE_")} == expected
    assert len(set(VARIABLES.values())) == len(VARIABLES)


@pytest.mark.promise("error:SETTINGS_INVALID")
@pytest.mark.parametrize("raw", ["abc", -1, 1.5, True])
def test_a_value_that_is_not_a_number_is_refused_with_its_place(tmp_path: Path, raw: Any) -> None:
    file = write_toml(tmp_path, f"lock_timeout_seconds = {json.dumps(raw)}")
    with pytest.raises(SettingsInvalid) as refusal:
        sources(tmp_path)
    assert str(refusal.value) == f"lock_timeout_seconds must be a whole number of at least 1, but {file} says {raw!r}."


def test_a_setting_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    file = write_toml(tmp_path, "pg_hots = 'db'\npassword = 'secret'")
    with pytest.raises(SettingsInvalid) as refusal:
        sources(tmp_path)
    assert str(refusal.value).startswith(f"{file} has no setting password, pg_hots. Known settings: ")
    assert "pg_host" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_no_setting_is_a_password(tmp_path: Path) -> None:
    secret = "open sesame"
    found, origins = sources(tmp_path, PGPASSWORD=secret, TIDEGATE_PASSWORD=secret, TIDEGATE_AIRFLOW_PASSWORD=secret)
    assert secret not in repr(found) + repr(origins)
    assert secret not in repr(found.conninfo())
    assert "password" not in found.conninfo()
    for f in dataclasses.fields(Settings):
        if any(word in f.name for word in ("pass", "secret", "token", "key")):
            assert f.type == Path | None, f"{f.name} would hold a secret"


# -- trusted files -----------------------------------------------------------------------------------------------------


def found_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Settings, dict[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    return Settings.sources({})


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or")
def test_a_settings_file_that_all_may_write_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_toml(tmp_path, "pg_port = 1111")
    (tmp_path / "shared").mkdir()
    file = write_toml(tmp_path / "shared", "pg_port = 2222")
    file.chmod(0o646)
    found, origins = found_from(tmp_path / "shared" / "deep", monkeypatch)
    assert (found.pg_port, origins["pg_port"]) == (1111, str(tmp_path / "tidegate.toml"))
    assert f"{str(file)!r} can be written by every account, so it is ignored" in caplog.text
    assert f"export TIDEGATE_HOME={str(file.parent)!r}" in caplog.text
    assert Settings.load({"TIDEGATE_HOME": str(file.parent)}).pg_port == 2222


@pytest.mark.promise("security:another-account-that-leaves-tidegate-toml-or")
def test_a_foreign_settings_file_is_ignored_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another account: run the tests as root")
    foreign, stack, linked = tmp_path / "foreign", tmp_path / "stack", tmp_path / "linked"
    for folder in (foreign, stack, linked):
        folder.mkdir()
    os.chown(write_toml(foreign, "pg_port = 2222"), 61_000, 61_000)
    write_stack(stack, {"pg_port": 3333})
    os.chown(stack / ".tidegate", 61_000, 61_000)
    (linked / "tidegate.toml").symlink_to(write_toml(tmp_path, "pg_port = 1111"))
    os.chown(linked / "tidegate.toml", 61_000, 61_000, follow_symlinks=False)

    for folder in (foreign, foreign / "below", stack, linked):
        found, _ = found_from(folder, monkeypatch)
        assert (found.pg_port, found.home) == (1111, tmp_path), folder
    assert caplog.text.count("belongs to user 61000, so it is ignored") == 3
