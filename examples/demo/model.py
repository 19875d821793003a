"""A small, real transformer over bytes, and the text it learns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, gelu, scaled_dot_product_attention

CORPUS = Path(__file__).with_name("corpus.txt")
VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes; about 0.7 million parameters as they stand."""

    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 64
    dropout: float = 0.1
    """Not zero: the loss then depends on each rank's random state, so a resume that loses it is caught."""


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        x = x + dropout(mixed, self.dropout, self.training)
        mixed = self.down(gelu(self.up(self.mlp_norm(x))))
        return x + dropout(mixed, self.dropout, self.training)


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Text:
    """Windows of the corpus in an order that depends on the epoch alone, so that a cursor is all there is to save."""

    def __init__(self, context: int) -> None:
        data = CORPUS.read_bytes()
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
        self._context = context
        self.windows = (len(self._data) - 1) // context

    def batch(self, cursor: int, size: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the samples `cursor` to `cursor + size * world`: inputs and the bytes that follow."""
        starts = [self._start(cursor + rank + world * i) for i in range(size)]
        inputs = torch.stack([self._data[start : start + self._context] for start in starts])
        targets = torch.stack([self._data[start + 1 : start + self._context + 1] for start in starts])
        return inputs, targets

    def _start(self, sample: int) -> int:
        epoch, position = divmod(sample, self.windows)
        order = torch.randperm(self.windows, generator=torch.Generator().manual_seed(epoch))
        return int(order[position]) * self._context
