"""The part of Llama-3 8B, 70B and 405B on one of 8 tensor-parallel ranks: the shapes at which operators are measured.

Sources: Dubey et al., "The Llama 3 herd of models", arXiv 2407.21783, table 3; Yang et al., "Qwen3 technical report",
arXiv 2505.09388, table 2.
"""

from __future__ import annotations

from dataclasses import dataclass

TP = 8
SEQUENCES = (4096, 8192, 32768)


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer, whole and on one rank.

    Attributes:
        name: as in results.
        hidden: D, width.
        heads, kv_heads: H and G of one rank.
        head_size: E.
        ffn: F of one rank.
        vocabulary: columns of one rank, padded to a multiple of 8.
        num_experts, top_k: of a layer of experts, and how many a token chooses; by default as Mixtral 8x7B, whose
            experts are as wide as the 8B's network.
        expert_ffn: width of an expert on one rank; 0 for `ffn`.
    """

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    num_experts: int = 8
    top_k: int = 2
    expert_ffn: int = 0

    @property
    def expert_width(self) -> int:
        """Return F of an expert on one rank."""
        return self.expert_ffn or self.ffn

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Return rows and columns (out, in) of one rank's weights in a block, by what they make or read."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_size, self.hidden),
            "out": (self.hidden, self.heads * self.head_size),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


_VOCABULARY = 128256 // TP
MODELS = (
    Model("llama3_8b", 4096, 32 // TP, 8 // TP, 128, 14336 // TP, _VOCABULARY),
    Model("llama3_70b", 8192, 64 // TP, 8 // TP, 128, 28672 // TP, _VOCABULARY),
    Model("llama3_405b", 16384, 128 // TP, 8 // TP, 128, 53248 // TP, _VOCABULARY),
)
# Undivided, on one GPU.
WHOLE_MODELS = (
    Model("llama3_8b_whole", 4096, 32, 8, 128, 14336, 128256),
    Model("llama_1b", 2048, 32, 8, 64, 8192, 32768),
    Model("qwen3_30b_a3b", 2048, 32, 4, 128, 6144, 151936, num_experts=128, top_k=8, expert_ffn=768),
)
# For a CPU that interprets the kernels.
REHEARSED = Model("rehearsed", 64, 4, 2, 16, 48, 96)
