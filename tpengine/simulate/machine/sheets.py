"""Machines by name: GPUs from their data sheets and published microbenchmarks, and a CPU core. Nothing is fitted to
the step times of training runs.

Peaks are of dense matmuls, of memory, and of links in one direction. The network between nodes is what such nodes are
sold with: a card of 400 Gbit/s for each Hopper or Blackwell GPU, 200 for each A100. A cluster that differs needs a file
(file.py), which `python -m benchmarks.run machine` writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tpengine.simulate.machine.curve import Curve
from tpengine.simulate.machine.link import Link
from tpengine.simulate.machine.machine import Machine

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
# FlashAttention 2 attains 0.6 to 0.7 of an A100's peak forward, FlashAttention 3 0.65 of an H100's; backward less.
_ATTENTION_HOPPER = Curve(((1e8, 0.03), (1e10, 0.35), (1e11, 0.5)))
_ATTENTION_AMPERE = Curve(((1e8, 0.06), (1e10, 0.4), (1e11, 0.55)))

# Bus bandwidth of all-reduce on one node of 8 A100s by payload (nccl-tests, published with vTrain and in the ML
# Engineering book), bytes per second.
_A100_RING = Curve(
    (
        (32768.0, 1.31e9),
        (262144.0, 7.47e9),
        (1048576.0, 18.0e9),
        (4194304.0, 72.33e9),
        (16777216.0, 106.16e9),
        (67108864.0, 171.54e9),
        (268435456.0, 194.07e9),
        (1073741824.0, 229.04e9),
        (17179869184.0, 234.89e9),
    )
)


def _gpu(
    name: str,
    flops_per_s: float,
    memory_bytes_per_s: float,
    memory_bytes: float,
    node_bytes_per_s: float,
    network_bits_per_s: float,
    matmul: Curve = _HOPPER,
    attention: Curve = _ATTENTION_HOPPER,
    node_share: float = 0.82,
    float32_flops_per_s: float = 67e12,
    float64_flops_per_s: float = 67e12,
    measured: Mapping[int, Curve] | None = None,
) -> Machine:
    network = network_bits_per_s / 8 * _NETWORK_SHARE
    node = node_bytes_per_s * node_share
    return Machine(
        name=name,
        source="data sheet, and shares from published microbenchmarks",
        is_asynchronous=True,
        flops_per_s={
            "bfloat16": flops_per_s,
            "float16": flops_per_s,
            "float32": float32_flops_per_s,
            "float64": float64_flops_per_s,
        },
        matmul=matmul,
        attention=attention,
        memory_bytes_per_s=memory_bytes_per_s,
        memory=_MEMORY,
        kernel_s=_KERNEL_S,
        host_s_per_operator=_HOST_S_PER_OPERATOR,
        host_s_per_action=_HOST_S_PER_ACTION,
        ranks_per_node=_NVIDIA_NODE,
        within=Link(node, _NODE_LATENCY_S, node, measured or {}),
        between=Link(network, _NETWORK_LATENCY_S, network),
        memory_bytes=int(memory_bytes),
    )


_A100 = {
    "matmul": _AMPERE,
    "attention": _ATTENTION_AMPERE,
    "node_share": 0.78,
    "float32_flops_per_s": 19.5e12,
    "float64_flops_per_s": 19.5e12,
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
)

_GB = 1e9
MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "cpu": CPU_CORE,
        # NVIDIA A100 datasheet (SXM): 312 TFLOP/s, NVLink 3 of 600 GB/s both ways; eight 200 Gbit/s cards.
        "a100-40": _gpu("a100-40", 312e12, 1.555e12, 40 * _GB, 300e9, 200e9, measured={8: _A100_RING}, **_A100),  # type: ignore[arg-type]
        "a100": _gpu("a100", 312e12, 2.039e12, 80 * _GB, 300e9, 200e9, measured={8: _A100_RING}, **_A100),  # type: ignore[arg-type]
        # NVIDIA H100 datasheet (SXM): 1,979 TFLOP/s with sparsity, 3.35 TB/s, NVLink 4 of 900 GB/s both ways.
        "h100": _gpu("h100", 989e12, 3.35e12, 80 * _GB, 450e9, 400e9),
        # NVIDIA H200 datasheet (SXM): as the H100, with 141 GB at 4.8 TB/s.
        "h200": _gpu("h200", 989e12, 4.8e12, 141 * _GB, 450e9, 400e9),
        # NVIDIA DGX B200 datasheet, an eighth of it: 2.25 PFLOP/s, 8 TB/s, 180 GB, NVLink 5 of 1.8 TB/s both ways.
        "b200": _gpu(
            "b200", 2250e12, 8e12, 180 * _GB, 900e9, 400e9, float32_flops_per_s=75e12, float64_flops_per_s=37e12
        ),
        # AMD Instinct MI300X datasheet: 1,307 TFLOP/s, 5.3 TB/s, 192 GB, seven links of 64 GB/s each way. Published
        # sweeps of matmuls find half of the peak.
        "mi300x": _gpu(
            "mi300x",
            1307e12,
            5.3e12,
            192 * _GB,
            448e9,
            400e9,
            matmul=Curve(((1e8, 0.03), (1e10, 0.3), (1e11, 0.45), (1e12, 0.5))),
            attention=Curve(((1e8, 0.02), (1e10, 0.2), (1e11, 0.3))),
            float32_flops_per_s=163e12,
            float64_flops_per_s=163e12,
        ),
    }
)
