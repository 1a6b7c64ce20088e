"""The wheel has the files of the repository's packages: all of them, and no others."""

from pathlib import Path
from zipfile import ZipFile

from tests.checkout import SUBPACKAGES, build_wheel, tracked

# Read by the verbs `error`, `why` and `schema`, and by the operator's page.
DOCUMENTS = ("docs/errors/", "docs/json/")
SOURCES_OF_THE_PAGE = "tidegate/page/frontend/"


def test_the_wheel_has_what_the_repository_has(tmp_path: Path) -> None:
    with ZipFile(build_wheel(tmp_path)) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"tidegate/{name}" for name in tracked() if name.startswith((*(f"{part}/" for part in SUBPACKAGES), *DOCUMENTS))
    }
    expected |= {name for name in tracked() if name.startswith("tidegate/") and not name.startswith(SOURCES_OF_THE_PAGE)}
    assert found == expected
