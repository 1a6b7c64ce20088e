"""What comes back to each shop."""

from tidegate import Count, Files, Pipeline, State, Sum

PIPELINE = Pipeline(
    name="returns",
    source=Files("data/returns", glob="*.json", format="json", schema={"shop": "string", "cents": "int"}, max_files=1),
    states={"returned": State({"shop": "text"}, {"orders": Count(), "cents": Sum("cents")}, kind="opaque", changes=True)},
    retry_delay_seconds=1,
)
