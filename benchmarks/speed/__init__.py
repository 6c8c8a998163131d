"""Compares our engines with a plain loop, `torch.func.vmap` and other simulators: same model, data and steps, one run.

    make bench                                      all races that this machine can run
    python -m benchmarks.speed --quick              a shorter version, in about three minutes
    python -m benchmarks.speed --write-docs         put the tables of results/speed/ into docs/performance.md

A *race* is one comparison; a *contender* is a program that takes part. `plan` lists the races. `race` runs one, with a
new process for each contender (`child`). `record` stores the rows. `table` and `plot` show them. A contender is one
file with one function, `run`.
"""
