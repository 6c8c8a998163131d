"""LEAF's network that predicts the next character, in plain operations that `torch.func.vmap` supports."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CharLSTM(nn.Module):
    """An embedding of characters, LSTM layers, and a linear layer on the last state.

    `torch.func.vmap` does not support torch's LSTM operation. So `forward` computes it from the parameters of
    `nn.LSTM`, which keep their names, shapes and meaning. Texts may have any length.
    """

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
        sequence = self.embedding(x).unbind(dim=1)
        for layer in range(self.lstm.num_layers):
            sequence = self._layer(sequence, layer)
        output: Tensor = self.last(sequence[-1])
        return output

    def _layer(self, sequence: tuple[Tensor, ...], layer: int) -> tuple[Tensor, ...]:
        of_input, of_state, bias_1, bias_2 = (
            getattr(self.lstm, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        state = torch.zeros_like(sequence[0] @ of_input[: self.lstm.hidden_size].T)
        memory = state
        states = []
        for step in sequence:
            gates = step @ of_input.T + state @ of_state.T + bias_1 + bias_2
            let_in, forget, new, let_out = gates.chunk(4, dim=1)
            memory = forget.sigmoid() * memory + let_in.sigmoid() * new.tanh()
            state = let_out.sigmoid() * memory.tanh()
            states.append(state)
        return tuple(states)
