"""Sketches: the same bits in any split and order of the rows, and estimates as close to the truth as they say."""

import math
import random
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa

from tests.jobs.conftest import Tables
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


def row_of(rng: random.Random) -> Row:
    """Return a random row: with NULLs, repeated values, both ends of the types, and values beyond every range."""
    ends = [0, -1, 1, 2**63 - 1, -(2**63), 10**12, 10**12 + 1]
    values = (
        rng.choice([*ends, rng.randint(-(10**6), 10**6), rng.randint(0, 99)]),
        rng.choice(["", "NULL", "𝄞", "a", str(rng.randint(0, 500))]),
        Decimal(rng.choice([0, -1, 1, 100_000, 100_001, rng.randint(0, 10**7)])).scaleb(-2),
    )
    name = rng.choice(["a", "b", "only NULL"])
    return (name, *(None if name == "only NULL" or rng.random() < 0.1 else value for value in values))  # type: ignore[return-value]


def check_quantiles(row: dict[str, Any], name: str, values: list[Decimal], *, least: int, most: int, error: str) -> None:
    """Compare each estimate with the exact quantile; beyond the range, there is none."""
    for suffix, chance in CHANCES.items():
        exact = sorted(values)[math.ceil(chance * len(values)) - 1] if values else None
        found = row[f"{name}_{suffix}"]
        if exact is None or not least <= exact <= most:
            assert found is None, (name, suffix, exact, found)
        else:
            assert found is not None, (name, suffix, exact)
            assert abs(found - exact) <= abs(exact) * Decimal(error), (name, suffix, exact, found)


@pytest.mark.promise("decision:0033")
def test_any_split_of_the_rows_gives_the_same_bits_whose_estimates_are_as_close_as_they_say(tables: Tables) -> None:
    rng = random.Random("sketches")
    rows = [row_of(rng) for _ in range(300)]
    rows += [("many", n, str(n % 3000), round(Decimal(min(rng.paretovariate(1), 900)), 2)) for n in range(10_000)]
    rng.shuffle(rows)
    states = {"per_name": State(key={"name": "text"}, aggregates=AGGREGATES), "overall": State(aggregates=AGGREGATES)}
    pipeline = tables.declare_over(SCHEMA, None, states=states)
    tables.put_rows(SCHEMA, [])
    tables.run(pipeline, "empty")
    (found,) = tables.rows(pipeline, "overall")
    names = ("lines", "different", "texts", "sizes_p50", "prices_p999")
    assert [found[name] for name in names] == [0, 0, 0, None, None]
    once = [(f"once {name}", *values) for name, *values in rng.sample(rows, len(rows))]
    tables.put_rows(SCHEMA, rows[:40], rows[40:5000], [], rows[5000:], once)
    tables.run_mixed(pipeline, ["chosen", "safe"])
    found = {row["name"]: row for row in tables.rows(pipeline)}
    assert tables.rows(pipeline, "overall")[0]["lines"] == 2 * len(rows)
    for name in ("a", "b", "only NULL", "many"):
        assert found[name] | {"name": f"once {name}"} == found[f"once {name}"]
        numbers, labels, prices = ([row[at] for row in rows if row[0] == name and row[at] is not None] for at in (1, 2, 3))
        assert abs(found[name]["different"] - len(set(numbers))) <= max(3, 3 * 0.03 * len(set(numbers)))
        assert abs(found[name]["texts"] - len(set(labels))) <= max(3, 3 * 0.02 * len(set(labels)))
        assert (sum(found[name]["sizes_counts"]), sum(found[name]["prices_counts"])) == (len(numbers), len(prices))
        check_quantiles(found[name], "sizes", [*map(Decimal, numbers)], least=-(10**12), most=10**12, error="0.01")
        check_quantiles(found[name], "prices", prices, least=0, most=1000, error="0.05")
    of_all = sa.text("SELECT tidegate.distinct_of(tidegate.bits_of_all(different_bits)) FROM state.per_name")
    with StateStore.connect(tables.settings, user=tables.settings.pg_reader) as store, store.engine.connect() as connection:
        assert abs(connection.scalar(of_all) / len({row[1] for row in rows} - {None}) - 1) <= 3 * 0.03
