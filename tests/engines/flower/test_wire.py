"""What is written for the wire and read back, tickets, and what a client does not let itself be asked for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from pefll.engines.flower.client import task_of
from pefll.engines.flower.keep import Store, Ticket, ticket_in
from pefll.engines.flower.message import (
    FORMAT,
    RAW,
    RECORD,
    TENSORS,
    BadMessage,
    all_finite,
    decode,
    header_of,
    pack,
    tensors_of,
)
from pefll.engines.flower.reply import too_large
from pefll.engines.flower.request import Asked, Visit
from pefll.errors import PefllError
from tests.engines.flower.federations import setting


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back_as_they_were(dtype, shape):
    leaf = (10 * torch.randn(shape)).to(dtype)
    content = pack({"task": "x"}, {"a": leaf})
    assert header_of(content) == {"task": "x"}
    found = tensors_of(content)["a"]
    assert found.dtype == dtype
    assert torch.equal(found, leaf)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (Array("float32", (3,), RAW, b"12345678"), "8 bytes as a tensor of shape"),
        (Array("float16", (4,), RAW, b"12345678"), "never asked for"),
        (Array("float32", (2,), "numpy.ndarray", b"12345678"), "never asked for"),
        (Array("float32", (-1, -2), RAW, b"12345678"), "as a tensor of shape"),
        (Array("object", (1,), RAW, b"12345678"), "never asked for"),
    ],
)
def test_arrays_that_are_not_what_they_say_are_refused(array, words):
    with pytest.raises(BadMessage, match=words):
        decode(array)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({RECORD: ConfigRecord({"format": FORMAT, "header": "{}"})}),
        RecordDict({RECORD: ConfigRecord({"format": 99, "header": "{}"}), TENSORS: ArrayRecord()}),
        RecordDict({RECORD: ConfigRecord({"format": FORMAT, "header": "not json"}), TENSORS: ArrayRecord()}),
        RecordDict({RECORD: ConfigRecord({"format": FORMAT, "header": "[]"}), TENSORS: ArrayRecord()}),
        RecordDict({RECORD: ConfigRecord({"format": FORMAT, "header": "{" + " " * 70000}), TENSORS: ArrayRecord()}),
    ],
)
def test_headers_that_cannot_be_read_are_refused(content):
    with pytest.raises(BadMessage):
        header_of(content)


@given(st.integers(0, 400_000), st.integers(0, 3), st.integers(0, 3))
def test_tickets_are_exact_in_float32(round_, exchange, leaf):
    ticket = Ticket(round_, exchange, leaf)
    assert ticket_in(torch.full((5,), ticket.number, dtype=torch.float32)) == ticket
    passing = Ticket(-1, 50 + exchange, leaf)
    assert ticket_in(torch.full((2, 2), passing.number, dtype=torch.float32)) == passing


def test_values_are_no_tickets():
    for row in (torch.randn(7), torch.zeros(3), torch.tensor([float("inf")]), torch.empty(0), torch.tensor([True])):
        assert ticket_in(row) is None
    with pytest.raises(PefllError, match="450,000 rounds"):
        _ = Ticket(1_000_000, 0).number
    with pytest.raises(PefllError, match="4 tensors"):
        _ = Ticket(0, 4).number


def test_a_store_gives_back_what_it_was_given_and_takes_no_other_names(tmp_path):
    store = Store(tmp_path / "state")
    leaves = [torch.randn(3), torch.arange(4)]
    store.put("round-3-0", leaves)
    assert all(torch.equal(a, b) for a, b in zip(store.get("round-3-0"), leaves, strict=True))
    store.put("visit-aa-0", leaves)
    store.put("visit-bb-0", leaves)
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"round-3-0.safetensors", "visit-bb-0.safetensors"}
    with pytest.raises(PefllError, match="gone or damaged"):
        store.get("round-4-0")
    for name in ("../../etc/passwd", "round-1-0/x", "other", ""):
        with pytest.raises(PefllError, match="no client keeps"):
            store.get(name)


def test_a_client_does_only_what_its_method_has_for_clients(tmp_path):
    method = setting(tmp_path).agreement.build()
    assert task_of(method, "adapt")
    for name in ("init", "round", "step", "problem", "_clipped", "__class__", "nothing", "phi"):
        with pytest.raises(BadMessage, match="nothing that a client"):
            task_of(method, name)


def test_finite_numbers_are_told_from_others():
    largest = torch.finfo(torch.float32).max
    assert all_finite(torch.full((4,), largest))
    assert all_finite(torch.arange(3))
    assert not all_finite(torch.tensor([1.0, float("nan")]))
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))


def test_a_reply_is_found_again_for_the_very_same_request_only():
    visit = Visit("0")
    first = Asked(("adapt", "()"), (torch.tensor([0.0, 1.0]), torch.tensor(3)))
    reply = [torch.ones(2)]
    visit.note_reply(1, 7, first, reply)
    assert visit.reply_to(1, 7, Asked(first.facts, tuple(leaf.clone() for leaf in first.tensors))) is reply
    assert visit.reply_to(2, 7, first) is None
    assert visit.reply_to(1, 8, first) is None
    number = torch.tensor(3)
    for facts, tensors in (
        (("describe", "()"), first.tensors),
        (first.facts, (torch.tensor([-0.0, 1.0]), number)),
        (first.facts, (torch.tensor([0.0, 1.0], dtype=torch.float64), number)),
        (first.facts, (torch.tensor([[0.0, 1.0]]), number)),
        (first.facts, first.tensors[:1]),
    ):
        assert visit.reply_to(1, 7, Asked(facts, tensors)) is None
    another = [torch.zeros(2)]
    visit.note_reply(1, 7, Asked(first.facts, (torch.tensor([2.0, 1.0]), number)), another)
    assert visit.reply_to(1, 7, first) is reply
    assert visit.reply_to(1, 7, Asked(first.facts, (torch.tensor([2.0, 1.0]), number))) is another


def test_lengths_whose_square_is_too_large_for_their_type_are_compared_all_the_same():
    large = torch.full((4,), 1e30)
    assert list(too_large({0: [large], 1: [large], 2: [1e4 * large]}, 1000)) == [2]
    assert too_large({0: [large], 1: [large], 2: [10 * large]}, 1000) == {}
    assert too_large({0: [large], 1: [large], 2: [1e4 * large]}, 0) == {}
