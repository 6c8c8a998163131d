"""FedAvg as a plain PyTorch loop: a module, an optimiser, one client after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.setting import CLIP, DECAY, LEARNING_RATE, MOMENTUM, Work
from pefll.models import CharLSTM


class TorchLSTM(CharLSTM):
    """The same network with torch's own LSTM, which is cuDNN's on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Map texts int64 [b, length] to scores [b, outputs]."""
        states, _ = self.lstm(self.embedding(x))
        output: Tensor = self.last(states[:, -1])
        return output


def usual(module: nn.Module) -> nn.Module:
    """Return the module; our LSTM becomes torch's own, which most users would take."""
    if type(module) is not CharLSTM:
        return module
    lstm = module.lstm
    with_torchs = TorchLSTM((), module.last.out_features, lstm.input_size, lstm.hidden_size, lstm.num_layers)
    with_torchs.load_state_dict(module.state_dict())
    return with_torchs


def train(module: nn.Module, x: Tensor, y: Tensor, batches: Tensor) -> None:
    """Train a client's model in place.

    Args:
        module: the model.
        x: [N, ...] samples as the model takes them.
        y: int64 [N].
        batches: int64 [k, b], the samples of each step.
    """
    optimiser = torch.optim.SGD(module.parameters(), LEARNING_RATE, MOMENTUM, weight_decay=DECAY)
    for chosen in batches:
        optimiser.zero_grad()
        F.cross_entropy(module(x[chosen]), y[chosen]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimiser.step()


def run(work: Work, turns: Iterable[int], device: str = "cpu") -> Tensor:
    """Run rounds with one thread, because a step is too small for several threads."""
    torch.set_num_threads(1)
    module = usual(work.module()).to(device)
    x, y = work.inputs(device)
    done = 0
    for rounds in turns:
        for round_ in range(done, done + rounds):
            before = [value.detach().clone() for value in module.parameters()]
            total = [torch.zeros_like(value) for value in before]
            for client in work.cohort(round_):
                with torch.no_grad():
                    for value, start in zip(module.parameters(), before, strict=True):
                        value.copy_(start)
                train(module, x, y, work.batches(round_, client).to(device))
                with torch.no_grad():
                    for sum_, value in zip(total, module.parameters(), strict=True):
                        sum_.add_(value, alpha=1 / work.setting.cohort)
            with torch.no_grad():
                for value, mean in zip(module.parameters(), total, strict=True):
                    value.copy_(mean)
        done += rounds
    return work.flat(module)
