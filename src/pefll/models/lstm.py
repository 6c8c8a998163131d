"""LEAF's network that predicts the next character, in plain operations that `torch.func.vmap` supports."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pefll.core.reference import reference


@reference
def lstm_layer(x: Tensor, of_input: Tensor, of_state: Tensor, bias_1: Tensor, bias_2: Tensor) -> Tensor:
    """Return the states [length, b, h] of an LSTM layer at each time step, for x [length, b, i].

    Args:
        x: the input of each time step; the layer starts with zeros as state and memory.
        of_input: weights [4h, i] of the input gate, forget gate, new memory and output gate, as in `nn.LSTM`.
        of_state: weights [4h, h].
        bias_1: [4h].
        bias_2: [4h]; torch has two biases.
    """
    products = x @ of_input.T
    state = torch.zeros_like(products[0][:, : of_state.shape[1]])
    memory = state
    states = []
    for product in products.unbind():
        gates = product + state @ of_state.T + bias_1 + bias_2
        let_in, forget, new, let_out = gates.chunk(4, dim=1)
        memory = forget.sigmoid() * memory + let_in.sigmoid() * new.tanh()
        state = let_out.sigmoid() * memory.tanh()
        states.append(state)
    return torch.stack(states)


def last_state(lstm: nn.LSTM, x: Tensor) -> Tensor:
    """Return the last layer's state [b, h] after all time steps of x [length, b, i].

    `torch.func.vmap` does not support torch's LSTM operation. So this function computes it from the parameters of
    `nn.LSTM`, which keep their names, shapes and meaning.
    """
    for layer in range(lstm.num_layers):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        x = lstm_layer(x, *(getattr(lstm, f"{name}_l{layer}") for name in names))
    return x[-1]


class CharLSTM(nn.Module):
    """An embedding of characters, LSTM layers, and a linear layer on the last state. Texts may have any length."""

    def __init__(
        self, input_shape: tuple[int, ...], outputs: int, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        del input_shape
        self.embedding = nn.Embedding(outputs, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map texts int64 [b, length] to scores of the next character [b, outputs]."""
        output: Tensor = self.last(last_state(self.lstm, self.embedding(x.transpose(0, 1))))
        return output
