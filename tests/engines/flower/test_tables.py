"""Real clients with raw tables: the plan is in the agreement, so each client encodes its own rows alike."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'pefll[flower]'")
pytest.importorskip("pandas")

from benchmarks.users_table import users_table
from pefll.core.errors import PefllError
from pefll.data.frames import inputs_of
from pefll.deploy.setup import agreement_like
from pefll.engines.flower.client.member import Member
from pefll.engines.flower.client.policy import NO_LIMITS, Refusal
from pefll.engines.flower.protocol.agreement import Agreement


@pytest.fixture(scope="module")
def frame():
    import pandas

    return pandas.DataFrame(users_table(12, 5, groups=2, most=20))


@pytest.fixture
def agreed(tmp_path, frame):
    frame.to_csv(tmp_path / "example.csv", index=False)
    return agreement_like(
        str(tmp_path / "example.csv"), tmp_path, method="fedavg", pairs=[], model="auto", num_clients=3,
        label="liked", client="user_id",
    )  # fmt: skip


def member(path, agreed):
    return Member("a", path, "liked", None, True, None, NO_LIMITS, agreed)


def test_a_client_encodes_its_raw_rows_by_the_plan_of_the_agreement(tmp_path, frame, agreed):
    theirs = Agreement.from_config(agreed.to_config())
    assert theirs == agreed
    assert theirs.sha256 == agreed.sha256
    mine = frame[frame.user_id == "user-00001"].drop(columns="user_id")
    mine.to_csv(tmp_path / "mine.csv", index=False)
    own = member(tmp_path / "mine.csv", theirs).federation()
    assert own.input_shape == theirs.input_shape
    np.testing.assert_array_equal(own.x.numpy(), inputs_of(mine, (), agreed.plan, "t"))
    mine.drop(columns="city").to_csv(tmp_path / "mine.csv", index=False)
    with pytest.raises(PefllError, match=r"'city'.*PEFLL-M030"):
        member(tmp_path / "mine.csv", theirs).federation()


def test_what_a_client_refuses_in_a_plan(tmp_path, frame, agreed):
    frame.to_csv(tmp_path / "mine.csv", index=False)
    config = agreed.to_config()
    greedy = Agreement.from_config(config | {"table": config["table"].replace("number_0", "liked")})
    with pytest.raises(Refusal, match="PEFLL-P014"):
        member(tmp_path / "mine.csv", greedy).federation()
    for damaged in ("{}", "[]", config["table"].replace("number", "code"), config["table"][:-2]):
        with pytest.raises(PefllError, match="PEFLL-F211"):
            Agreement.from_config(config | {"table": damaged})
