"""A byte-level GPT: small enough for a CPU, with everything a large one has that can spoil exactness (dropout, tied weights)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each behind a LayerNorm and on a residual path. [batch, time, width] -> same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        y: Tensor = x + self.drop(self.down(functional.gelu(self.up(self.before_mlp(x)))))
        return y


class ByteGPT(nn.Module):
    """Next-byte model: tokens [batch, time] int64 -> logits [batch, time, 256]; with targets -> their mean cross-entropy in nats."""

    def __init__(self, *, width: int = 128, depth: int = 3, heads: int = 4, context: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.drop(self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits if y is None else functional.cross_entropy(logits.flatten(0, 1), y.flatten())
