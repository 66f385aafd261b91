"""Rung: gloo ranks. What is exported, transformers loads: the installed version, and the oldest 4 that can.

Version 4 lies in an environment of its own, which the test makes. It is the oldest that has all architectures and works
with our torch: 4.51.0 is the first with Qwen3, and needs accelerate to load anything. Skipped only where pip reaches no
package index.
"""

from __future__ import annotations

import json
import math
import subprocess
import sysconfig
import venv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from support import CountMutations
from support.architectures import loading_program
from support.architectures.drawn import CONFIGS
from support.architectures.runs import beginning, saved, trained_pieces
from support.architectures.transformers_models import ours
from support.kernels.mutations import survivors
from support.ranks.rank_pool import RankPool
from torch import Tensor

from tpengine.commands.weights import export

OLDEST = "4.51.1"
LAYOUT = (1, 2, 2)
NUM_TOKENS, SEQ = 1000, 20
# What pip says where it reaches no index, whichever the reason.
UNREACHED = "connection broken by"

# Version 4.51 gives all layers of a Qwen the window of those that have one.
GIVEN: dict[str, dict[str, Any]] = {
    name: {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0} for name in ("qwen2", "qwen3")
}


@pytest.fixture(scope="module")
def python_4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that has transformers 4, and behind its own packages ours: torch."""
    path = tmp_path_factory.mktemp("transformers_4")
    venv.create(path, with_pip=True)
    python = path / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", f"transformers=={OLDEST}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and UNREACHED in done.stderr:
        pytest.skip(f"pip reaches no package index: {done.stderr.splitlines()[-1]}")
    assert not done.returncode, done.stderr
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(path)}))
    (packages / "after_its_own.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def save_tokenizer(directory: Path) -> None:
    """Save a tokenizer of 256 bytes, as transformers 5 does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator([], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)


@dataclass(frozen=True)
class Exported:
    """A directory that was exported, and what is expected of it."""

    directory: Path
    tokens: Path
    logits: Tensor
    loss: float


def exported(ranks: RankPool, tmp_path: Path, architecture: str) -> Exported:
    """Train two steps at tp 2 and pp 2 in float32, export, and compute logits and loss of 1,000 tokens."""
    saved(architecture, tmp_path / "theirs", torch.float32, **GIVEN.get(architecture, {}))
    save_tokenizer(tmp_path / "theirs")
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    config = beginning(tmp_path / "theirs", LAYOUT, dtype="float32", steps=2, checkpoint_every=2)
    ranks.run(trained_pieces, math.prod(LAYOUT), replace(config, run_dir=str(run)))
    export(run, None, out)

    drawn = torch.randint(256, (NUM_TOKENS // SEQ, SEQ + 1), generator=torch.Generator().manual_seed(0))
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    save_file({"tokens": tokens, "labels": labels}, tmp_path / "tokens")
    net = ours(config.model, tensors_of(out), torch.float32)
    with torch.no_grad():
        logits = net(tokens.flatten(), SEQ)[:, : config.model.vocab_size]
    loss = torch.nn.functional.cross_entropy(logits.double(), labels.flatten()).item()
    return Exported(out, tmp_path / "tokens", logits.view(*tokens.shape, -1), loss)


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_loaded(out: Path, expected: Exported, version: str) -> None:
    """Compare what the program has written with what is expected."""
    found = json.loads(out.with_name(f"{out.name}.json").read_text(encoding="utf-8"))
    assert found["version"] == version and found["torch"] == torch.__version__
    assert [found[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")] == [[], [], []]
    assert found["ids"] and found["text"] == loading_program.TEXT
    logits = load_file(out)["logits"]
    assert (logits - expected.logits).abs().max() <= 1e-5 * expected.logits.abs().max()
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize(
    "architecture",
    [name if name in ("qwen3", "gpt2") else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS],
)
def test_the_installed_transformers_loads_what_was_trained(ranks: RankPool, tmp_path: Path, architecture: str) -> None:
    import transformers

    expected = exported(ranks, tmp_path, architecture)
    loading_program.main(str(expected.directory), str(expected.tokens), str(tmp_path / "logits"))
    check_loaded(tmp_path / "logits", expected, transformers.__version__)


# Those that OLDEST knows.
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name in CONFIGS if name not in ("smollm3", "olmo3", "ministral3")])
def test_transformers_4_loads_what_was_trained(
    ranks: RankPool, tmp_path: Path, python_4: Path, architecture: str
) -> None:
    expected = exported(ranks, tmp_path, architecture)
    program = [str(python_4), loading_program.__file__, str(expected.directory), str(expected.tokens)]
    done = subprocess.run([*program, str(tmp_path / "logits")], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    check_loaded(tmp_path / "logits", expected, OLDEST)


@pytest.mark.slow
def test_a_wrong_directory_is_noticed(ranks: RankPool, tmp_path: Path, count_mutations: CountMutations) -> None:
    """What version 4 or 5 would load if a number, a tensor or the tokenizer were another."""
    expected = exported(ranks, tmp_path, "qwen3")
    files = {path.name: path.read_bytes() for path in expected.directory.iterdir()}
    config, tokenizer = (json.loads(files[name]) for name in ("config.json", "tokenizer.json"))
    weights = tensors_of(expected.directory)
    del weights["lm_head.weight"]
    theta = {**config["rope_parameters"], "rope_theta": 7.0}
    mutations: dict[str, dict[str, bytes]] = {
        "rope_theta": {"config.json": json.dumps({**config, "rope_parameters": theta, "rope_theta": 7.0}).encode()},
        "eps": {"config.json": json.dumps({**config, "rms_norm_eps": 0.1}).encode()},
        "a tensor left out": {"model.safetensors": save(weights, {"format": "pt"})},
        "tokenizer": {"tokenizer.json": json.dumps({**tokenizer, "decoder": None}).encode()},
    }

    import transformers

    def outcome(name: str) -> str:
        for file, content in (files | mutations.get(name, {})).items():
            (expected.directory / file).write_bytes(content)
        out = tmp_path / name
        loading_program.main(str(expected.directory), str(expected.tokens), str(out))
        return name

    def compare(name: str) -> None:
        check_loaded(tmp_path / name, expected, transformers.__version__)

    compare(outcome("control"))
    unnoticed = survivors(mutations, outcome, compare)
    count_mutations("exports (what transformers loads)", len(mutations) - len(unnoticed), len(mutations))
    assert not unnoticed
