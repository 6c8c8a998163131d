"""A small form of the campaign of malformed replies."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")

from tests.faults.replies import campaign


def test_forty_malformed_replies(tmp_path):
    found = campaign(40, 1, tmp_path)
    assert found["faults"] == []
    assert found["left_out"] + found["same_result"] == 40
    assert found["left_out"] > 30
    assert (found["accepted_silently"], found["tracebacks"]) == (0, 0)
