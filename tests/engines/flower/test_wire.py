"""What is written for the wire and read back, tickets, and what a client does not let itself be asked for."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from pefll.core.errors import PefllError
from pefll.engines.flower.client.app import task_of
from pefll.engines.flower.client.client_store import ClientStore
from pefll.engines.flower.protocol import message
from pefll.engines.flower.protocol.message import (
    FORMAT,
    HEADER_BYTES,
    RECORD,
    BadMessage,
    all_finite,
    bytes_of,
    header_of,
    pack,
    read_numbers,
    tensors_of,
)
from pefll.engines.flower.server.kept_reference import KeptReference, reference_in
from pefll.engines.flower.server.reply import (
    Reply,
    check_score,
    hello_of,
    norm_of,
    norm_outliers,
    read_reply,
    reply_header,
)
from pefll.engines.flower.server.request import RequestKey, RoundCache
from pefll.version import __version__
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


def test_many_tensors_share_one_record_whatever_their_types(monkeypatch):
    leaves = {
        "truths": torch.tensor([True, False, True]),  # so that what follows begins at an odd address
        "numbers": torch.randn(4, 5),
        "nothing": torch.empty(2, 0),
        "one": torch.tensor(7),
        "wide": torch.randn(3, dtype=torch.float64),
        "turned": torch.randn(3, 4).T,
    }
    whole = pack({"task": "x"}, leaves)
    monkeypatch.setattr(message, "PIECE_BYTES", 50)
    pieces = pack({"task": "x"}, leaves)
    assert list(whole) == [RECORD]
    assert list(pieces) == [RECORD, *(f"{RECORD}.{place}" for place in range(1, len(pieces)))]
    assert len(pieces) == -(-sum(leaf.nbytes for leaf in leaves.values()) // 50)
    names = sum(len(place) + len("numbers") for place in pieces if place != RECORD)
    assert bytes_of(pieces) == bytes_of(whole) + names
    for content in (whole, pieces):
        assert header_of(content) == {"task": "x"}
        found = tensors_of(content)
        assert list(found) == list(leaves)
        for name, leaf in leaves.items():
            assert found[name].dtype == leaf.dtype
            assert torch.equal(found[name], leaf)


def test_a_message_is_three_of_flowers_objects_and_one_more_for_each_further_piece(tmp_path, monkeypatch):
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    setting(tmp_path)  # messages are of a run, and a grid makes one
    leaves = {"a": torch.randn(100), "b": torch.arange(5)}
    for size, objects in ((1 << 20, 3), (400, 4), (100, 3 + 4)):
        monkeypatch.setattr(message, "PIECE_BYTES", size)
        sent = Message(pack({"task": "x"}, leaves), 7, "train.x", ttl=1.0)
        parts = get_all_nested_objects(sent)
        assert len(parts) == objects
        name = list(parts)[-1]
        read = inflate_object_from_contents(name, {key: part.deflate() for key, part in parts.items()})
        found = tensors_of(read.content)
        assert all(torch.equal(found[key], leaf) for key, leaf in leaves.items())


def test_truths_are_0_or_1_whatever_was_sent():
    (found,) = read_numbers('[["a", "|b1", [3]]]', bytes([0, 1, 77])).values()
    assert found.view(torch.uint8).tolist() == [0, 1, 1]


# A BadMessage has no code: a log shows it behind its sender's name. Tests look for the values that it names, and for
# these words where it names none.
FOREIGN, UNREADABLE, TOO_LONG, TOO_DEEP = "not a pefll message", "cannot be read", "too long", r"\b32 lists"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[["a", "<f4", [3]]]', r"\b8 bytes.* \[3\]"),
        ('[["a", "<f4", [1]]]', r"\b8 bytes.* 4$"),
        ("[]", r"\b8 bytes.* 0$"),
        ('[["a", "<f4", [1]], ["b", "<f4", [2]]]', r"\b4 bytes.* \[2\]"),
        ('[["a", "<f2", [4]]]', "<f2"),
        ('[["a", "|O", [1]]]', r"\|O"),
        ('[["a", ">f4", [2]]]', ">f4"),
        (
            f"[{', '.join(f'[{chr(34)}{n}{chr(34)}, {chr(34)}<f4{chr(34)}, [0]]' for n in range(1025))}]",
            r"1,025 tensors.*1,024",
        ),
        ('[["a", "<f4", [-1, -2]]]', UNREADABLE),
        ('[["a", "<f4", [2.0]]]', UNREADABLE),
        ('[["a", "<f4", [true, 2]]]', UNREADABLE),
        ('[["a", "<f4", 2]]', UNREADABLE),
        ('[["a", "<f4"]]', UNREADABLE),
        ('[["a", "<f4", [1]], ["a", "<f4", [1]]]', UNREADABLE),
        ('[[1, "<f4", [2]]]', UNREADABLE),
        ("{}", UNREADABLE),
        ("not json", UNREADABLE),
        ("[" * 60_000, TOO_DEEP),
        (f'[["a", "<f4", {"[" * 40}{"]" * 40}]]', TOO_DEEP),
        (" " * 70_000, TOO_LONG),
        (b"[]", TOO_LONG),
        ('[["a", "<f4", [2]], ["b", "<f4", [0, 99999999999999999999999999]]]', UNREADABLE),
        ('[["a", "<f4", [2, 1, 1, 1, 1, 1, 1, 1, 1]]]', UNREADABLE),
        (
            '[["a", "<f4", [2]], ["b", "<f4", [0, 4611686018427387903, 4611686018427387903]]]',
            r"^(?!.*bytes).*\[0, 4611686018427387903, 4611686018427387903\]",
        ),
    ],
)
def test_tensors_that_are_not_what_the_list_says_are_refused(text, part):
    with pytest.raises(BadMessage, match=part):
        read_numbers(text, b"12345678")


def record(**changes):
    head = {"format": FORMAT, "version": __version__, "header": "{}", "tensors": "[]", "numbers": b""}
    return ConfigRecord(head | changes)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (RecordDict(), FOREIGN),
        (RecordDict({"surprise": record()}), FOREIGN),
        (RecordDict({RECORD: ArrayRecord()}), FOREIGN),
        (RecordDict({RECORD: ConfigRecord({"header": "{}"})}), FOREIGN),
        (RecordDict({RECORD: ConfigRecord({"format": FORMAT, "header": "{}"})}), FOREIGN),
        (RecordDict({RECORD: record(more=1)}), FOREIGN),
        (RecordDict({RECORD: record(numbers="text")}), FOREIGN),
        (RecordDict({RECORD: record(numbers=[b"1", b"2"])}), FOREIGN),
        (RecordDict({RECORD: record(), f"{RECORD}.2": ConfigRecord({"numbers": b""})}), FOREIGN),
        (RecordDict({RECORD: record(), f"{RECORD}.1": ConfigRecord({"numbers": 3})}), FOREIGN),
        (RecordDict({RECORD: record(), f"{RECORD}.1": ConfigRecord({"x": b""})}), FOREIGN),
        (RecordDict({RECORD: record(), f"{RECORD}.1": ArrayRecord()}), FOREIGN),
        (RecordDict({RECORD: record(header="not json")}), f"header.*{UNREADABLE}"),
        (RecordDict({RECORD: record(header="[]")}), f"header.*{UNREADABLE}"),
        (RecordDict({RECORD: record(header="{" + " " * 70000)}), TOO_LONG),
        (RecordDict({RECORD: record(header=3)}), TOO_LONG),
        (RecordDict({RECORD: record(header='{"a":' + "[" * 40 + "]" * 40 + "}")}), TOO_DEEP),
        (
            RecordDict({RECORD: record()} | {f"{RECORD}.{n}": ConfigRecord({"numbers": b"1"}) for n in range(1, 4097)}),
            r"4,097 pieces.*4,096",
        ),
    ],
)
def test_headers_that_cannot_be_read_are_refused(content, part):
    with pytest.raises(BadMessage, match=part):
        header_of(content)


@given(st.integers(0, 400_000), st.integers(0, 3), st.integers(0, 3))
def test_tickets_are_exact_in_float32(round_, exchange, leaf):
    reference = KeptReference(round_, exchange, leaf)
    assert reference_in(torch.full((5,), reference.value, dtype=torch.float32)) == reference
    passing = KeptReference(-1, 50 + exchange, leaf)
    assert reference_in(torch.full((2, 2), passing.value, dtype=torch.float32)) == passing


def test_values_are_no_tickets():
    for row in (torch.randn(7), torch.zeros(3), torch.tensor([float("inf")]), torch.empty(0), torch.tensor([True])):
        assert reference_in(row) is None
    with pytest.raises(PefllError, match="PEFLL-F439"):
        _ = KeptReference(1_000_000, 0).value
    with pytest.raises(PefllError, match="PEFLL-F438"):
        _ = KeptReference(0, 4).value


def test_a_store_gives_back_what_it_was_given_and_takes_no_other_names(tmp_path):
    store = ClientStore(tmp_path / "state")
    leaves = [torch.randn(3), torch.arange(4)]
    store.put("round-3-0", leaves)
    assert all(torch.equal(a, b) for a, b in zip(store.get("round-3-0"), leaves, strict=True))
    store.put("evaluation-aa-0", leaves)
    (tmp_path / "state/visit-aa-0.safetensors").write_bytes(b"an earlier version kept this")
    store.put("evaluation-bb-0", leaves)
    store.put("evaluation-bb-1", leaves)
    left = {"round-3-0.safetensors", "evaluation-bb-0.safetensors", "evaluation-bb-1.safetensors"}
    assert {path.name for path in (tmp_path / "state").iterdir()} == left
    with pytest.raises(PefllError, match="PEFLL-F440"):
        store.get("round-4-0")
    for name in ("../../etc/passwd", "round-1-0/x", "visit-aa-0", "other", ""):
        with pytest.raises(PefllError, match="PEFLL-F441"):
            store.get(name)


def test_a_client_does_only_what_its_method_has_for_clients(tmp_path):
    method = setting(tmp_path).agreement.build()
    assert task_of(method, "adapt")
    for name in ("init", "round", "step", "problem", "_clipped", "__class__", "nothing", "phi"):
        with pytest.raises(BadMessage, match=f"{name!r}.*{type(method).__name__}"):
            task_of(method, name)


@pytest.mark.parametrize(
    "text", ["[]" * 33 + '"' + '\\"' * 32_000, "{}" * 33 + '"' * 65_000, '"\\' * 32_000 + "[" * 100]
)
def test_no_text_takes_long_to_look_through(text):
    began = time.process_time()
    with pytest.raises(BadMessage):
        header_of(RecordDict({RECORD: record(header=text[:HEADER_BYTES])}))
    assert time.process_time() - began < 5  # a minute, if it were looked through again from each quote


def test_finite_numbers_are_told_from_others():
    largest = torch.finfo(torch.float32).max
    assert all_finite(torch.full((4,), largest))
    assert all_finite(torch.arange(3))
    assert not all_finite(torch.tensor([1.0, float("nan")]))
    assert not all_finite(torch.tensor([float("inf"), -float("inf")]))


def test_a_reply_is_found_again_for_the_very_same_request_only():
    cache = RoundCache("0")
    first = RequestKey(("adapt", "()"), (torch.tensor([0.0, 1.0]), torch.tensor(3)))
    reply = Reply([torch.ones(2)], [1.0])
    cache.note_reply(1, 7, first, reply)
    assert cache.reply_to(1, 7, RequestKey(first.texts, tuple(leaf.clone() for leaf in first.tensors))) is reply
    assert cache.reply_to(2, 7, first) is None
    assert cache.reply_to(1, 8, first) is None
    number = torch.tensor(3)
    for texts, tensors in (
        (("describe", "()"), first.tensors),
        (first.texts, (torch.tensor([-0.0, 1.0]), number)),
        (first.texts, (torch.tensor([0.0, 1.0], dtype=torch.float64), number)),
        (first.texts, (torch.tensor([[0.0, 1.0]]), number)),
        (first.texts, first.tensors[:1]),
    ):
        assert cache.reply_to(1, 7, RequestKey(texts, tensors)) is None
    another = Reply([torch.zeros(2)], [0.0])
    cache.note_reply(1, 7, RequestKey(first.texts, (torch.tensor([2.0, 1.0]), number)), another)
    assert cache.reply_to(1, 7, first) is reply
    assert cache.reply_to(1, 7, RequestKey(first.texts, (torch.tensor([2.0, 1.0]), number))) is another


def test_lengths_whose_square_is_too_large_for_their_type_are_compared_all_the_same():
    large = torch.full((4,), 1e30)
    content = pack({"task": "adapt"}, {"0": large})
    assert read_reply(content, {"task": "adapt"}, large).norms == [pytest.approx(2e30)]

    def replies(times: float) -> dict[int, Reply]:
        return {client: Reply([], [norm_of(part)]) for client, part in enumerate((large, large, times * large))}

    assert list(norm_outliers(replies(1e4), 1000)) == [2]
    assert norm_outliers(replies(10), 1000) == {}
    assert norm_outliers(replies(1e4), 0) == {}


def test_of_two_replies_the_longer_one_is_not_blamed():
    """Otherwise a client with a tiny vector has an honest one left out."""
    tiny, honest = (Reply([torch.full((4,), value)], [2 * value]) for value in (1e-12, 1.0))
    assert norm_outliers({0: tiny, 1: honest}, 1000) == {}
    assert norm_outliers({0: tiny, 1: honest, 2: honest}, 1000) == {}


def test_counts_are_not_compared_by_length():
    count = torch.tensor(7.0)
    assert read_reply(pack({"task": "adapt"}, {"0": count}), {"task": "adapt"}, count).norms == [0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replies_with_numbers_that_are_not_finite_are_refused(bad, dtype):
    form = torch.full((4,), 1e30, dtype=dtype)
    reply = form.clone()
    reply[2] = bad
    with pytest.raises(BadMessage, match=r"NaN.*adapt"):
        read_reply(pack({"task": "adapt"}, {"0": reply}), {"task": "adapt"}, form)
    huge = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    read_reply(pack({"task": "adapt"}, {"0": huge}), {"task": "adapt"}, form)


@pytest.mark.parametrize("said", ["\ud800", "x\nround 3: all is well", "\x1b[2J", "y" * 60_000])
def test_what_a_peer_says_stays_one_short_line_of_a_log(said):
    with pytest.raises(BadMessage) as caught:
        reply_header(pack({"refusal": said}, {}))
    assert str(caught.value).isprintable()
    assert 0 < len(str(caught.value)) <= 400
    str(caught.value).encode()  # which a lone half of a character would refuse


def test_lists_and_names_count_as_bytes_and_empty_pieces_are_no_message():
    content = pack({"a": 1}, {})
    content[RECORD]["format"] = [0.5] * 1000
    assert bytes_of(content) > 8000
    with pytest.raises(BadMessage, match=rf"format.* {FORMAT}\b"):
        header_of(content)
    content = pack({"a": 1}, {})
    for place in range(1, 5):
        content[f"{RECORD}.{place}"] = ConfigRecord({"numbers": b""})
    with pytest.raises(BadMessage, match=FOREIGN):
        header_of(content)


def test_brackets_in_names_are_no_lists():
    name = "[{" * 50
    content = pack({"name": name}, {name: torch.zeros(1)})
    assert header_of(content) == {"name": name}
    assert list(tensors_of(content)) == [name]


@pytest.mark.parametrize(
    ("header", "tensors", "words"),
    [
        ({"name": "x" * 70_000}, {}, r"header.*65,536 bytes.*70,011.*PEFLL-F449"),
        ({}, {"x" * 70_000: torch.zeros(1)}, r"list of tensors.*65,536 bytes.*PEFLL-F449"),
        ({}, {str(n): torch.zeros(()) for n in range(1025)}, r"1,024 tensors.*1,025.*PEFLL-F447"),
        ({}, {"0": torch.zeros(2, dtype=torch.float16)}, r"float16.*\b1\b.*PEFLL-F448"),
        ({}, {"0": torch.zeros([1] * 9)}, r"\b8 axes.*float32.*\b9\b.*PEFLL-F448"),
        ({"a": eval("[" * 40 + "]" * 40)}, {}, r"\b32 lists.*PEFLL-F450"),
    ],
)
def test_what_nobody_would_read_is_not_written(header, tensors, words):
    with pytest.raises(PefllError, match=words) as caught:
        pack(header, tensors)
    assert not isinstance(caught.value, BadMessage)


def test_more_pieces_than_anybody_would_read_are_not_written(monkeypatch):
    monkeypatch.setattr(message, "PIECE_BYTES", 1)
    header_of(pack({}, {"0": torch.zeros(1024)}))
    with pytest.raises(PefllError, match=r"4,096 bytes.*4,100.*PEFLL-F451"):
        pack({}, {"0": torch.zeros(1025)})


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, -3], [1, 2, 3.0], [True, 2, 3], [1, 2, 1 << 50], "123", {}])
def test_numbers_of_samples_that_cannot_be_are_refused(counts):
    assert hello_of(pack({"name": "ann", "counts": [1, 0, 3]}, {}))["counts"] == [1, 0, 3]
    with pytest.raises(BadMessage, match="numbers of samples"):
        hello_of(pack({"name": "ann", "counts": counts}, {}))


@pytest.mark.parametrize(
    ("score", "declared", "part"),
    [
        ((5.0, 6.0, 5.0, 1.0), None, r"\b6 .*\b5 samples"),
        ((5.0, 4.0, 6.0, 1.0), None, r"\b6 .*\b5 samples"),
        ((5.0, -1.0, 5.0, 1.0), None, "-1 correct"),
        ((-5.0, 0.0, 0.0, 1.0), None, "-5 samples"),
        ((5.5, 4.0, 4.0, 1.0), None, r"5\.5 samples"),
        ((5.0, 4.0, 3.5, 1.0), None, r"3\.5 correct"),
        ((5.0, 4.0, 4.0, 1.0), 4, r"\b5 samples.* 4$"),
    ],
)
def test_scores_that_no_samples_can_have_are_refused(score, declared, part):
    check_score(Reply([torch.tensor(part) for part in (5.0, 4.0, 5.0, -1e-7)], []), 5)
    with pytest.raises(BadMessage, match=part):
        check_score(Reply([torch.tensor(part) for part in score], []), declared)


def test_who_introduces_himself_sends_no_numbers():
    assert hello_of(pack({"name": "ann"}, {})) == {"name": "ann"}
    with pytest.raises(BadMessage, match=r" bytes.*65,536"):
        hello_of(pack({"name": "ann"}, {"0": torch.zeros(20_000)}))
