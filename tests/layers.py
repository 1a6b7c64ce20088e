"""What is left to `make soak`."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what only `make soak` runs: what is marked `soak`, and of a test that is `sampled(n)`, all but n parameters."""
    if os.environ.get("SOAK"):
        return
    left_out = {item for item in items if item.get_closest_marker("soak")}
    sampled: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if item not in left_out and (marker := item.get_closest_marker("sampled")):
            sampled.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, most), of_a_test in sampled.items():
        kept = {of_a_test[round(number * (len(of_a_test) - 1) / max(most - 1, 1))] for number in range(most)}
        left_out.update(set(of_a_test) - kept)
    items[:] = [item for item in items if item not in left_out]
