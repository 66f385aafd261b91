"""Machines by name: GPUs from their data sheets and published microbenchmarks, and a CPU core. Nothing is fitted to
the step times of training runs.

Peaks are of dense matmuls, of memory, and of links in one direction. The network between nodes is what such nodes are
sold with: a card of 400 Gbit/s for each Hopper or Blackwell GPU, 200 for each A100. A cluster that differs needs a file
(file.py), which `tpengine doctor` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tpengine.planner.machine.machine import Link, Machine
from tpengine.planner.machine.measured import Curve

_NVIDIA_NODE = 8
# Of the network's bit rate: what rings over many nodes attain in published runs of nccl-tests.
_NETWORK_SHARE = 0.85
_NETWORK_LATENCY_S = 10e-6
# From the end of a kernel to the start of the next one in a stream, and until another GPU of the node sees a flag.
_KERNEL_S = 3e-6
_NODE_LATENCY_S = 3e-6
# Starting an operator through torch costs the host some microseconds; an action of a plan some more.
_HOST_S_PER_OPERATOR = 6e-6
_HOST_S_PER_ACTION = 50e-6

# Of a GPU's data sheet: what reading and writing attains, and shares of the peak by flops of one matmul. A small matmul
# does not fill all processors; a large one is held back by power. Large: 0.66 of an H100's peak at the clocks that it
# can hold (tpkernels.work), 0.77 of an A100's, of which published sweeps find 0.87 for the best shape.
_MEMORY = Curve(((1e5, 0.1), (1e7, 0.6), (1e8, 0.85)))
_HOPPER = Curve(((1e8, 0.05), (1e10, 0.45), (1e11, 0.62), (1e12, 0.66)))
_AMPERE = Curve(((1e8, 0.10), (1e10, 0.55), (1e11, 0.74), (1e12, 0.77)))
# Of the peak, for large matmuls of normally distributed numbers, which cost more power than zeros. cuBLAS attains 257
# of an A100's 312 TFLOP/s at 8192 x 8192 x 8192 (Horace He, "Strangely, matrix multiplications on GPUs run faster when
# given predictable data", 2024), 716 of an H100's 989 (Pranjal Shankhdhar, "Outperforming cuBLAS on H100", 2024). Of
# others the best shape is known (ML Engineering, "maximum achievable matmul FLOPS"), of which an H100 attains 0.9.
# On an A100 that is 19 rounds of tiles of 225 us, of which beginning and writing a tile take 4.5 us: 263 within tiles.
_AMPERE_TILES, _HOPPER_TILES = 263 / 312, 716 / 989
_OF_BEST = 716 / 794.5
# Chips of one kind differ in products that power limits: by 8 % of the median on the average of five clusters, outliers
# left out (Sinha et al., "Not All GPUs Are Created Equal", SC 2022). Taken as the whiskers of a box plot, which of a
# normal distribution are 5.4 standard deviations apart. Those chips are older; newer ones are assumed to be like them.
_CHIP_SPREAD = 0.08 / 5.4


def _scaled(curve: Curve, share: float) -> Curve:
    return Curve(tuple((size, share * of) for size, of in curve.points))


# Our own kernels, causal, on an H200 (benchmarks/results/nvidia_h200/gpu.jsonl): forward 0.22 of the peak for 4 heads
# of 128 and 4,096 tokens, 0.32 for 8,192, 0.27 for 128 heads of 64 and 2,048; gradients 0.115, 0.185 and 0.135. Newer
# GPUs are assumed to attain the same.
_ATTENTION_HOPPER, _GRADIENT_HOPPER = Curve(((1e8, 0.02), (1.7e10, 0.22), (7e10, 0.3), (5e11, 0.32))), 0.45
# Elsewhere ours has not run. FlashAttention 2 attains 0.6 to 0.7 of an A100's peak forward, and backward 0.86 of that
# (0.63 to 0.73); ours computes seven products backward for the five that are counted.
_ATTENTION_AMPERE, _GRADIENT = Curve(((1e8, 0.06), (1e10, 0.4), (1e11, 0.55))), 0.86 * 5 / 7

# Bus bandwidth of all-reduce on one node of A100s, GB/s by payload in MiB (nccl-tests): 2, 4 and 8 ranks as published
# with vTrain (trace/a100 of its repository), the smallest and largest payloads of 8 ranks from the ML Engineering book.
_MIB = 1 << 20


def _ring(points: Mapping[float, float]) -> Curve:
    return Curve(tuple((size * _MIB, rate * 1e9) for size, rate in points.items()))


_A100_RINGS = {
    2: _ring(
        {
            1: 23.72,
            2: 39.25,
            4: 68.55,
            8: 96.53,
            16: 127.16,
            32: 145.88,
            64: 165.81,
            128: 175.77,
            256: 184.39,
            512: 189.15,
            1024: 197.28,
        }
    ),
    4: _ring(
        {
            1: 30.6,
            2: 56.44,
            4: 81.37,
            8: 107.74,
            16: 140.11,
            32: 177.09,
            64: 185.11,
            128: 201.61,
            256: 208.73,
            512: 216.48,
            1024: 221.86,
        }
    ),
    8: _ring(
        {
            0.03125: 1.31,
            0.0625: 2.45,
            0.125: 4.43,
            0.25: 7.47,
            0.5: 11.41,
            1: 19.78,
            2: 39.36,
            4: 76.62,
            8: 109.3,
            16: 126.33,
            32: 163.97,
            64: 202.52,
            128: 202.13,
            256: 217.25,
            512: 224.15,
            1024: 229.35,
            16384: 234.89,
        }
    ),
}


# NCCL takes so many processors for what a node's links carry, each an equal part of it: its log on eight H100s says "24
# coll channels". With fewer the rate falls in proportion: not measured here.
_NCCL_CHANNELS = 24


def _gpu(
    name: str,
    flops_per_s: float,
    memory_bytes_per_s: float,
    memory_bytes: float,
    node_bytes_per_s: float,
    network_bits_per_s: float,
    matmul: Curve = _HOPPER,
    attention: Curve = _ATTENTION_HOPPER,
    attention_gradient: float = _GRADIENT_HOPPER,
    node_share: float = 0.82,
    float32_flops_per_s: float = 67e12,
    float64_flops_per_s: float = 67e12,
    measured: Mapping[int, Curve] | None = None,
    num_processors: int = 132,
    tile_share: float = _HOPPER_TILES,
    per_node: int = _NVIDIA_NODE,
    hides_tiles: bool = True,
) -> Machine:
    network = network_bits_per_s / 8 * _NETWORK_SHARE
    node = node_bytes_per_s * node_share
    return Machine(
        name=name,
        source="data sheet, and shares from microbenchmarks",
        is_asynchronous=True,
        flops_per_s={
            "bfloat16": flops_per_s,
            "float16": flops_per_s,
            "float32": float32_flops_per_s,
            "float64": float64_flops_per_s,
        },
        matmul=matmul,
        attention=attention,
        attention_gradient=attention_gradient,
        memory_bytes_per_s=memory_bytes_per_s,
        memory=_MEMORY,
        kernel_s=_KERNEL_S,
        host_s_per_operator=_HOST_S_PER_OPERATOR,
        host_s_per_action=_HOST_S_PER_ACTION,
        ranks_per_node=per_node,
        within=Link(node, _NODE_LATENCY_S, node, measured or {}),
        between=Link(network, _NETWORK_LATENCY_S, network),
        memory_bytes=int(memory_bytes),
        num_processors=num_processors,
        tile_share=tile_share,
        hides_tiles=hides_tiles,
        chip_spread=_CHIP_SPREAD,
        nccl_bytes_per_s_per_processor=node / _NCCL_CHANNELS,
    )


_A100: Mapping[str, Any] = {
    "matmul": _AMPERE,
    "attention": _ATTENTION_AMPERE,
    "attention_gradient": _GRADIENT,
    "node_share": 0.78,
    "float32_flops_per_s": 19.5e12,
    "float64_flops_per_s": 19.5e12,
    "num_processors": 108,
    "tile_share": _AMPERE_TILES,
    "hides_tiles": False,
}

# Ranks of one host that have a core each. The rate of matmuls is from 1,000 tokens/s of a model of 26 million
# parameters at 6 flops each; that of rings from gloo's 146 ms for 64 MB on four processes. Both were measured on two
# cores of an AMD EPYC with torch 2.13. Memory and link rates are what such a core copies at; the latency is a wake-up.
CPU_CORE = Machine(
    name="cpu",
    source="one CPU core per rank",
    is_asynchronous=False,
    flops_per_s={"float32": 150e9, "float64": 75e9, "bfloat16": 150e9, "float16": 150e9},
    matmul=Curve.flat(1.0),
    attention=Curve.flat(1.0),
    memory_bytes_per_s=10e9,
    memory=Curve.flat(1.0),
    kernel_s=0.0,
    host_s_per_operator=0.0,
    host_s_per_action=0.0,
    ranks_per_node=1 << 20,
    within=Link(5e9, 20e-6, 0.65e9),
    between=Link(5e9, 20e-6, 0.65e9),
    # The core that computes makes the sums and gathers of its replica, too.
    reduce_share=1.0,
)

_GB = 1e9
_OLD_TENSOR_CORES: Mapping[str, Any] = {
    # Of a V100 no matmul is known better than an A100's share.
    "matmul": _AMPERE,
    "attention": _ATTENTION_AMPERE,
    "attention_gradient": _GRADIENT,
    "node_share": 0.78,
    "float32_flops_per_s": 15.7e12,
    "float64_flops_per_s": 7.8e12,
    "num_processors": 80,
    "tile_share": _AMPERE_TILES,
    "hides_tiles": False,
}
_BLACKWELL: Mapping[str, Any] = {
    "float32_flops_per_s": 75e12,
    "float64_flops_per_s": 37e12,
    "num_processors": 148,
    "node_share": 0.758,
}
# Published sweeps of matmuls find half of an MI300X's peak.
_CDNA: dict[str, Any] = {
    "matmul": Curve(((1e8, 0.03), (1e10, 0.3), (1e11, 0.45), (1e12, 0.5))),
    "attention": Curve(((1e8, 0.02), (1e10, 0.2), (1e11, 0.3))),
    "attention_gradient": _GRADIENT,
    "float32_flops_per_s": 163e12,
    "float64_flops_per_s": 163e12,
    "num_processors": 304,
}
# A chip of less power runs at the clock that it can hold: power is about the clock cubed.
_500_OF_700_W = (500 / 700) ** (1 / 3)
_400_OF_700_W = (400 / 700) ** (1 / 3)
_350_OF_700_W = (350 / 700) ** (1 / 3)
_300_OF_400_W = (300 / 400) ** (1 / 3)
_250_OF_400_W = (250 / 400) ** (1 / 3)


def _machines() -> Mapping[str, Machine]:
    found = [
        CPU_CORE,
        # NVIDIA V100 datasheet (SXM3, DGX-2): 125 TFLOP/s, 0.9 TB/s, NVLink 2 of 300 GB/s both ways; a node of 16 has
        # eight cards of 100 Gbit/s.
        _gpu("v100-32", 125e12, 0.9e12, 32 * _GB, 150e9, 50e9, per_node=16, **_OLD_TENSOR_CORES),
        # Eight in a DGX-1, with four cards of 100 Gbit/s.
        _gpu("v100-16", 125e12, 0.9e12, 16 * _GB, 150e9, 50e9, per_node=8, **_OLD_TENSOR_CORES),
        # NVIDIA A100 datasheet (SXM): 312 TFLOP/s, NVLink 3 of 600 GB/s both ways; eight 200 Gbit/s cards.
        _gpu("a100-40", 312e12, 1.555e12, 40 * _GB, 300e9, 200e9, measured=_A100_RINGS, **_A100),
        _gpu("a100", 312e12, 2.039e12, 80 * _GB, 300e9, 200e9, measured=_A100_RINGS, **_A100),
        # NVIDIA A100 datasheet (PCIe): 1.935 TB/s, 300 of 400 W, PCIe 4 of 64 GB/s both ways.
        _gpu(
            *("a100-pcie", 312e12, 1.935e12, 80 * _GB, 32e9, 200e9),
            **{**_A100, "matmul": _scaled(_AMPERE, _300_OF_400_W), "tile_share": _AMPERE_TILES * _300_OF_400_W},
        ),
        # The same with 40 GB at 1.555 TB/s, 250 W.
        _gpu(
            *("a100-pcie-40", 312e12, 1.555e12, 40 * _GB, 32e9, 200e9),
            **{**_A100, "matmul": _scaled(_AMPERE, _250_OF_400_W), "tile_share": _AMPERE_TILES * _250_OF_400_W},
        ),
        # An A100 with NVLink of 400 GB/s both ways.
        _gpu("a800", 312e12, 2.039e12, 80 * _GB, 200e9, 200e9, **_A100),
        # NVIDIA H100 datasheet (SXM): 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 4 of 900 GB/s both ways.
        _gpu("h100", 989e12, 3.35e12, 80 * _GB, 450e9, 400e9),
        # An H100 with NVLink of 400 GB/s both ways.
        _gpu("h800", 989e12, 3.35e12, 80 * _GB, 200e9, 400e9),
        # NVIDIA H100 datasheet (PCIe): 1,513 TFLOP/s with sparsity, 114 processors, 2 TB/s, 350 W, PCIe 5 of 128 GB/s
        # both ways.
        _gpu(
            *("h100-pcie", 756.5e12, 2.0e12, 80 * _GB, 64e9, 400e9),
            matmul=_scaled(_HOPPER, _350_OF_700_W),
            attention=_scaled(_ATTENTION_HOPPER, _350_OF_700_W),
            tile_share=_HOPPER_TILES * _350_OF_700_W,
            num_processors=114,
        ),
        # NVIDIA H100 NVL datasheet: 1,671 TFLOP/s with sparsity, 132 processors, 94 GB at 3.9 TB/s, 400 W. Bridges join
        # two; more than two exchange over PCIe 5.
        _gpu(
            *("h100-nvl", 835.5e12, 3.9e12, 94 * _GB, 64e9, 400e9),
            matmul=_scaled(_HOPPER, _400_OF_700_W),
            attention=_scaled(_ATTENTION_HOPPER, _400_OF_700_W),
            tile_share=_HOPPER_TILES * _400_OF_700_W,
        ),
        # Grand Teton as in torchtitan's benchmarks: 96 GB of slower memory, 500 W.
        _gpu(
            *("h100-500w", 989e12, 2.4e12, 96 * _GB, 450e9, 400e9),
            matmul=_scaled(_HOPPER, _500_OF_700_W),
            attention=_scaled(_ATTENTION_HOPPER, _500_OF_700_W),
            tile_share=_HOPPER_TILES * _500_OF_700_W,
        ),
        # NVIDIA H200 datasheet (SXM): as the H100, with 141 GB at 4.8 TB/s.
        _gpu("h200", 989e12, 4.8e12, 141 * _GB, 450e9, 400e9),
        # NVIDIA GH200 datasheet: an H100 with 96 GB at 4 TB/s; four per node, a card of 200 Gbit/s each (Alps).
        _gpu("gh200", 989e12, 4.0e12, 96 * _GB, 450e9, 200e9, per_node=4, tile_share=_OF_BEST * 828.6 / 989),
        # NVIDIA DGX B200 datasheet, an eighth of it: 2.25 PFLOP/s, 8 TB/s, 180 GB, NVLink 5 of 1.8 TB/s both ways.
        # Rings attain 682 of 900 GB/s (ML Engineering).
        _gpu("b200", 2250e12, 8e12, 180 * _GB, 900e9, 400e9, tile_share=_OF_BEST * 1745 / 2250, **_BLACKWELL),
        _gpu("b300", 2250e12, 8e12, 288 * _GB, 900e9, 800e9, tile_share=_OF_BEST * 1769 / 2250, **_BLACKWELL),
        # NVIDIA GB200 NVL72: 72 in one domain of NVLink.
        _gpu(
            *("gb200", 2500e12, 8e12, 186 * _GB, 900e9, 400e9),
            per_node=72,
            tile_share=_OF_BEST * 1822 / 2500,
            **_BLACKWELL,
        ),
        _gpu(
            *("gb300", 2500e12, 8e12, 288 * _GB, 900e9, 800e9),
            per_node=72,
            tile_share=_OF_BEST * 1822 / 2500,
            **_BLACKWELL,
        ),
        # AMD Instinct MI250X datasheet, half of it, which is one device: 191.5 TFLOP/s, 1.64 TB/s, 64 GB; eight per
        # node, four cards of 200 Gbit/s (Frontier).
        _gpu(
            *("mi250x", 191.5e12, 1.64e12, 64 * _GB, 175e9, 100e9),
            tile_share=_OF_BEST * 668.4 / 1307,
            **(_CDNA | {"num_processors": 110, "float32_flops_per_s": 47.9e12, "float64_flops_per_s": 47.9e12}),
        ),
        # AMD Instinct MI300X datasheet: 1,307 TFLOP/s, 5.3 TB/s, 192 GB, seven links of 64 GB/s each way.
        _gpu("mi300x", 1307e12, 5.3e12, 192 * _GB, 448e9, 400e9, tile_share=_OF_BEST * 668.4 / 1307, **_CDNA),
        _gpu("mi325x", 1307e12, 6.0e12, 256 * _GB, 448e9, 400e9, tile_share=_OF_BEST * 784.9 / 1307, **_CDNA),
        _gpu(
            *("mi355x", 2500e12, 8.0e12, 288 * _GB, 535.5e9, 400e9),
            tile_share=_OF_BEST * 1565 / 2500,
            **(_CDNA | {"num_processors": 256}),
        ),
    ]
    return MappingProxyType({machine.name: machine for machine in found})


MACHINES = _machines()


def machine_on(device: str) -> Machine:
    """Return the machine by whose rates a run that is not measured yet is planned: `device` is cpu or cuda."""
    return MACHINES["h200"] if device == "cuda" else CPU_CORE
