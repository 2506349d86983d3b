"""FedDW's recurrent network for texts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.tasks.models.model import MAPPED, Model

WIDE = 128  # size of a word's embedding, and of each direction
PART = 64  # texts at once on a CPU: an LSTM's activations for 64 stay in the cache


class BiLSTM(nn.Module):
    """A bidirectional LSTM over embedded words, and the mean of its mapped outputs over time.

    Padding counts like words, as in FedDW's code.
    """

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, WIDE)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(WIDE, WIDE, bidirectional=True)
        self.fc1 = nn.Linear(2 * WIDE, WIDE)
        self.fc2 = nn.Linear(WIDE, MAPPED)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features (B, 128) of tokens (B, T)."""
        if tokens.is_cuda or torch.compiler.is_exporting():
            return self._features(tokens)
        return torch.cat([self._features(part) for part in torch.split(tokens, PART)])

    def _features(self, tokens: Tensor) -> Tensor:
        words = self.dropout(self.embedding(tokens.t()))  # (T, B, 128); (B, T, 128) is slower
        outputs, _ = self.lstm(words)  # (T, B, 256)
        mapped = torch.relu(self.fc1(self.dropout(outputs)))
        features: Tensor = self.fc2(mapped.mean(dim=0))
        return features


def bilstm(num_classes: int, *, head_bias: bool | None, vocabulary_size: int) -> Model:
    """Return the network; 1,593,858 parameters with 10,000 tokens and two classes."""
    return Model(BiLSTM(vocabulary_size), MAPPED, num_classes, head_bias=head_bias is not False)
