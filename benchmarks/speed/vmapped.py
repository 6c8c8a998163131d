"""FedAvg with `torch.func.vmap` over the clients of a round, as in PyTorch's tutorials on ensembles; without graphs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.speed.setting import CLIP, DECAY, LEARNING_RATE, MOMENTUM, Work

Parameters = dict[str, Tensor]


def run(work: Work, turns: Iterable[int], device: str = "cpu") -> Tensor:
    """Run rounds with all clients of a cohort at once."""
    torch.set_num_threads(1)
    module = work.module().to(device)
    x, y = work.inputs(device)
    c = work.setting.cohort

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, parameters, (x,)), y)

    def step(parameters: Parameters, velocity: Parameters, x: Tensor, y: Tensor) -> tuple[Parameters, Parameters]:
        gradient = grad(loss)(parameters, x, y)
        norm = torch.stack([value.square().sum() for value in gradient.values()]).sum().sqrt()
        scale = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        velocity = {
            name: MOMENTUM * velocity[name] + scale * gradient[name] + DECAY * parameters[name] for name in parameters
        }
        return {name: parameters[name] - LEARNING_RATE * velocity[name] for name in parameters}, velocity

    step_everywhere = vmap(step)
    server = {name: value.detach().clone() for name, value in module.named_parameters()}
    done = 0
    for rounds in turns:
        for round_ in range(done, done + rounds):
            batches = torch.stack([work.batches(round_, client) for client in work.cohort(round_)]).to(device)
            parameters = {name: value.expand(c, *value.shape) for name, value in server.items()}
            velocity = {name: torch.zeros_like(value) for name, value in parameters.items()}
            for chosen in batches.unbind(dim=1):
                parameters, velocity = step_everywhere(parameters, velocity, x[chosen], y[chosen])
            server = {name: value.mean(dim=0) for name, value in parameters.items()}
        done += rounds
    return work.problem.model.flatten([value.cpu() for value in server.values()])
