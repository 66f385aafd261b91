"""Rungs: pure, gloo ranks, GPU. Symmetric memory of GPUs: what it refuses, and its blocks over co-located ranks.

What only a GPU checks: that torch maps the peers' memory and that what a rank writes there its owner reads, here by two
ranks on one GPU. That a second GPU is reached, only two show.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support import ROOT
from support.ranks.rank_pool import RankPool
from tpkernels.exchange.communicator import Communicator
from tpkernels.symmetric import cuda_memory
from tpkernels.symmetric.cuda_memory import CudaMemory, Facts, VirtualMemory, host_record, refusal
from tpkernels.symmetric.host_memory import MemoryRefused
from tpkernels.symmetric.memory import SymmetricMemory

OVERLAPS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
PAGE = 4096

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def facts(world: int, **changed: list[int]) -> list[Facts]:
    """Return the facts of ranks that each have a GPU of one host."""
    return [
        Facts(
            **{
                "host": 1,
                "device_index": rank,
                "gpu": 100 + rank,
                "overlaps": 0,
                "num_bytes": PAGE,
                "num_rendezvous": 0,
                **{name: values[rank] for name, values in changed.items()},
            }
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 8])
def test_a_gpu_for_each_rank_of_a_host_will_do(world: int) -> None:
    assert refusal(facts(world)) == ""


@pytest.mark.parametrize(
    ("world", "changed", "message"),
    [
        (9, {}, r"at most 8 ranks: the group has 9: use a smaller group"),
        (4, {"host": [1, 1, 2, 2]}, r"on 2 hosts: use a group of one host's ranks"),
        (2, {"num_bytes": [PAGE, 2 * PAGE]}, r"got \[4096, 8192\] bytes by rank: use the same on all"),
        (2, {"num_bytes": [0, 0]}, r"at least 1 byte: got \[0, 0\]"),
        (2, {"overlaps": [1, 0]}, rf"{OVERLAPS}=1 must be set for all ranks or for none: it is for \[0\] of 2"),
        (3, {"num_rendezvous": [1, 1, 0]}, r"have \[1, 1, 0\] times by rank: make the groups in an order"),
        # One GPU.
        (2, {"device_index": [0, 0], "gpu": [7, 7]}, rf"on one GPU: cuda:\[0, 0\] .* {OVERLAPS}=1 .* gloo group"),
        # Each rank sees one GPU alone, and calls it cuda:0.
        (2, {"device_index": [0, 0]}, r"number the GPUs differently: cuda:\[0, 0\] by rank are 2 GPUs: set the same"),
        # Two names of one GPU.
        (2, {"gpu": [7, 7]}, r"number the GPUs differently: cuda:\[0, 1\] by rank are 1 GPUs"),
        # As many names as GPUs, crossed.
        (3, {"device_index": [0, 1, 1], "gpu": [7, 7, 8]}, r"number the GPUs differently"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(world: int, changed: dict[str, list[int]], message: str) -> None:
    with pytest.raises(MemoryRefused, match=message):
        raise MemoryRefused(refusal(facts(world, **changed)))


def test_ranks_share_a_gpu_if_all_are_told_to() -> None:
    assert refusal(facts(2, device_index=[0, 0], gpu=[7, 7], overlaps=[1, 1])) == ""
    assert refusal(facts(4, device_index=[0, 0, 1, 1], gpu=[7, 7, 8, 8], overlaps=[1] * 4)) == ""


def test_gpus_that_cannot_address_each_other_are_named() -> None:
    def can_access(device: int, peer: int) -> bool:
        return peer != 2

    with (
        patch("torch.cuda.device_count", lambda: 3),
        patch("torch.cuda.can_device_access_peer", can_access),
        patch.object(cuda_memory.ctypes, "CDLL", Driver),
    ):
        assert cuda_memory.peer_problem(0, [0, 1, 1]) == ""
        assert "cuda:0 cannot address the memory of cuda:2" in cuda_memory.peer_problem(0, [0, 1, 2])
        assert "cuda:3 is another rank's and not visible here" in cuda_memory.peer_problem(1, [1, 3])


class Driver:
    """NVIDIA's driver, whose third GPU sits behind PCIe and whose fourth it cannot ask about; by its C interface."""

    def __init__(self, name: str) -> None:
        assert name == "libcuda.so.1"

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = 10 + number
        return 0

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, device: Any, peer: Any) -> int:
        assert attribute == 3 and device.value != peer.value
        value._obj.value = int(12 not in (device.value, peer.value))
        return 1 if peer.value == 13 else 0


def test_gpus_whose_link_has_no_atomics_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    everyone = patch("torch.cuda.can_device_access_peer", lambda device, peer: True)
    with patch("torch.cuda.device_count", lambda: 4), everyone, patch.object(cuda_memory.ctypes, "CDLL", Driver):
        assert cuda_memory.peer_problem(0, [0, 1, 1]) == ""
        problem = "cuda:0 has no atomic operations on the memory of cuda:2"
        assert cuda_memory.peer_problem(0, [0, 1, 2]).startswith(problem)
        assert cuda_memory.peer_problem(2, [1, 2]).startswith("cuda:2 has no atomic operations on the memory of cuda:1")
        assert capsys.readouterr().err == ""
        assert cuda_memory.peer_problem(3, [0, 3]) == ""
        assert capsys.readouterr().err == "", "the first GPU's rank says it"
        assert cuda_memory.peer_problem(0, [0, 3]) == "", "what the driver cannot tell is tried"
        assert capsys.readouterr().err.endswith("or no arena\n")
        with patch("torch.version.hip", "7.0"):
            assert cuda_memory.peer_problem(0, [0, 2]) == ""
    with patch("torch.cuda.device_count", lambda: 4), everyone, patch.object(cuda_memory.ctypes, "CDLL", no_driver):
        assert cuda_memory.peer_problem(0, [0, 2]) == ""
    assert capsys.readouterr().err == "", "it is said once"


def no_driver(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")


def said_of_a_link_without_atomics() -> tuple[str, bool]:
    """What the ranks' communicators print, and whether they go on without an arena for kernels."""
    said = io.StringIO()
    rank = dist.get_rank()
    with (
        contextlib.redirect_stderr(said),
        patch.object(cuda_memory, "problem_here", lambda device: ""),
        patch.object(cuda_memory, "facts_of", lambda device, size: Facts(1, 2 * rank, 2 * rank, 0, size, 0)),
        patch("torch.cuda.device_count", lambda: 4),
        patch("torch.cuda.can_device_access_peer", lambda device, peer: True),
        patch.object(cuda_memory.ctypes, "CDLL", Driver),
    ):
        comm = Communicator(dist.group.WORLD, arena_bytes=PAGE, device=torch.device("cuda"))
    assert comm.all_gather(torch.ones(1)).tolist() == [1, 1]
    return said.getvalue(), comm.device_arena is None


def test_a_link_without_atomics_means_collectives_which_is_said_once(ranks: RankPool) -> None:
    (said, without), (unsaid, without_too) = ranks.run(said_of_a_link_without_atomics, 2)
    assert without and without_too and not unsaid
    assert said.count("\n") == 1 and "uses collectives: rank 0: cuda:0 has no atomic operations on" in said


def message_of_a_refusal(device: str, num_bytes: int) -> str:
    try:
        CudaMemory.allocate(dist.group.WORLD, num_bytes, torch.device(device))
    except MemoryRefused as error:
        return str(error)
    return "allocated"


@pytest.mark.parametrize("world", [1, 2])
def test_a_cpu_is_refused_on_all_ranks(ranks: RankPool, world: int) -> None:
    messages = ranks.run(message_of_a_refusal, world, "cpu", PAGE)
    assert messages == ["rank 0: symmetric memory of GPUs needs a GPU: got device cpu: pass a cuda device"] * world


def refused_without_cuda() -> str:
    with patch("torch.backends.cuda.is_built", lambda: False):
        return message_of_a_refusal("cuda", PAGE)


def test_a_torch_without_cuda_is_refused_on_all_ranks(ranks: RankPool) -> None:
    first, second = ranks.run(refused_without_cuda, 2)
    assert first == second == f"rank 0: torch {torch.__version__} is built without CUDA: install the build for your GPU"


def test_a_machine_without_a_gpu_and_another_backend_of_torchs_are_refused() -> None:
    device = torch.device("cuda", 0)
    with patch("torch.backends.cuda.is_built", lambda: True):
        with patch("torch.cuda.is_available", lambda: False):
            assert "no GPU: look at the driver" in cuda_memory.problem_here(device)
        with patch("torch.cuda.is_available", lambda: True):
            for backend, problem in (("CUDA", ""), ("NVSHMEM", "it is NVSHMEM: unset TORCH_SYMMMEM")):
                with patch("torch.distributed._symmetric_memory.get_backend", lambda _, backend=backend: backend):
                    assert cuda_memory.problem_here(device).endswith(problem)
                    assert bool(cuda_memory.problem_here(device)) == bool(problem)


def allocated_without_gpus(
    ranks_without_memory: list[int], bytes_by_rank: list[int], unmapped: list[int], made: tuple[int, ...] = (0, 0, 0)
) -> str:
    """Allocate with everything that needs a GPU replaced; what is left is how the ranks agree."""
    rank = dist.get_rank()

    def zeros(num_bytes: int, device: torch.device, world: int) -> torch.Tensor:
        if rank in ranks_without_memory:
            raise RuntimeError("CUDA driver error: out of memory\nand a long trace")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    class Handle:
        def __init__(self, part: torch.Tensor) -> None:
            self.buffer_ptrs = [part.data_ptr() if rank not in unmapped else 0] * dist.get_world_size()

    with (
        patch.object(cuda_memory, "problem_here", lambda device: ""),
        patch.object(cuda_memory, "facts_of", lambda device, num_bytes: Facts(1, rank, rank, 0, num_bytes, made[rank])),
        patch.object(cuda_memory, "peer_problem", lambda index, indices: ""),
        patch.object(cuda_memory, "zeros_on", zeros),
        patch.object(cuda_memory, "rendezvous", lambda part, group: Handle(part)),
    ):
        return message_of_a_refusal("cuda", bytes_by_rank[rank])


def test_what_one_rank_lacks_all_refuse(ranks: RankPool) -> None:
    assert ranks.run(allocated_without_gpus, 3, [], [PAGE] * 3, []) == ["allocated"] * 3
    messages = ranks.run(allocated_without_gpus, 3, [1, 2], [PAGE] * 3, [])
    why = f"a GPU's memory of {PAGE} bytes was refused: CUDA driver error: out of memory: ask for less"
    assert messages == [f"rank 1: {why}"] * 3
    messages = ranks.run(allocated_without_gpus, 3, [], [PAGE, PAGE, 1], [])
    assert messages == [refusal(facts(3, num_bytes=[PAGE, PAGE, 1]))] * 3
    messages = ranks.run(allocated_without_gpus, 3, [], [PAGE] * 3, [2])
    assert len(set(messages)) == 1 and messages[0].startswith("rank 2: torch")
    messages = ranks.run(allocated_without_gpus, 3, [], [PAGE] * 3, [], (2, 2, 1))
    assert messages == [refusal(facts(3, num_rendezvous=[2, 2, 1]))] * 3


@devices
def test_virtual_ranks_see_each_others_memory(device: str) -> None:
    memories: list[SymmetricMemory] = list(VirtualMemory.allocate(3, PAGE, device))
    assert [(memory.rank, memory.world, memory.num_bytes) for memory in memories] == [(i, 3, PAGE) for i in range(3)]
    assert len({memory.addresses for memory in memories}) == 1 and len(set(memories[0].addresses)) == 3
    for memory in memories:
        for owner in range(3):
            everything = memory.block(owner, 0, (PAGE,), torch.uint8)
            assert everything.device.type == device
            assert everything.data_ptr() == memory.addresses[owner]
            assert not everything.any()
    for memory in memories:
        for owner in range(3):
            memory.block(owner, 128 + 64 * memory.rank, (2, 3), torch.float32).fill_(10 * memory.rank + owner)
    for owner, memory in enumerate(memories):
        for writer in range(3):
            block = memory.block(owner, 128 + 64 * writer, (6,), torch.float32)
            assert block.tolist() == [10 * writer + owner] * 6
            assert block.data_ptr() == memory.addresses[owner] + 128 + 64 * writer


@devices
def test_blocks_are_made_once_and_have_version_counters_of_their_own(device: str) -> None:
    memory = VirtualMemory.allocate(2, PAGE, device)[1]
    block = memory.block(0, 64, (4, 4), torch.float16)
    assert block.is_contiguous() and memory.block(0, 64, [4, 4], torch.float16) is block
    others = [memory.block(0, 0, (PAGE,), torch.uint8), memory.block(0, 96, (4, 4), torch.float16)]
    x = torch.ones(4, 4, dtype=torch.float16, device=device, requires_grad=True)
    y = (x * block).sum()
    before = block._version
    for other in others:
        other.fill_(1)
    assert block._version == before
    y.backward()  # would raise if saving `block` had seen the others written


@devices
def test_a_block_ends_within_the_memory_and_begins_at_an_element(device: str) -> None:
    memory = VirtualMemory.allocate(2, PAGE, device)[0]
    assert memory.block(1, PAGE - 8, (1,), torch.int64).shape == (1,)
    assert memory.block(1, PAGE, (0, 5), torch.int64).shape == (0, 5)
    with pytest.raises(AssertionError, match=r"\(2,\) of torch.int64 at byte 4088 ends after 4096"):
        memory.block(1, PAGE - 8, (2,), torch.int64)
    with pytest.raises(AssertionError, match="cannot begin at byte 4"):
        memory.block(1, 4, (1,), torch.int64)


def test_a_block_of_inference_mode_may_be_written_outside() -> None:
    memory = VirtualMemory.allocate(1, PAGE, "cpu")[0]
    with torch.inference_mode():
        block = memory.block(0, 0, (4,), torch.float32)
    block.fill_(1)
    assert not block.is_inference()


def test_a_block_keeps_virtual_memory_alive() -> None:
    block = VirtualMemory.allocate(2, PAGE, "cpu")[0].block(1, 0, (PAGE,), torch.uint8).fill_(7)
    gc.collect()
    others = [torch.zeros(PAGE, dtype=torch.uint8) for _ in range(8)]
    assert block.eq(7).all() and all(other.data_ptr() != block.data_ptr() for other in others)


@pytest.mark.parametrize("world", [0, 9])
def test_virtual_ranks_are_one_to_eight(world: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 8 ranks: got {world}"):
        VirtualMemory.allocate(world, PAGE, "cpu")


def test_the_record_is_where_the_host_reads_it() -> None:
    record = host_record()
    assert record.device.type == "cpu" and record.dtype == torch.int32 and record.tolist() == [0] * 8
    assert record.is_pinned() == torch.cuda.is_available()
    assert host_record().data_ptr() != record.data_ptr()


def test_one_file_alone_knows_torchs_private_interface() -> None:
    files = [path for folder in ("kernels", "tpengine") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 50
    assert [path.name for path in files if "_symmetric_memory" in path.read_text()] == ["cuda_memory.py"]


def test_importing_needs_no_gpu_and_loads_nothing_private() -> None:
    program = (
        "import sys, tpkernels.symmetric.cuda_memory; assert 'torch.distributed._symmetric_memory' not in sys.modules"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def sharing_ranks() -> Iterator[RankPool]:
    """Ranks that may share a GPU, in new processes: those of a smaller group have allocated before a larger one's."""
    pool = RankPool({OVERLAPS: "1"})
    yield pool
    pool.close()


def times_counted() -> list[int]:
    """How often this process has allocated with others, around a group of one rank and one of all."""
    counted = [CudaMemory.num_rendezvous]
    rank, groups = dist.get_rank(), [dist.new_group([i]) for i in range(dist.get_world_size())]

    class Handle:
        def __init__(self, part: torch.Tensor, group: dist.ProcessGroup) -> None:
            self.buffer_ptrs = [part.data_ptr()] * group.size()

    with (
        patch.object(cuda_memory, "problem_here", lambda device: ""),
        patch("torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=index)),
        patch.object(cuda_memory, "peer_problem", lambda index, indices: ""),
        patch.object(
            cuda_memory, "zeros_on", lambda num_bytes, device, world: torch.zeros(num_bytes, dtype=torch.uint8)
        ),
        patch.object(cuda_memory, "rendezvous", Handle),
    ):
        for group in (groups[rank], dist.group.WORLD):
            CudaMemory.allocate(group, PAGE, torch.device("cuda", rank))
            counted.append(CudaMemory.num_rendezvous)
    return counted


def test_only_a_rendezvous_with_others_counts(ranks: RankPool) -> None:
    for first, alone, together in ranks.run(times_counted, 2):
        assert alone == first and together == first + 1


def exchange_through_blocks(num_bytes: int) -> bool:
    """Every rank writes into every rank's memory and reads what the others wrote into its own."""
    group = dist.group.WORLD
    memory = CudaMemory.allocate(group, num_bytes, torch.device("cuda", 0))
    rank, world = memory.rank, memory.world
    assert (world, memory.num_bytes, len(set(memory.addresses))) == (dist.get_world_size(), num_bytes, world)
    assert memory.addresses[rank] == memory.block(rank, 0, (1,), torch.uint8).data_ptr()
    for owner in range(world):
        assert not memory.block(owner, 0, (num_bytes,), torch.uint8).any()
    torch.cuda.synchronize()
    dist.barrier()
    last = num_bytes - 4 * 64
    for owner in range(world):
        memory.block(owner, 256 * rank, (2, 32), torch.float32).fill_(10 * rank + owner)
        if rank == owner:
            memory.block(owner, last, (64,), torch.int32).fill_(rank)
    torch.cuda.synchronize()
    dist.barrier()
    for writer in range(world):
        assert memory.block(rank, 256 * writer, (64,), torch.float32).eq(10 * writer + rank).all()
        assert memory.block(writer, last, (64,), torch.int32).eq(writer).all()
    dist.barrier()
    return True


@needs_gpu
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_on_one_gpu_exchange_through_blocks(sharing_ranks: RankPool, world: int) -> None:
    # Twice: what a first memory left behind must not be met by the second.
    for num_bytes in (1 << 16, (3 << 20) + 256):
        assert sharing_ranks.run(exchange_through_blocks, world, num_bytes) == [True] * world


@needs_gpu
def test_ranks_share_a_gpu_only_where_told_to(ranks: RankPool) -> None:
    messages = ranks.run(message_of_a_refusal, 2, "cuda:0", PAGE)
    assert len(set(messages)) == 1 and f"set {OVERLAPS}=1" in messages[0]


@needs_gpu
def test_more_than_a_gpu_has_is_refused(sharing_ranks: RankPool) -> None:
    messages = sharing_ranks.run(message_of_a_refusal, 2, "cuda:0", 1 << 42)
    assert len(set(messages)) == 1 and f"memory of {1 << 42} bytes was refused" in messages[0]
