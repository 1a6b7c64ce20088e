"""The register of promises: nothing leaves it, and nothing comes into it, unseen."""

import re
from collections import Counter

from tests import promises
from tests.checkout import REPOSITORY


def test_what_lacks_a_test_or_a_promise_is_named() -> None:
    found = {name: promises.Promise("it is kept") for name in ("I4", "I5", "limit:WINDOW", "error:TOO_MUCH")}
    marks = [("one", "I4"), ("two (soak)", "I5"), ("three", "error:*"), ("four", "limit:WIDTH")]
    assert promises.hold(found, marks) == ["four is marked with limit:WIDTH, which is no promise."]
    named = [said.partition(":")[0] for said in promises.compare(found)]
    assert named == ["limit", "error", "I5 is an invariant, and only make soak tests it"]


def test_no_line_of_a_source_is_left_out() -> None:
    counts = Counter(map(promises.kind_of, promises.promises(REPOSITORY)))
    for kind, file, pattern in (
        ("invariant", "docs/protocol.md", r"^- \*\*I\d+ "),
        ("limit", "docs/limits.md", r"^\| (?!limit \|)"),
        ("security", "SECURITY.md", r"^\| (?!Attacker)"),
        ("performance", "docs/performance.md", r"^\| (?!shortcut|design|one record|one batch|pipelined).*\|$"),
    ):
        assert counts[kind] == len(re.findall(pattern, (REPOSITORY / file).read_text(), re.MULTILINE)), kind
    assert counts["error"] == len(list((REPOSITORY / "docs/errors").glob("*.md"))) - 1  # README.md
    assert counts["json"] == len(list((REPOSITORY / "docs/json").glob("*.json")))
    faults = (REPOSITORY / "docs/protocol.md").read_text().partition("## Faults")[2].partition("Each is tested")[0]
    rows = [line.split("|")[2:5] for line in faults.splitlines() if line.startswith("|")][2:]
    assert counts["fault"] == sum(bool(cell.strip()) for row in rows for cell in row)
