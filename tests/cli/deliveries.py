"""A pipeline of two inputs that are joined with a reference, whose bad records are set aside, with a history of NULL keys."""

from typing import Any

from tidegate.jobs import Count, Files, History, Inputs, Pipeline, Reference, State, Sum


def priced(inputs: Any) -> Any:
    """Unite the inputs, and look up prices."""
    sent = inputs["west"].unionByName(inputs["east"].selectExpr("item", "parts AS pieces", "at"))
    return sent.join(inputs["prices"], "item", "left").selectExpr("item", "pieces * coalesce(price, 0) AS cents", "price", "at")


DELIVERIES = Pipeline(
    name="deliveries",
    source=Inputs(
        {
            "west": Files("data/west", format="csv", schema={"item": "string", "pieces": "int", "at": "timestamp"}),
            "east": Files("data/east", format="json", schema={"item": "string", "parts": "int", "at": "timestamp"}),
            "prices": Reference(Files("data/prices", format="csv", schema={"item": "string", "price": "int"})),
        }
    ),
    transform=priced,
    states={
        "per_item": State(key={"item": "text"}, aggregates={"sent": Count(), "cents": Sum("cents")}, null_keys=True),
        "price_history": History(
            key={"item": "text"}, columns={"price": "integer"}, order_by={"at": "timestamptz"}, null_keys=True
        ),
    },
    check={"east": {"some": "parts > 0"}},
    on_poison="quarantine",
)
