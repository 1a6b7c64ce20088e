"""Mutants: faults that are planted on purpose, one at a time, to see that a test of behaviour notices each.

    make mutants                                   all of them
    python -m tests.mutants --room commit          those of one file of the catalogue; `protocol`: of its first eleven
    python -m tests.mutants NAME ...               some of them
    python -m tests.mutants --budget 30            begins none after so many minutes

A fault that no longer applies, one that nothing notices, and one whose test fails without it too, all fail the run.
"""
