"""Benchmarks: how fast Tidegate is, always beside something else in the same run; `python -m benchmarks` runs them.

    harness     what a figure is, and the table, the history and the plots that are made of them
    project     a stack of the benchmarks' own, with Airflow, and the pipelines below it
    peer        the job in Structured Streaming that we are compared with
    the others  one module for each question, named in `__main__`

Every bar is a ratio of two things that were measured in turn on the same machine, with the same data and the same server.
Each benchmark also checks that what it timed is right. No test asserts a time.
"""
