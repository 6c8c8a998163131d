"""Clients as users divide them: index lists, partitioners, torch's data sets, named unseen clients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pefll
from pefll.core.errors import PefllError
from pefll.data import TEST, TRAIN

X = np.arange(40, dtype=np.float32).reshape(20, 2)
Y = np.arange(20) % 2


def samples():
    return pefll.samples_from_arrays(X, Y)


def rows(federation, client, *splits):
    found = [federation.x[federation.indices(client, split)][:, 0] / 2 for split in splits or (0, 1, 2)]
    return sorted(torch.cat(found).int().tolist())


def by_name(federation):
    return {federation.name_of(client): rows(federation, client) for client in range(federation.num_clients)}


def test_lists_of_indices():
    lists = [[0, 1, 2, 3], np.arange(10, 16), [19, 5, 7]]
    made = pefll.by_indices(samples(), lists, unseen=0.34)
    assert by_name(made) == {"0": [0, 1, 2, 3], "1": list(range(10, 16)), "2": [5, 7, 19]}
    assert (made.num_unseen, made.partition) == (1, "by indices")


def test_names_splits_and_unseen_clients():
    clients = {"ann": {"train": [0, 1, 2, 9], "test": [3]}, "bob": {"train": [4, 5], "validation": [6], "test": [8]}}
    made = pefll.by_indices(samples(), clients, unseen_clients=["ann"])
    assert (made.names, made.num_seen) == (("bob", "ann"), 1)
    assert rows(made, 1, TEST) == [3]
    assert (rows(made, 0, TRAIN), rows(made, 0, 1), rows(made, 0, TEST)) == ([4, 5], [6], [8])


def test_images_get_channel_statistics_of_seen_clients_wherever_a_federation_comes_from():
    digits = pefll.load_samples("digits")
    lists = np.array_split(np.arange(len(digits.y)), 20)
    made = pefll.by_indices(digits, lists, unseen_clients=[0])
    seen = torch.cat([made.indices(client) for client in range(made.num_seen)])
    assert made.normalise.mean[0] == pytest.approx((made.x[seen].double() / 255).mean().item(), abs=1e-12)
    pefll.fit(made, "fedavg", rounds=1, model="tiny", processes=1)
    x = np.random.default_rng(0).integers(0, 256, (20, 1, 8, 8), dtype=np.uint8)
    own = pefll.samples_from_arrays(x, Y, np.arange(20) % 4)
    for one in (pefll.by_class(own, 4, 1), pefll.dirichlet(own, 4, 1.0), pefll.natural(own)):
        assert one.prepare(one.x, torch.float32).shape == (20, 1, 8, 8)


def test_a_sample_twice_is_told_with_both_clients():
    with pytest.raises(PefllError, match="index 3 of client bob is there also among those of client ann"):
        pefll.by_indices(samples(), {"ann": [0, 3], "bob": [4, 3]})
    with pytest.raises(PefllError, match="index 3 of client 1 is there twice"):
        pefll.by_indices(samples(), [[0, 1], [3, 3]])


def test_a_mask_in_place_of_indices():
    with pytest.raises(PefllError, match=r"client 0 are a boolean mask.*np\.flatnonzero"):
        pefll.by_indices(samples(), [Y == 0, Y == 1])


def test_a_share_of_unseen_clients_beside_their_names():
    for make in (
        lambda: pefll.by_indices(samples(), [[0, 1], [2, 3], [4, 5]], unseen=0.5, unseen_clients=[1]),
        lambda: pefll.natural(pefll.samples_from_arrays(X, Y, Y), unseen=0.4, unseen_clients=[1]),
    ):
        with pytest.raises(PefllError, match=r"unseen=0\.[45] has no effect.*PEFLL-D642"):
            make()


@pytest.mark.parametrize(
    ("clients", "code"),
    [
        ([[0, 1], [1, 2]], "PEFLL-D608"),
        ([[0, 0], [1, 2]], "PEFLL-D608"),
        ([{"train": [0, 1], "test": [1]}], "PEFLL-D608"),
        ([[0, 20]], "PEFLL-D611"),
        ([[-1, 3]], "PEFLL-D611"),
        ([[0.5, 1]], "PEFLL-D610"),
        ([[True, False]], "PEFLL-D643"),
        ([3], "PEFLL-D610"),
        ([[0, 1], []], "PEFLL-D609"),
        ([], "PEFLL-D676"),
        ([{"trian": [1]}], "PEFLL-D607"),
        ([{"test": [1]}], "PEFLL-D195"),
        (7, "PEFLL-A011"),
    ],
)
def test_bad_indices(clients, code):
    with pytest.raises(PefllError) as error:
        pefll.by_indices(samples(), clients)
    assert error.value.code == code


class Partitioner:
    """The form of a partitioner of flwr-datasets: a number of partitions, each a table."""

    num_partitions = 4

    def __init__(self, **columns):
        self.columns = columns

    def load_partition(self, partition_id):
        return {name: values[partition_id::4] for name, values in self.columns.items()}


class Wrapper:
    """Asks another partitioner for everything."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Unassigned:
    """A partitioner of flwr-datasets without a data set."""

    @property
    def num_partitions(self):
        raise AttributeError("The dataset field should be set before using it")

    def load_partition(self, partition_id):
        del partition_id


class Empty(Partitioner):
    """A partitioner whose partitions cannot be read."""

    def load_partition(self, partition_id):
        raise OSError(f"no file {partition_id}")


def test_a_partitioner_of_images_and_of_columns():
    images = [np.full((8, 8), row, dtype=np.uint8) for row in range(20)]
    made = pefll.federation_from_partitioner(Partitioner(img=images, label=Y), features="img", unseen_clients=[2])
    assert (made.input_shape, made.num_clients, made.num_unseen) == ((1, 8, 8), 4, 1)
    assert made.name_of(3) == "2"
    assert set(made.x[made.indices(3)][:, 0, 0, 0].tolist()) <= {2, 6, 10, 14, 18}
    assert made.normalise is not None
    holes = Partitioner(img=images, label=["no", None, "yes", "no"] * 5)
    with pytest.warns(UserWarning, match="5 rows of 20 without a label"):
        made = pefll.federation_from_partitioner(holes, features="img", missing="drop-unlabelled", unseen=0.0)
    whole = np.concatenate([np.arange(20)[part::4] for part in range(4)])
    assert made.x[:, 0, 0, 0].tolist() == whole[made.row].tolist()
    words = Partitioner(age=1e3 * np.arange(20), city=["Ulm", "Graz"] * 10, label=Y)
    made = pefll.federation_from_partitioner(words)
    assert made.table.input_names == ("age", "city=Graz", "city=Ulm")


class Classes(dict):
    """The form of a partition of a data set of Hugging Face: columns, and what they hold."""

    def __init__(self, columns, **about):
        super().__init__(columns)
        self.features = {name: SimpleNamespace(names=names) for name, names in about.items()}


def test_a_partitioner_has_all_that_a_table_has():
    frame = {"age": np.where(np.arange(20) % 9, 1e3 * np.arange(20), np.nan), "member": np.arange(20) % 3 == 0,
             "city": ["Ulm", None, "Graz", "Ulm"] * 5, "day": [f"2024-01-{row + 1:02}" for row in range(20)],
             "who": np.repeat(list("abcd"), 5), "liked": ["no", "yes"] * 10}  # fmt: skip
    options = {"drop": ["who"], "treat": {"day": "date"}, "unseen": 0.25}
    made = pefll.federation_from_partitioner(Partitioner(**frame), "liked", **options)
    whole = {name: [value for part in range(4) for value in values[part::4]] for name, values in frame.items()}
    plain = pefll.federation_from_frame(whole | {"part": np.repeat(np.arange(4), 5)}, "liked", "part", **options)
    assert made.fingerprint() == plain.fingerprint()
    assert made.table == plain.table
    assert {"age", "age: missing", "member", "day"} < set(made.table.input_names)
    assert (made.label_column, made.class_names) == ("liked", ("no", "yes"))
    run = pefll.fit(made, rounds=1, processes=1, local_steps=1, clients_per_round=2)
    rows = Partitioner(**frame).load_partition(2)
    assert set(run.personalize(rows).predict(rows, names=True)) <= {"no", "yes"}, "labels are found by their name"


def test_labels_and_splits_of_partitions():
    x, y = X[:, 0], Y.astype(float) + 0.5
    numbers = pefll.federation_from_partitioner(Partitioner(a=x, price=y, tax=y), ["price", "tax"])
    assert (numbers.labels, tuple(numbers.y.shape), numbers.input_shape) == ("numbers", (20, 2), (1,))
    assert pefll.federation_from_partitioner(Partitioner(a=x, price=Y), "price", labels="numbers").labels == "numbers"

    class Split(Partitioner):
        def load_partition(self, partition_id):
            return {"train": Classes({"a": x[:3], "y": Y[:3]}, y=["no", "yes"]), "test": {"a": x[3:5], "y": Y[3:5]}}

    made = pefll.federation_from_partitioner(Split(), "y", validation=0.0)
    assert made.count.tolist() == [[3] * 4, [0] * 4, [2] * 4]
    assert made.class_names == ("no", "yes")
    holes = Partitioner(a=x, y=["no", "yes", None, "no"] * 5)
    with pytest.warns(UserWarning, match="5 rows of 20 without a label"):
        assert len(pefll.federation_from_partitioner(holes, "y", missing="drop", unseen=0.0).rows) == 15
    images = Partitioner(img=[np.full((8, 8), row, dtype=np.uint8) for row in range(20)], label=Y)
    with pytest.raises(PefllError, match="PEFLL-D598"):
        pefll.federation_from_partitioner(images, treat={"img": "number"})
    tokens = Partitioner(text=[[row, row + 1] for row in range(20)], label=Y)
    made = pefll.federation_from_partitioner(tokens, features="text", tokens=True)
    assert (made.tokens, made.x.dtype) == (True, torch.int64)


def test_a_partitioner_around_another():
    made = pefll.federation_from_partitioner(Wrapper(Partitioner(a=X[:, 0].tolist(), label=Y)), unseen_clients=[2])
    assert made.num_clients == 4


def test_bad_partitioners():
    class Strange(Partitioner):
        def load_partition(self, partition_id):
            return [1, 2]

    for wrong, code in ((X, "PEFLL-A581"), (Strange(), "PEFLL-A582"), (Partitioner(a=X[:, 0]), "PEFLL-M054")):
        with pytest.raises(PefllError) as error:
            pefll.federation_from_partitioner(wrong)
        assert error.value.code == code
    for failing in (Unassigned(), Empty(label=Y)):
        with pytest.raises(PefllError, match=r"of the partitioner failed: .*assign its dataset first.*PEFLL-A586"):
            pefll.federation_from_partitioner(failing)
    with pytest.raises(PefllError, match="it must have num_partitions and load_partition"):
        pefll.federation_from_partitioner(Partitioner)  # a class
    two = Partitioner(img=[np.zeros((8, 8), dtype=np.uint8)] * 20, writer=Y, label=Y)
    with pytest.raises(PefllError, match=r"'img' cannot be used: it holds whole samples; .*features='img'.*PEFLL-D006"):
        pefll.federation_from_partitioner(two)
    uneven = Partitioner(img=[np.zeros((8, 8 + row % 2)) for row in range(20)], label=Y)
    with pytest.raises(PefllError, match="PEFLL-D612"):
        pefll.federation_from_partitioner(uneven)


def test_torch_data_sets():
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    owner = np.array(["ann", "bob", "eve", "max"])[np.arange(20) // 5]
    plain = pefll.federation_from_arrays(X, Y, owner)
    made = pefll.federation_from_dataset(torch.utils.data.TensorDataset(x, y), owner)
    assert made.fingerprint() == plain.fingerprint()
    triples = [(X[row], int(Y[row]), str(owner[row])) for row in range(20)]
    assert pefll.federation_from_dataset(triples).fingerprint() == plain.fingerprint()
    for wrong, code in ((triples[0][0].sum(), "PEFLL-A583"), ([(1, 2)], "PEFLL-D613"), ([3], "PEFLL-D613")):
        with pytest.raises(PefllError) as error:
            pefll.federation_from_dataset(wrong)
        assert error.value.code == code


class Broken(torch.utils.data.Dataset):
    """A data set of which one item fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __len__(self) -> int:
        return 20

    def __getitem__(self, place: int) -> tuple[np.ndarray, int]:
        if place == 7:
            raise self.error
        return X[place], int(Y[place])


@pytest.mark.parametrize("fails", [ValueError, KeyError, OSError, TypeError])
def test_an_item_that_fails_is_named(fails):
    error, words = fails("bad file"), rf"item 7 of the dataset failed: {fails.__name__} in .*bad file.*Subset.*D660"
    with pytest.raises(PefllError, match=words):
        pefll.federation_from_dataset(Broken(error), np.arange(20) // 5)
    kept = torch.utils.data.Subset(Broken(error), [place for place in range(20) if place != 7])
    assert len(pefll.federation_from_dataset(kept, np.arange(19) // 5).rows) == 19
    with pytest.raises(PefllError, match=r"has no item 0; dataset\[i\] must be \(x, y\) \[PEFLL-A585"):
        pefll.federation_from_dataset({"x": X, "y": Y}, np.arange(2))


def test_named_unseen_clients_are_unseen_and_the_others_keep_their_order():
    owner = np.repeat(["a", "b", "c", "d"], 5)
    plain = pefll.natural(pefll.samples_from_arrays(X, Y, owner), unseen=0.0)
    made = pefll.natural(pefll.samples_from_arrays(X, Y, owner), unseen_clients=["b", "b"])
    assert made.names == (*(name for name in plain.names if name != "b"), "b")
    assert made.num_unseen == 1
    assert rows(made, 3) == [5, 6, 7, 8, 9]
    with pytest.raises(PefllError, match="PEFLL-D606"):
        pefll.make_federation(samples(), partition="by-class 1", clients=2, unseen_clients=["a"])
