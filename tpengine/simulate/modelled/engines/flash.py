"""Attention kernels that keep no scores: shares of a GPU's peak, from the kernels' own microbenchmarks. No torch.

Sources: Dao, "FlashAttention-2", 2023: on an A100 it attains up to 0.73 of the peak forward and 0.63 backward, and is
1.3 to 1.5 times as fast forward, and about twice as fast backward, as FlashAttention in Triton. Shah et al.,
"FlashAttention-3", 2024, figures 5 and 6, on an H100, causal, heads of 128: FlashAttention-2 191, 260, 298, 319, 333,
335 TFLOP/s forward for sequences of 512 to 16,384, cuDNN 539 at the longest. Causal attention attains 0.9 of the other
(335 of 370); heads of 64 attain 0.875 of heads of 128 (324 of 370); backward of FlashAttention-2 0.83 of forward (264
of 318, heads of 64), of cuDNN the same as forward (395, heads of 64).
"""

from __future__ import annotations

from dataclasses import dataclass

from tpengine.simulate.machine import Curve

_CAUSAL, _HEADS_OF_64 = 335 / 370, 324 / 370
_BACKWARD = 264 / 318
# Of what the longest sequences attain.
_BY_LENGTH = Curve(((512.0, 191 / 335), (1024.0, 260 / 335), (2048.0, 298 / 335), (4096.0, 319 / 335), (8192.0, 1.0)))


@dataclass(frozen=True)
class FlashKernel:
    """A kernel on one kind of GPU.

    Attributes:
        name: in words.
        forward, backward: share of the peak, of long causal sequences and heads of 128.
    """

    name: str
    forward: float
    backward: float

    def share(self, seq: int, head_size: int, *, backward: bool) -> float:
        """Return the share of the peak for sequences and heads of these sizes."""
        size = _HEADS_OF_64 if head_size <= 64 else 1.0
        return (self.backward if backward else self.forward) * _BY_LENGTH.at(seq) * size


FLASH_1_ON_AMPERE = FlashKernel("FlashAttention 1 in Triton", 0.73 * _CAUSAL / 1.4, 0.63 * _CAUSAL / 2)
# "About twice as fast" is said of FlashAttention 1 in CUDA in both directions.
FLASH_1_IN_CUDA_ON_AMPERE = FlashKernel("FlashAttention 1", 0.73 * _CAUSAL / 2, 0.63 * _CAUSAL / 2)
FLASH_2_ON_AMPERE = FlashKernel("FlashAttention 2", 0.73 * _CAUSAL, 0.63 * _CAUSAL)
FLASH_2_ON_HOPPER = FlashKernel("FlashAttention 2", 335 / 989, _BACKWARD * 335 / 989)
# 1.5 to 2.0 times FlashAttention 2 forward, 1.5 to 1.75 times backward (FlashAttention-3, abstract and section 4.1).
FLASH_3_ON_HOPPER = FlashKernel("FlashAttention 3", 1.75 * 335 / 989, 1.625 * _BACKWARD * 335 / 989)
# The same kernel on the newer GPU, by its distance from FlashAttention 2.
FLASH_1_ON_HOPPER = FlashKernel("FlashAttention 1 in Triton", 335 / 989 / 1.4, 335 / 989 * _BACKWARD / 2)
CUDNN_ON_HOPPER = FlashKernel("cuDNN's attention", 539 / 989, 539 / 989)
