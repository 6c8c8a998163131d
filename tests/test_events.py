"""Event files, read back by a reader that shares no code with the writer."""

from __future__ import annotations

import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from pefll.core.errors import PefllError
from pefll.runs.events import Events, crc32c, masked_crc32c


def slow_crc32c(content: bytes) -> int:
    """Bit by bit as a polynomial division, no table."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ 0x82F63B78 if crc & 1 else crc >> 1
    return ~crc & 0xFFFFFFFF


def unmask(masked: int) -> int:
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def records(content: bytes) -> list[bytes]:
    found = []
    while content:
        length, length_crc = struct.unpack("<QI", content[:12])
        assert unmask(length_crc) == slow_crc32c(content[:8])
        body = content[12 : 12 + length]
        (body_crc,) = struct.unpack("<I", content[12 + length : 16 + length])
        assert unmask(body_crc) == slow_crc32c(body)
        found.append(body)
        content = content[16 + length :]
    return found


def fields(message: bytes) -> list[tuple[int, Any]]:
    """Split a protobuf message into (field number, raw value)."""

    def varint(at: int) -> tuple[int, int]:
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 0x7F) << shift
            at, shift = at + 1, shift + 7
            if byte < 0x80:
                return value, at

    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(message):
        key, at = varint(at)
        kind = key & 7
        if kind == 0:
            value: Any
            value, at = varint(at)
        elif kind == 1:
            (value,), at = struct.unpack("<d", message[at : at + 8]), at + 8
        elif kind == 5:
            (value,), at = struct.unpack("<f", message[at : at + 4]), at + 4
        else:
            assert kind == 2
            size, at = varint(at)
            value, at = message[at : at + size], at + size
        found.append((key >> 3, value))
    return found


def parse(path: Path) -> list[dict[str, Any]]:
    events = []
    for body in records(path.read_bytes()):
        raw = dict(fields(body))
        event = {"wall_time": raw[1], "step": raw.get(2), "version": raw.get(3)}
        event["values"] = [
            (dict(fields(value))[1].decode(), dict(fields(value))[2]) for _, value in fields(raw.get(5, b""))
        ]
        events.append(event)
    return events


@pytest.mark.parametrize(
    ("content", "crc"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (b"\x00" * 32, 0x8A9136AA),  # the vectors of RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_vectors(content: bytes, crc: int) -> None:
    assert crc32c(content) == crc
    assert slow_crc32c(content) == crc
    assert unmask(masked_crc32c(content)) == crc


def test_scalars_come_back(tmp_path: Path) -> None:
    with Events(tmp_path / "new" / "folder") as events:
        events.scalars({"validation/seen": 0.5, "größe": -2.25}, step=30, wall_time=1234.5)
        events.scalars({"x" * 300: 1e39, "y": math.nan}, step=2**40)
        events.scalars({"z": 1.0}, step=-1)
    version, first, second, third = parse(events.path)
    assert version["version"] == b"brain.Event:2"
    assert abs(version["wall_time"] - time.time()) < 60
    assert first == {
        "wall_time": 1234.5,
        "step": 30,
        "version": None,
        "values": [("validation/seen", 0.5), ("größe", -2.25)],
    }
    assert second["step"] == 2**40
    assert abs(second["wall_time"] - time.time()) < 60
    assert second["values"][0] == ("x" * 300, math.inf)
    assert math.isnan(second["values"][1][1])
    assert third["step"] == 2**64 - 1


def test_flushed_after_each_call_and_named_as_tensorboard_expects(tmp_path: Path) -> None:
    events = Events(tmp_path)
    assert events.path.name.startswith("events.out.tfevents.")
    assert len(parse(events.path)) == 1
    events.scalars({"a": 1.0}, 0)
    assert parse(events.path)[1]["values"] == [("a", 1.0)]
    events.close()
    events.close()


def test_two_writers_never_share_a_file(tmp_path: Path) -> None:
    writers = [Events(tmp_path) for _ in range(3)]
    for step, writer in enumerate(writers):
        writer.scalars({"a": float(step)}, step)
        writer.close()
    assert [parse(writer.path)[1]["step"] for writer in writers] == [0, 1, 2]


def test_disk_errors_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PefllError, match=r"cannot write TensorBoard's events to .*file.*PEFLL-A102"):
        Events(tmp_path / "file" / "events")
    with pytest.raises(PefllError, match="PEFLL-A102"):
        Events(tmp_path / "file")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_full_disk_is_a_sentence(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.close()
    events._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(PefllError, match=r"cannot write .*tfevents.*: No space left.*PEFLL-A102"):
        events.scalars({"a": 1.0}, 0)
    events.close()
