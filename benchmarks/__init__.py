"""Benchmarks: how fast Tidegate is, beside an alternative that is measured in the same run.

`python -m benchmarks` runs them.

    harness     figures; their table, the file of the latest ones, the plots
    project     a stack for the benchmarks, with Airflow, and their pipelines
    peer        the Structured Streaming job that Tidegate is compared with
    the others  one module per question, listed in `__main__`

Every bar is a ratio of two measurements, taken alternately on the same machine, with the same data and the same server.
Each benchmark also checks its results. No test asserts a time.
"""
