"""A pipeline over a table, which each machine's project declares and tasks of Airflow import."""

from tidegate.jobs import Count, Pipeline, PostgresTable, State, Sum

ROWS, PER_BATCH = 80_000, 10_000
SCHEMA = {"id": "bigint", "shop": "string", "cents": "int"}
PIPELINE = Pipeline(
    "sales",
    PostgresTable(table="sales", key="id", schema=SCHEMA, max_rows=PER_BATCH, wait_seconds=1),
    {"per_shop": State({"shop": "text"}, {"sales": Count(), "cents": Sum("cents")})},
)
TABLE = """
    CREATE TABLE public.sales (id bigserial PRIMARY KEY, shop text, cents int);
    INSERT INTO public.sales (shop, cents) SELECT 'shop ' || n %% 100, n %% 977 FROM generate_series(1, %(rows)s) AS n;
    GRANT SELECT ON public.sales TO tidegate_stager;
    GRANT SELECT ON SEQUENCE public.sales_id_seq TO tidegate_stager;
    GRANT USAGE ON SCHEMA public TO tidegate_stager;
"""
COUNTED = "SELECT shop, sales, cents FROM state.per_shop ORDER BY shop"
BY_HAND = "SELECT shop, count(*), sum(cents) FROM public.sales GROUP BY shop ORDER BY shop"
