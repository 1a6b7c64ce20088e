"""What executors on other machines get from this one: code, a password file, and the address at which they reach Postgres.

Executors on this machine find all of these in place. On others nothing of ours is installed: our packages, the author's modules
and the files of the connection are sent to a Spark session once, as its artifacts, and Spark fetches them to each executor. The
session's name depends on their content, so changed code gets another session. Python workers belong to a session, so none of
them ever sees both versions. For executors on this machine, a digest of the authors' code does the same.
"""

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

from tidegate.jobs import registry
from tidegate.jobs.pipeline import Pipeline
from tidegate.jobs.spark.task_connections import are_elsewhere, sent_files
from tidegate.state_store.base.errors import SettingsInvalid
from tidegate.state_store.base.settings import Settings

# What tasks import of the package; its `__init__.py` is where authors import from.
OURS = {"jobs": "**/*.py", "state_store": "**/*.py", ".": "__init__.py"}
COMPILED = (".so", ".pyd", ".dylib")
EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a ZIP file's entries
NAME = "tidegate"
PACKAGE = Path(__file__).parents[3]  # a link in a checkout is not followed


@dataclass(frozen=True)
class Artifacts:
    """Artifacts of a session: modules by their paths in an archive, and other files by their names."""

    modules: Mapping[str, bytes] = field(repr=False)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    packages: frozenset[str] = frozenset()  # they do not travel: executors must have them installed

    @cached_property
    def code(self) -> str:
        """Return the name of the archive, which is derived from its content."""
        digest = hashlib.sha256()
        for path, content in sorted(self.modules.items()):
            digest.update(f"{len(path)} {path} {len(content)} ".encode() + content)
        return f"tidegate_{digest.hexdigest()[:20]}.zip"

    @property
    def name(self) -> str:
        """Return the name of all artifacts, which has nothing secret: the names of archive, other files and packages."""
        return " ".join([self.code, *sorted(self.files), *sorted(self.packages)])

    def archive(self) -> bytes:
        """Return the modules as a ZIP file without compression: the same bytes for the same content."""
        archive = io.BytesIO()
        with ZipFile(archive, "w") as entries:
            for path, content in sorted(self.modules.items()):
                entry = ZipInfo(path, EARLIEST)
                entry.external_attr = 0o644 << 16
                entries.writestr(entry, content)
        return archive.getvalue()


def artifacts_for(settings: Settings, modules: Iterable[str] = (), packages: Iterable[str] = ()) -> Artifacts | None:
    """Return what a session needs for tasks that use these modules of authors, and packages; None if its executors are here.

    Raises: SettingsInvalid if a module cannot travel, or a file cannot be read.
    """
    if not are_elsewhere(settings):
        return None
    files = dict(_our_modules())
    for name in sorted({*modules, *further_modules(settings)}):
        files |= {path: file.read_bytes() for path, file in _sendable_files(name)}
    return Artifacts(files, dict(sent_files(settings).values()), frozenset(packages))


def further_modules(settings: Settings) -> list[str]:
    """Return the authors' modules that a setting names, because tasks need them and no pipeline shows it."""
    return [name for name in map(str.strip, settings.executor_modules.split(",")) if name]


def modules_of(pipeline: Pipeline) -> set[str]:
    """Return the author's modules that define a pipeline's transform and sources."""
    modules = {_module_of(pipeline.transform)} if pipeline.transform is not None else set()
    modules |= {type(part).__module__ for part in pipeline.source.parts.values()}
    return {name for name in modules if name.partition(".")[0] not in {NAME, *sys.stdlib_module_names, "__main__"}}


def _module_of(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return str(getattr(function, "__module__", None) or type(function).__module__)


def code_of(modules: Iterable[str]) -> str:
    """Return a digest of the files of authors' modules, and of all in the folder of pipelines, as they are now."""
    digest = hashlib.sha256()
    files = _pipelines()
    for name in modules:
        with contextlib.suppress(SettingsInvalid):  # one that is in no file does not change
            files |= dict(_files_of_module(name))
    for path, file in sorted(files.items()):
        digest.update(f"{path} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:20]


@cache
def _our_modules() -> Mapping[str, bytes]:
    """Return the files of our packages, with the project's pipelines among them.

    They are read once, because this process, too, keeps the code that it has imported.
    """
    files = (file for folder, pattern in OURS.items() for file in (PACKAGE / folder).glob(pattern))
    by_path = {f"{NAME}/{file.relative_to(PACKAGE).as_posix()}": file for file in files}
    return {path: file.read_bytes() for path, file in (by_path | _pipelines()).items()}


def _pipelines() -> dict[str, Path]:
    """Return the files in the folder of pipelines by their paths as modules; no hidden ones, such as links that Emacs makes."""
    folder = Path(registry.folder())
    inside = {file.relative_to(folder): file for file in folder.rglob("*.py") if file.is_file()}
    return {f"{NAME}/jobs/pipelines/{path.as_posix()}": file for path, file in inside.items() if not _is_hidden(path)}


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sendable_files(module: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a module, or of the outermost package that it is in."""
    for path, file in _files_of_module(module):
        if file.suffix in COMPILED:
            raise SettingsInvalid(
                f"Module {module} cannot travel to Spark's executors: {file} is compiled code. Move what runs there into a "
                "package of Python alone, and install the compiled one on the executors."
            )
        yield path, file


def _files_of_module(module: str) -> Iterator[tuple[str, Path]]:
    name, spec = _outermost_package(module)
    place = Path(spec.origin or "")
    folder = place.parent if spec.submodule_search_locations else None
    files = [place] if folder is None else [file for file in sorted(folder.rglob("*")) if file.is_file()]
    base = place.parent if folder is None else folder
    prefix = name.replace(".", "/")
    for file in files:
        inside = file.relative_to(base)
        if "__pycache__" not in inside.parts and not _is_hidden(inside):
            yield (f"{prefix}.py" if folder is None else f"{prefix}/{inside.as_posix()}"), file


def _outermost_package(module: str) -> tuple[str, ModuleSpec]:
    """Return a module's outermost package that is no namespace package: other distributions may share a namespace."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            break
        if spec.has_location and spec.origin and os.path.isfile(spec.origin):  # noqa: PTH113 - an archive's is no path
            return name, spec
    raise SettingsInvalid(
        f"Module {module} cannot travel to Spark's executors: it is in no file of its own. Write it as a module or a package; "
        "executor_modules (tidegate settings) names further ones."
    )
