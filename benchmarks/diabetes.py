"""Compares methods on a real regression, from a raw CSV by one command each: scikit-learn's patients with diabetes.

    python -m benchmarks.diabetes --out results/diabetes.json     # about five minutes on one core
    python -m benchmarks.diabetes --table results/diabetes.json   # the tables again, in Markdown

The label is the progression of the disease after a year. The CSV has the columns as they were measured: years,
millimetres of mercury, milligrams. A client is an age group of one sex. So clients differ in their patients, but hardly
in how the disease progresses. Settings are those that `pefll tune --hold-out 0.2` chose with seeds 0 to 2, on
validation samples of seen clients that did not train:

    pefll tune --data diabetes.csv ... --method fedavg --grid client_lr=0.005,0.02,0.05 --grid local_steps=2,5,10
    pefll tune --data diabetes.csv ... --method pefll --grid client_lr=0.005,0.02,0.05 --grid local_steps=2,5,10 \
        --grid server_lr=1e-3,3e-3, and then --grid descriptor_size=1,4 --grid embedding=linear,mlp
    pefll tune --data diabetes.csv ... --method local --grid client_lr=0.001,0.005,0.02 --grid epochs=5,20,50
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.regressions import Setup, Study, main


def write_table(path: Path) -> None:
    """Write scikit-learn's data as a raw CSV, with a column `group` for the clients."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["sex"] = frame["sex"].map({1.0: "a", 2.0: "b"})  # the data set does not say which is which
    frame["group"] = frame["sex"] + (frame["age"] // 5 * 5).astype(int).astype(str)
    frame.to_csv(path, index=False)


METHODS = {
    "pefll": ("client_lr=0.02", "local_steps=2", "server_lr=3e-3", "descriptor_size=1", "embedding=linear"),
    "fedavg": ("client_lr=0.005", "local_steps=5"),
    "local": ("client_lr=0.001", "epochs=50"),
}
STUDY = Study(
    name="diabetes",
    write=write_table,
    words=(
        *("--client-column", "group", "--label", "target", "--task", "regression", "--unseen", "0.25"),
        *("--min-samples", "5", "--rounds", "200", "--clients-per-round", "5", "--eval-every", "20"),
    ),
    varied="columns",
    # What the clients' models see: all columns, or all but those that make the clients.
    setups={
        "all columns": Setup(METHODS),
        "without age and sex": Setup(METHODS, ("--drop", "age,sex")),
    },
    seeds=(0, 1, 2),
    digits=1,
)


if __name__ == "__main__":
    main(STUDY, __doc__)
