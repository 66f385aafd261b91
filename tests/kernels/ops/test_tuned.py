"""Rungs: pure, GPU. A file of what was tuned is read whole, or refused in one line; only what it says is looked up.

That it is the fastest, only a GPU shows (benchmarks/gpu/cases/kernels/tiles.py, attention.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import CountMutations
from tpkernels.launch import Target
from tpkernels.ops.matmul import tuned
from tpkernels.ops.matmul.configs import AMPERE, CDNA, HOPPER, MatmulConfig
from tpkernels.ops.matmul.kernel import launch_matmul
from tpkernels.ops.matmul.tuned import (
    Tile,
    TunedAttention,
    TunedFile,
    attention_key,
    is_allowed,
    key_of,
    path_for,
    read_tuned,
    tile_key,
    tuned_attention,
    tuned_config,
    written,
)

H200 = Target("cuda", 90)
NAME = "NVIDIA H200"
CONFIG = MatmulConfig(128, 256, 64, 8, 8, 4)
TILES = [
    Tile(4096, 3584, 4096, "bfloat16", True, False, False, CONFIG, 190.5, 188.0),
    Tile(3584, 4096, 8192, "float16", False, True, True, MatmulConfig(64, 128, 64, 8, 4, 4), 400, 380.25),
    Tile(768, 4096, 8192, "float16", False, True, True, MatmulConfig(64, 128, 64, 8, 4, 4), 50.5, None),
]
ATTENTIONS = [
    TunedAttention(8192, 4, 1, 128, "bfloat16", "ours", 900.5, 900.5, "2026-11-23", None),
    TunedAttention(4096, 32, 8, 128, "bfloat16", "cudnn", 310, 420.25, "2026-11-23", "0123456789ab"),
]
FILE = TunedFile(NAME, "2026-11-23", "0123456789ab", "2.11.0+cu130", "3.6.0", TILES, ATTENTIONS)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_bytes(written(FILE))
    assert read_tuned(path, NAME, H200) == (TILES, ATTENTIONS)
    assert json.loads(path.read_bytes()) | {"tiles": [], "attentions": []} == {
        "format": 4,
        "gpu": NAME,
        "date": "2026-11-23",
        "commit": "0123456789ab",
        "torch": "2.11.0+cu130",
        "triton": "3.6.0",
        "tiles": [],
        "attentions": [],
    }


Change = Callable[[dict[str, Any]], object]


def of_tile(name: str, value: Any) -> Change:
    return lambda content: content["tiles"][1].__setitem__(name, value)


def of_config(place: int, value: Any) -> Change:
    return lambda content: content["tiles"][1]["config"].__setitem__(place, value)


def of_attention(name: str, value: Any) -> Change:
    return lambda content: content["attentions"][1].__setitem__(name, value)


DAMAGES: list[Change] = [
    lambda content: content.update(gpu="NVIDIA H100"),
    lambda content: content.update(format=3),
    lambda content: content.update(attentions=None),
    lambda content: content["attentions"].append([]),
    lambda content: content["attentions"][1].pop("date"),
    lambda content: content["attentions"][1].update(more=1),
    *(of_attention(name, value) for name in ("seq", "heads", "kv_heads", "head_size") for value in (0, 1.5, True, "8")),
    of_attention("kv_heads", 5),
    *(of_attention("winner", value) for value in ("", "efficient", None, ["cudnn"])),
    of_attention("dtype", "int8"),
    *(of_attention(name, value) for name in ("us", "ours_us") for value in (0, "4", float("nan"))),
    of_attention("date", None),
    of_attention("commit", 3),
    lambda content: content.update(tiles={}),
    lambda content: content.pop("tiles"),
    lambda content: content["tiles"].append(3),
    lambda content: content["tiles"][1].pop("us"),
    lambda content: content["tiles"][1].update(more=1),
    *(of_tile(name, value) for name in ("m", "n", "k") for value in (0, -1, 1.5, True, "8", None, 2**31)),
    of_tile("dtype", "float32"),
    of_tile("dtype", ["bfloat16"]),
    of_tile("a_by_rows", 1),
    of_tile("b_by_rows", None),
    of_tile("accumulates", 0),
    *(of_tile("us", value) for value in (0, -1.0, "4", True, 1e30, float("nan"), float("inf"))),
    of_tile("torch_us", 0),
    # Only of a product that accumulates may torch's time be unknown.
    lambda content: content["tiles"][0].update(torch_us=None),
    of_tile("config", []),
    of_tile("config", None),
    of_tile("config", {"block_m": 128}),
    *(of_config(place, value) for place in range(6) for value in (0, -8, 3000, 12.0, True, "64")),
    # Legal numbers that do not fit: shared memory, and registers for the sums.
    of_tile("config", [256, 256, 64, 8, 8, 4]),
    of_tile("config", [128, 256, 128, 8, 8, 3]),
    of_tile("config", [128, 256, 64, 8, 4, 2]),
]


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, count_mutations: CountMutations) -> None:
    path = tmp_path / "h200.json"
    refused = 0
    for place, damage in enumerate(DAMAGES):
        content = json.loads(written(FILE))
        damage(content)
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError) as raised:
            read_tuned(path, NAME, H200)
        message = str(raised.value)
        assert message.startswith("tuned tiles must ") and str(path) in message and "\n" not in message, place
        refused += 1
    count_mutations("tuned tiles", refused, len(DAMAGES))


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (5 << 20)])
def test_what_is_no_file_of_tiles_is_refused(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="tuned tiles must "):
        read_tuned(path, NAME, H200)


@pytest.mark.parametrize(("table", "arch"), [(HOPPER, 90), (AMPERE, 80)])
def test_every_tile_of_the_tables_may_be_tuned(table: Any, arch: int) -> None:
    for choice in table.choices:
        assert is_allowed(choice.config, 2, Target("cuda", arch))


def test_a_target_with_less_shared_memory_allows_less() -> None:
    assert is_allowed(CONFIG, 2, H200) and not is_allowed(CONFIG, 2, Target("cuda", 86))
    assert all(is_allowed(choice.config, 2, Target("hip", "gfx942")) for choice in CDNA.choices)


def test_an_attention_is_found_by_its_heads_and_its_length_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    (tmp_path / "cpu.json").write_bytes(written(FILE._replace(gpu="cpu")))
    tuned.forget()
    try:
        of = torch.device("cpu"), torch.bfloat16
        assert tuned_attention(*of, 4096, 32, 8, 128) == tuned_attention(*of, 4000, 32, 8, 128) == ATTENTIONS[1]
        assert attention_key(*ATTENTIONS[1][:5]) == (4096, 32, 8, 128, "bfloat16")
        for others in ((2048, 32, 8, 128), (4096, 16, 8, 128), (4096, 32, 4, 128), (4096, 32, 8, 64)):
            assert tuned_attention(*of, *others) is None
        assert tuned_attention(of[0], torch.float16, 4096, 32, 8, 128) is None
    finally:
        tuned.forget()


def test_a_few_tokens_more_are_the_same_product() -> None:
    forward = key_of(4096, 3584, 4096, "bfloat16", True, False, False)
    assert tile_key(TILES[0]) == forward == key_of(4100, 3584, 4000, "bfloat16", True, False, False)
    others = [
        key_of(8192, 3584, 4096, "bfloat16", True, False, False),
        key_of(4096, 3592, 4096, "bfloat16", True, False, False),
        key_of(4096, 3584, 4096, "float16", True, False, False),
        key_of(4096, 3584, 4096, "bfloat16", True, True, False),
        key_of(4096, 3584, 4096, "bfloat16", True, False, True),
    ]
    assert forward not in others and len(set(others)) == 5


@pytest.mark.parametrize(
    ("gpu", "name"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3"), ("../../x", "x")]
)
def test_a_gpu_has_one_file(gpu: str, name: str) -> None:
    assert path_for(gpu) == tuned.FOLDER / f"{name}.json"


def test_files_that_are_here_are_right() -> None:
    for path in tuned.FOLDER.glob("*.json"):
        gpu = json.loads(path.read_bytes())["gpu"]
        assert path == path_for(gpu) and any(read_tuned(path, gpu, H200))


def test_without_a_gpu_nothing_is_looked_up() -> None:
    assert tuned_config(torch.empty(4096, 4096, device="meta"), 3584, True, False, False) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tuned_tile_is_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    gpu = torch.cuda.get_device_name()
    path_for(gpu).write_bytes(written(FILE._replace(gpu=gpu, tiles=TILES[:1])))
    tuned.forget()
    try:
        a, b = (torch.randint(-2, 3, (size, 4096), device="cuda").bfloat16() for size in (4096, 3584))
        assert tuned_config(a, 3584, True, False, False) == CONFIG
        assert torch.equal(launch_matmul(a, b.T), (a.float() @ b.T.float()).bfloat16())
    finally:
        tuned.forget()
