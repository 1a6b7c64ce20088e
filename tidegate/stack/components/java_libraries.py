"""Java libraries from Maven Central, fetched once per user by the Ivy that pyspark ships.

The cache holds complete sets only: each is fetched into a temporary folder and renamed when nothing is missing.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tidegate.stack.components.spark import java_program, spark_home
from tidegate.stack.machine.private_files import check_installed
from tidegate.state_store.base.errors import PermanentError, SettingsInvalid

COORDINATES = re.compile(r"([\w.-]+):([\w.-]+):([\w.-]+)")
PINS = Path(__file__).with_name("jars.sha256")
# Hadoop's S3 client asks for all of Amazon's SDK in one jar of 600 MB; packages that name modules of it get only these.
AMAZON = "software.amazon.awssdk"
FETCH_SECONDS, CONNECT_MILLISECONDS = 600, 10_000
SERVER_ERROR = re.compile(r"Server access error at url \S+ \((.+)\)")

Teller = Callable[[str], None]


def spark_jars(packages: Sequence[str]) -> list[Path]:
    """Return the jars of fetched packages that Spark does not ship itself: it copies each whenever it starts."""
    shipped = {_artifact(jar) for jar in (spark_home() / "jars").glob("*.jar")}
    fetched = sorted(folder(packages).glob("*.jar")) if packages else []
    return [jar for jar in fetched if _artifact(jar) not in shipped]


def print_spark_jars(packages: str) -> None:
    """Fetch comma-separated packages and print the jars that Spark has to load, with commas too, for compose/entrypoint.sh."""
    requested = packages.split(",")
    try:
        fetch(requested)
    except PermanentError as error:
        sys.exit(str(error))
    sys.stdout.write(",".join(map(str, spark_jars(requested))))


def folder(packages: Sequence[str]) -> Path:
    """Return the folder for the jars of these packages: one for all, because they agree on versions."""
    first = "-".join(packages[0].split(":")[1:])
    return _cache() / f"{first}-{hashlib.sha256(','.join(packages).encode()).hexdigest()[:12]}"


def fetch(packages: Sequence[str], tell: Teller = lambda _text: None) -> None:
    """Put packages, given as ``group:artifact:version``, and their dependencies into the cache; quick if they are there.

    Waits for other processes that fetch the same. If a process dies, the next one fetches again.

    The stack's own packages must have the checksums in jars.sha256. Other packages of `spark_packages` have none there: Ivy
    compares them with the repository's checksums.

    Raises: SettingsInvalid (no coordinates), PermanentError (they cannot be fetched, have wrong checksums, or belong to another
    account), which says what to do.
    """
    if wrong := [package for package in packages if not COORDINATES.fullmatch(package)]:
        raise SettingsInvalid(f"{wrong[0]!r} is no Maven package: write group:artifact:version.")
    if not packages:
        return
    target = folder(packages)
    if target.is_dir():
        check_installed(target)
        return
    with _locked(target):
        if not target.is_dir():
            tell(f"Fetching {', '.join(packages)} from Maven Central, this once")
            for left_over in target.parent.glob(f"{target.name}.unfinished-*"):
                shutil.rmtree(left_over, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{target.name}.unfinished-", dir=target.parent) as unfinished:
                _resolve(packages, Path(unfinished), target)
                _check(Path(unfinished) / "jars", packages)
                (Path(unfinished) / "jars").rename(target)


def _check(fetched: Path, packages: Sequence[str]) -> None:
    """Compare jars with the known checksums; if all packages are known, every jar must be known too.

    Raises: PermanentError.
    """
    pinned = {name: digest for digest, name in map(str.split, PINS.read_text().splitlines())}
    is_ours = all("{1}-{2}.jar".format(*package.split(":")) in pinned for package in packages)
    for jar in sorted(fetched.glob("*.jar")):
        with jar.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        if pinned.get(jar.name, None if is_ours else digest) != digest:
            raise PermanentError(
                f"{jar.name} is not what it has to be: its SHA-256 is {digest}, {PINS.name} has "
                f"{pinned.get(jar.name, 'no such file')}. It was thrown away. Fetch from another network; if that gives the "
                "same, do not use it, and report it (SECURITY.md)."
            )


def _resolve(packages: Sequence[str], workplace: Path, target: Path) -> None:
    named = [package.split(":") for package in packages]
    # In the order that Ivy's schema demands.
    dependencies = [f'<dependency org="{g}" name="{a}" rev="{v}" conf="default->default"/>' for g, a, v in named]
    if any(group == AMAZON for group, _, _ in named):
        dependencies.append(f'<exclude org="{AMAZON}" module="bundle"/>')
    # As in Maven, a requested version wins over a transitive one; Ivy would take the newer.
    dependencies += [f'<override org="{g}" module="{a}" rev="{v}" matcher="exact"/>' for g, a, v in named]
    (workplace / "ivy.xml").write_text(
        '<ivy-module version="2.0"><info organisation="tidegate" module="packages"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{"".join(dependencies)}</dependencies>'
        "</ivy-module>"
    )
    options = [f"-Dsun.net.client.defaultConnectTimeout={CONNECT_MILLISECONDS}", f"-Divy.default.ivy.user.dir={workplace}"]
    # A private cache: two Ivys that share one would read each other's half-written files. Relative paths, because Ivy would
    # read the user's folder as a pattern.
    command = [java_program(), *options, "-jar", _ivy(), "-ivy", "ivy.xml", "-cache", "cache", "-confs", "default"]
    command += ["-types", "jar", "bundle", "-retrieve", "jars/[artifact]-[revision](-[classifier]).[ext]"]
    advice = (
        "Connect this machine to Maven Central once (behind a proxy: set JAVA_TOOL_OPTIONS=-Dhttps.proxyHost=... "
        f"-Dhttps.proxyPort=...), or copy {target} from a machine that has it; then try again."
    )
    try:
        done = subprocess.run(  # noqa: S603 - our own command, no shell
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=FETCH_SECONDS,
            env={**os.environ, "LC_ALL": "C.UTF-8"},  # or Java cannot open files in folders with umlauts
            cwd=workplace,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PermanentError(f"{', '.join(packages)} could not be fetched within {FETCH_SECONDS} s. {advice}") from error
    if done.returncode:
        output = done.stdout + done.stderr
        if unreachable := SERVER_ERROR.search(output):
            reason = unreachable[1]
        elif missing := re.search(r":: (\S+): not found", output):
            reason = f"{missing[1]} is not there"
        else:
            found = re.search(r".*Exception.*", output) or re.search(r"\S.*\s*\Z", output)
            why = found[0].strip() if found else f"exit code {done.returncode}"
            raise PermanentError(f"Ivy could not collect {', '.join(packages)}: {why}")
        raise PermanentError(f"{', '.join(packages)} cannot be fetched from Maven Central: {reason}. {advice}")


def _artifact(jar: Path) -> str:
    return re.sub(r"-\d[^-]*\.jar$", "", jar.name)


def _ivy() -> Path:
    found = sorted(spark_home().glob("jars/ivy-*.jar"))
    if not found:
        raise PermanentError("Spark's Ivy is missing. Install pyspark again; in a checkout: make setup")
    return found[-1]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidegate" / "jars"


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock for these packages; it ends with the process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
