"""Stars per shop; a day whose file cannot be read is left out."""

from tidegate import Count, Files, Pipeline, State, Sum

PIPELINE = Pipeline(
    name="ratings",
    source=Files("data/ratings", glob="*.json", format="json", schema={"shop": "string", "stars": "int"}),
    states={"rating": State(key={"shop": "text"}, aggregates={"ratings": Count(), "stars": Sum("stars")})},
    on_poison="skip",
    tries=1,
)
