"""The races of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.speed.contender import Contender
from benchmarks.speed.setting import Setting

OWN_CNN = "benchmarks.speed.own_cnn:build"
FEATURES = Setting(model="mlp", cohort=10, steps=10, batch=20, samples=20, shape=(16,), descriptor=32)


def lstm(cohort: int) -> Setting:
    """Return LEAF's two layers of 256 on texts of 80 characters, with so many clients in a round.

    Few local steps: a plain loop takes 8 ms for each.
    """
    steps = 10 if cohort < 50 else 5
    return Setting(model="lstm", clients=10 * cohort, cohort=cohort, steps=steps, shape=(80,), descriptor=32)


@dataclass(frozen=True)
class Race:
    """A setting and its contenders.

    Attributes:
        group: main, cohort, clients, steps, batch or models.
        setting: setting of all contenders.
        contenders: programs that take part.
    """

    group: str
    setting: Setting
    contenders: tuple[Contender, ...]


GROUPS = {
    "main": "everybody, LeNet on CIFAR-10's shapes, batch 32, k = 50",
    "models": "ResNet-20 without normalisation, LEAF's LSTM, and a user's own small network",
    "cohort": "growth with c, the clients of a round",
    "steps": "growth with k, the local steps",
    "batch": "growth with the batch size",
    "clients": "growth with n, all clients (small samples, MLP)",
}


def plan(everybody: Sequence[Contender], cores: int, cuda: bool, quick: bool) -> list[Race]:
    """Return the races of a machine, in the order in which they are run.

    Args:
        everybody: all contenders of this machine.
        cores: number of cores that this process may use.
        cuda: whether there is a GPU; with a GPU, growth is measured only on the GPU.
        quick: whether to use fewer points and shorter rounds.
    """
    races = []

    def add(group: str, setting: Setting, *names: str) -> None:
        chosen = tuple(one for one in everybody if not names or any(one.name.startswith(name) for name in names))
        races.append(Race(group, setting, chosen))

    # A GPU has the paper's 5 clients per round. On a CPU each core has the same number of clients, so that none waits.
    lenet = Setting(steps=10 if quick else 50, cohort=5 if cuda else cores * -(-4 // cores))
    # On a CPU a step takes about ten milliseconds. So a round has few steps, or 200 clients would take too long.
    short = lenet if cuda else Setting(steps=2)
    few: tuple[str, ...] = ("fedavg-serial-1", "fedavg-vector-cpu", "plain-cpu")
    if cuda:
        ours = (one.name for one in everybody if one.device == "cuda" and one.name.startswith("fedavg-vector"))
        few = (*ours, "plain-cuda", "vmap-cuda")
    more = (*few, "fedavg-serial-all", "vmap-cpu") if not cuda else few
    # With --quick, many settings of one group would take most of the time.
    add(
        "main",
        lenet,
        *(("fedavg", "pefll-serial-1", "pefll-vector-tf32", "plain-c", "vmap", "pfl", "flower") if quick else ()),
    )
    if cuda:
        mapped = [one.name for one in everybody if one.name.startswith("pefll-vector") and one.device == "cuda"]
        add("main", replace(lenet, clients=1000, cohort=50), *few, *mapped, "pfl-cuda")
    heavy = lenet if cuda else Setting(cohort=2, steps=1)
    add("models", replace(heavy, model="resnet20"), *(few if quick else more))
    for texts in (lstm(5), lstm(50)) if cuda else (replace(lstm(1), steps=1),):
        add("models", texts, *few)
    add("models", replace(short, model=OWN_CNN), *(few if quick else more))
    for c in (1, 20) if quick else (1, 5, 20, 50, 100, 200):
        # On a GPU the plain loop is as fast with any c, and takes half a minute for a round of 200 clients.
        names = [name for name in few if name != "plain-cuda" or c <= 20]
        add("cohort", replace(short, clients=200, cohort=c, steps=lenet.steps if cuda else 1), *names)
    for k in () if quick else (1, 10, 50, 200):
        add("steps", replace(lenet, steps=k, cohort=5 if cuda else 1), *few)
    for batch in () if quick else (1, 8, 32, 128):
        add("batch", replace(lenet, steps=lenet.steps if cuda else 5, cohort=5 if cuda else 2, batch=batch), *few)
    both = ("pefll-vector-float32", "plain-cuda") if cuda else ("pefll-serial-1", "pefll-vector-cpu", "plain-cpu")
    for n in (100, 100_000) if quick else (100, 10_000, 1_000_000):
        add("clients", replace(FEATURES, clients=n), *both)
    return races
