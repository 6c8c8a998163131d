"""TensorBoard's event files, written without TensorBoard.

An event file is a sequence of records. Each is a length, a checksum of the length, the content and a checksum of the
content; the content is a protobuf message `Event`. Scalars need five fields of it, so they are encoded here by hand.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pefll.core.files import sentences_for_disk_errors

# Protobuf wire types.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, bits reversed
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(content: bytes) -> int:
    """Return the CRC-32C (Castagnoli) checksum; zlib's crc32 has another polynomial."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = (crc >> 8) ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked_crc32c(content: bytes) -> int:
    """Return the checksum as record files store it: rotated and shifted, so that a CRC of a CRC stays useful."""
    crc = crc32c(content)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


class Events:
    """One event file, open for appending scalars.

    A resumed run opens a second file in the same folder; TensorBoard shows both as one run.

    Attributes:
        path: the file.
    """

    path: Path

    def __init__(self, folder: Path, then: str = "") -> None:
        """Make the folder where it is missing, and a new event file in it.

        Args:
            folder: of the run.
            then: what to do where it cannot be written, when that is mended.
        """
        now, self._then = time.time(), then
        with sentences_for_disk_errors(f"TensorBoard's events to {folder}", then):
            folder.mkdir(parents=True, exist_ok=True)
            self.path, self._file = _new_file(folder, int(now))
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def scalars(self, values: dict[str, float], step: int, wall_time: float | None = None) -> None:
        """Append one value per tag, and flush, so that a running TensorBoard sees them at once.

        Args:
            values: the value of each tag, for example `{"validation/seen": 0.9}`; stored as float32.
            step: the position on TensorBoard's x axis.
            wall_time: seconds since 1970; now by default.
        """
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _key(2, _FIXED32) + _float32(value)) for tag, value in values.items()
        )
        moment = time.time() if wall_time is None else wall_time
        self._write(_double(1, moment) + _key(2, _VARINT) + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with sentences_for_disk_errors(str(self.path), self._then):
            self._file.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        record = length + struct.pack("<I", masked_crc32c(length)) + event + struct.pack("<I", masked_crc32c(event))
        with sentences_for_disk_errors(str(self.path), self._then):
            self._file.write(record)
            self._file.flush()


def _new_file(folder: Path, second: int) -> tuple[Path, BinaryIO]:
    """Open a file that did not exist: two writers may start in the same second of the same process."""
    stem = f"events.out.tfevents.{second}.{socket.gethostname()}.{os.getpid()}"
    path, attempt = folder / stem, 0
    while True:
        try:
            return path, path.open("xb")
        except FileExistsError:
            attempt += 1
            path = folder / f"{stem}.{attempt}"


def _varint(value: int) -> bytes:
    """Seven bits a byte, lowest first; a negative int64 is its two's complement."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _bytes(field: int, content: bytes) -> bytes:
    return _key(field, _BYTES) + _varint(len(content)) + content


def _double(field: int, value: float) -> bytes:
    return _key(field, _FIXED64) + struct.pack("<d", value)


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # a diverged loss may be finite as float64 and too big for float32
        return struct.pack("<f", float("inf") if value > 0 else float("-inf"))
