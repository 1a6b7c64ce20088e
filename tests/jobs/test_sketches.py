"""Sketches: the same bits in any split and order of the rows, and estimates as close to the truth as they say."""

import math
import random
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from tests.jobs.conftest import Tables, table_of
from tidegate.jobs import ApproxDistinct, ApproxQuantiles, Count, State
from tidegate.jobs.aggregates import Aggregate
from tidegate.state_store import StateStore

CHANCES = {"p05": Decimal("0.05"), "p50": Decimal("0.5"), "p999": Decimal("0.999")}
PROBABILITIES = [*map(str, CHANCES.values())]
AGGREGATES: dict[str, Aggregate] = {
    "lines": Count(),
    "different": ApproxDistinct("n", "bigint"),
    "texts": ApproxDistinct("label", "text", error=0.02),
    "sizes": ApproxQuantiles("n", 10**12, probabilities=PROBABILITIES, signed=True),
    "prices": ApproxQuantiles("price", 1000, "numeric(10,2)", PROBABILITIES, error=0.05),
}
SCHEMA = {"name": "string", "n": "bigint", "label": "string", "price": "decimal(10,2)"}
Row = tuple[str, int | None, str | None, Decimal | None]


def rows_of(rng: random.Random, count: int) -> list[Row]:
    """Return random rows with NULLs, repeated values, both ends of the types, and values beyond every range."""

    def known(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    return [
        (
            rng.choice(["a", "b", "only NULL"]),
            known(
                rng.choice(
                    [0, -1, 1, 2**63 - 1, -(2**63), 10**12, 10**12 + 1, rng.randint(-(10**6), 10**6), rng.randint(0, 99)]
                )
            ),
            known(rng.choice(["", "NULL", "𝄞", "a", str(rng.randint(0, 500))])),
            known(Decimal(rng.choice([0, -1, 1, 100_000, 100_001, rng.randint(0, 10**7)])).scaleb(-2)),
        )
        for _ in range(count)
    ]


def exact_quantile(values: list[Decimal], chance: Decimal) -> Decimal | None:
    return sorted(values)[math.ceil(chance * len(values)) - 1] if values else None


def check_quantiles(row: dict[str, Any], name: str, values: list[Decimal], *, most: int, error: str, signed: bool) -> None:
    """Compare each estimate with the exact quantile; beyond the range, there is none."""
    for suffix, chance in CHANCES.items():
        exact, found = exact_quantile(values, chance), row[f"{name}_{suffix}"]
        if exact is None or exact > most or exact < (-most if signed else 0):
            assert found is None, (name, suffix, exact, found)
        else:
            assert found is not None, (name, suffix, exact)
            assert abs(found - exact) <= abs(exact) * Decimal(error), (name, suffix, exact, found)


@pytest.mark.promise("decision:0033")
def test_any_split_of_the_rows_gives_the_same_bits(tables: Tables) -> None:
    rng = random.Random("sketches")
    rows = [row if row[0] != "only NULL" else (row[0], None, None, None) for row in rows_of(rng, 300)]
    cuts = sorted(rng.sample(range(1, len(rows)), 2))
    batches = [rows[start:end] for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    states = {"per_name": State(key={"name": "text"}, aggregates=AGGREGATES), "overall": State(aggregates=AGGREGATES)}
    pipeline = tables.declare_over(SCHEMA, None, states=states)
    tables.put(table_of(SCHEMA, []))
    tables.run(pipeline, "empty")
    (found,) = tables.rows(pipeline, "overall")
    names = ("lines", "different", "texts", "sizes_p50", "prices_p999")
    assert [found[name] for name in names] == [0, 0, 0, None, None]
    once = [(f"once {name}", *values) for name, *values in rng.sample(rows, len(rows))]
    tables.put_rows(SCHEMA, *batches[:2], [], *batches[2:], once)
    tables.run_mixed(pipeline, ["chosen", "safe"])
    found = {row["name"]: row for row in tables.rows(pipeline)}
    assert tables.rows(pipeline, "overall")[0]["lines"] == 2 * len(rows)
    for name in ("a", "b", "only NULL"):
        assert found[name] | {"name": f"once {name}"} == found[f"once {name}"]
        numbers, labels, prices = ([row[at] for row in rows if row[0] == name and row[at] is not None] for at in (1, 2, 3))
        assert abs(found[name]["different"] - len(set(numbers))) <= 3
        assert abs(found[name]["texts"] - len(set(labels))) <= 3
        assert (sum(found[name]["sizes_counts"]), sum(found[name]["prices_counts"])) == (len(numbers), len(prices))
        check_quantiles(found[name], "sizes", [*map(Decimal, numbers)], most=10**12, error="0.01", signed=True)
        check_quantiles(found[name], "prices", prices, most=1000, error="0.05", signed=False)


DRAWN: dict[str, Callable[[random.Random], float]] = {
    "even": lambda rng: rng.uniform(0, 1_000_000),
    "exponential": lambda rng: rng.expovariate(1 / 300),
    "heavy tail": lambda rng: min(rng.paretovariate(1), 900_000),
    "two peaks": lambda rng: rng.gauss(1000, 5) if rng.random() < 0.5 else rng.gauss(400_000, 1000),
    "few": lambda rng: float(rng.choice([1, 10, 100])),
}


@pytest.mark.promise("decision:0033")
def test_estimates_are_as_close_as_they_say(tables: Tables) -> None:
    rng = random.Random(5)
    values = {
        name: [Decimal(draw(rng)).quantize(Decimal("0.01"), ROUND_HALF_UP) for _ in range(4_000)]
        for name, draw in DRAWN.items()
    }
    rows: list[Row] = [(name, None, str(value), value) for name, drawn in values.items() for value in drawn]
    sizes = [1, 2, 10, 30, 100, 300, 1000, 3000, 10_000]
    rows += [(f"{size} different", n % size, None, None) for size in sizes for n in range(size)]
    aggregates: dict[str, Aggregate] = {
        "different": ApproxDistinct("n", "bigint"),
        "texts": ApproxDistinct("label", "text", error=0.02),
        "prices": ApproxQuantiles("price", 1_000_000, "numeric(10,2)", PROBABILITIES),
    }
    pipeline = tables.declare_over(SCHEMA, State(key={"name": "text"}, aggregates=aggregates))
    rng.shuffle(rows)
    tables.put_rows(SCHEMA, rows[::2], rows[1::2])
    tables.run(pipeline)
    found = {row["name"]: row for row in tables.rows(pipeline)}
    for name, drawn in values.items():
        check_quantiles(found[name], "prices", drawn, most=1_000_000, error="0.01", signed=False)
        assert abs(found[name]["texts"] / len(set(drawn)) - 1) <= 3 * 0.02, name
    errors = [found[f"{size} different"]["different"] / size - 1 for size in sizes]
    assert max(map(abs, errors)) <= 3 * 0.03, errors
    assert [found[f"{size} different"]["different"] for size in (1, 2, 10)] == [1, 2, 10]
    of_all = sa.text("SELECT tidegate.distinct_of(tidegate.bits_of_all(different_bits)) FROM state.per_name")
    with StateStore.connect(tables.settings, user=tables.settings.pg_reader) as store, store.engine.connect() as connection:
        assert abs(connection.scalar(of_all) / max(sizes) - 1) <= 3 * 0.03
