"""The wheel has what the repository has; from it come the authors' names, `from tidegate import ...`."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

import tidegate
from tests.checkout import REPOSITORY, SUBPACKAGES, build_wheel, python, tracked

# Documents are read by the verbs `error`, `why` and `schema`, and by the operator's page.
PARTS = (*(f"{part}/" for part in SUBPACKAGES), "docs/errors/", "docs/json/")


@pytest.mark.promise("name:*")
def test_every_public_name_is_there_beside_packages_of_the_same_names(tmp_path: Path) -> None:
    with ZipFile(build_wheel(tmp_path)) as wheel:
        wheel.extractall(shipped := tmp_path / "shipped")
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    frontend = "tidegate/page/frontend/"
    ours = {name for name in tracked() if name.startswith("tidegate/") and not name.startswith(frontend)}
    assert found == ours | {f"tidegate/{name}" for name in tracked() if name.startswith(PARTS)}
    image = (REPOSITORY / "compose/Dockerfile").read_text()
    assert [part for part in (*SUBPACKAGES, "tidegate") if f"COPY {part} {part}\n" not in image] == []
    for package in SUBPACKAGES:
        (tmp_path / "other" / package).mkdir(parents=True)
        (tmp_path / "other" / package / "__init__.py").write_text("HERE = 'another project'\n")
    loaded = f"[__import__(name).HERE for name in {SUBPACKAGES!r}]"
    program = f"from tidegate import {', '.join(tidegate.__all__)}; import json; from tidegate import jobs, migrations; "
    program += f"print(json.dumps([jobs.__file__, batch_dag.__module__, {loaded}]))"
    done = python(program, tmp_path, path=(tmp_path / "other", shipped))
    assert done.returncode == 0, done.stderr
    others = ["another project"] * len(SUBPACKAGES)
    expected = [str(shipped / "tidegate/jobs/__init__.py"), "tidegate.dags.batch_dag", others]
    assert json.loads(done.stdout.splitlines()[-1]) == expected
