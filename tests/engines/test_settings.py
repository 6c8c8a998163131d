"""What engines set in torch and the C library while they are open, and give back."""

from __future__ import annotations

import pytest
import torch

from pefll.backend.precision import PRODUCTS, products
from pefll.core.errors import PefllError
from pefll.engines.serial import SerialEngine
from pefll.engines.settings import keep_freed_memory
from pefll.engines.vector import VectorEngine
from pefll.methods import build_method
from tests.engines.test_engines import FEATURES, small
from tests.engines.test_workers import troubled
from tests.federations import problem_of


def test_engines_give_torch_its_settings_back():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    federation = small(FEATURES)
    learner = build_method("fedavg", problem_of(federation), {})
    for precision, tensor_cores in (("tf32", True), ("bf16", True), ("float32", False)):
        engine = VectorEngine(federation, learner, seed=0, clients_per_round=2, precision=precision)
        assert torch.backends.cuda.matmul.allow_tf32 == tensor_cores
        assert torch.backends.cudnn.allow_tf32 == tensor_cores
        assert products() == PRODUCTS[precision]
        engine.close()
        assert products() == PRODUCTS["float32"]
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_the_last_engine_to_close_gives_the_settings_back():
    torch.set_num_threads(2)
    federation = small(FEATURES)
    learner = build_method("fedavg", problem_of(federation), {})
    first, second = (VectorEngine(federation, learner, seed=0, clients_per_round=2, precision="tf32") for _ in "ab")
    with pytest.raises(PefllError, match=r"\btf32\b.*PEFLL-T001"):
        VectorEngine(federation, learner, seed=0, clients_per_round=2)
    first.close()
    first.close()  # closing twice is closing once
    assert torch.get_num_threads() == 1
    assert products() == PRODUCTS["tf32"]
    second.close()
    assert torch.get_num_threads() == 2
    assert products() == PRODUCTS["float32"]
    forgotten = VectorEngine(federation, learner, seed=0, clients_per_round=2, precision="tf32")
    del forgotten
    VectorEngine(federation, learner, seed=0, clients_per_round=2).close()


def test_engines_give_torch_its_threads_back():
    torch.set_num_threads(2)
    federation = small(FEATURES)
    learner = build_method("fedavg", problem_of(federation), {})
    for make in (SerialEngine, VectorEngine):
        engine = make(federation, learner, seed=0, clients_per_round=2)
        assert torch.get_num_threads() == 1
        engine.close()
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize("flushed", [False, True])
def test_tiny_numbers_are_zero_while_an_engine_is_open(flushed):
    def tiny() -> float:
        return float(torch.full((), 1e-38) * 0.1)

    if not torch.set_flush_denormal(flushed):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        engine = troubled("", 1)
        assert tiny() == 0
        engine.close()
        assert (tiny() == 0) == flushed
    finally:
        torch.set_flush_denormal(False)


def test_memory_is_not_torn_between_engines():
    """Settings of the C library are changed and changed back with live tensors of all sizes around."""
    kept = [torch.arange(size) for size in (1, 1 << 14, 1 << 18, 1 << 22)]
    for keep in (True, False, True, False):
        keep_freed_memory(keep)
        kept += [tensor.clone() for tensor in kept[:4]]
        del kept[4:6]
    assert all(torch.equal(tensor, torch.arange(len(tensor))) for tensor in kept)
