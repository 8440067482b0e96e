"""The classes that a model is built of. An idea replaces some of them (docs/ideas.md).

Each is called with the arguments shown. What it returns is any module that can be called as the class that
it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotlap.config import ModelConfig
from hotlap.model.attention import Attention
from hotlap.model.block import Block
from hotlap.model.embeddings import ValueEmbeddings
from hotlap.model.head import Head
from hotlap.model.layers import Table
from hotlap.model.mlp import MLP


@dataclass(frozen=True)
class Parts:
    block: Callable[..., Any] = Block  # (config, layer, attention, mlp)
    attention: Callable[[ModelConfig], Any] = Attention
    mlp: Callable[[ModelConfig], Any] = MLP
    embedding: Callable[[int, int], Any] = Table  # (vocabulary, width)
    value_embeddings: Callable[[ModelConfig], Any] = ValueEmbeddings
    head: Callable[[int, int, float], Any] = Head  # (width, padded vocabulary, softcap)


STANDARD = Parts()
