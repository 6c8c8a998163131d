"""Our engines beside a plain loop, `torch.func.vmap` and other simulators: same model, same data, same steps, one run.

    make bench                                      everything, on whatever machine this is
    python -m benchmarks.speed --quick              the same in about three minutes
    python -m benchmarks.speed --write-docs         put the tables of results/speed/ into docs/performance.md

The way of a measurement: `plan` says which races there are, `race` runs one with a fresh process for each contender
(`child`), `record` keeps the rows, `table` and `plot` show them. A contender is one file with one function, `run`.
"""
