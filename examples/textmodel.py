"""A small byte-level GPT and the text that it learns, for ``train_text.py``.

The text is what every machine with Python has: the ``.py`` files of the standard library, in sorted order. Which bytes
a rank sees at a step is computed from (seed, step, rank) alone. There is no loader state to save, so a resumed run sees
the same bytes as one that was never interrupted.
"""

from __future__ import annotations

import os
import sysconfig

import torch
import torch.nn.functional as F
from torch import nn

#: Directories below the standard library that are not part of it, or differ from one Python build to the next.
_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


def load_text(limit_bytes: int) -> torch.Tensor:
    """The first ``limit_bytes`` bytes of the standard library's sources, as one uint8 tensor."""
    root = sysconfig.get_paths()["stdlib"]
    pieces: list[bytes] = []
    total = 0
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _SKIPPED and not name.startswith("config-"))
        for name in sorted(names):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            with open(os.path.join(folder, name), "rb") as source:
                pieces.append(source.read())
            total += len(pieces[-1])
            if total >= limit_bytes:
                return _as_tensor(pieces, limit_bytes)
    if not pieces:
        raise SystemExit(f"no .py files below {root}: this Python has its standard library in an archive")
    return _as_tensor(pieces, limit_bytes)


def _as_tensor(pieces: list[bytes], limit_bytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(pieces)[:limit_bytes]), dtype=torch.uint8)


class Batches:
    """Random windows of the text, a pure function of (seed, step, rank)."""

    def __init__(self, text: torch.Tensor, *, batch: int, context: int, seed: int, rank: int) -> None:
        self._text = text
        self._batch = batch
        self._seed = seed
        self._rank = rank
        self._window = torch.arange(context + 1)
        self._starts = len(text) - context - 1
        if self._starts < 1:
            raise SystemExit(f"the text has {len(text)} bytes, fewer than one window of {context + 1}")

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed((self._seed * 1_000_003 + step) * 4099 + self._rank)
        starts = torch.randint(self._starts, (self._batch, 1), generator=source)
        windows = self._text[starts + self._window].long()
        return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a layer norm and with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_mlp(x)))))


class ByteGPT(nn.Module):
    """Embeddings, blocks, and a head that is the token embedding itself (one parameter, saved once)."""

    def __init__(self, *, width: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        heads = max(1, width // 64)
        if width % heads:
            raise SystemExit(f"--width {width} does not divide into {heads} heads; use a multiple of 64")
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
