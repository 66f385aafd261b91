"""Rung: gloo ranks. What is exported, transformers 4 loads: in an environment of its own, which the test makes.

Of version 4 it is the oldest that has all architectures and works with our torch: 4.51.0 is the first with Qwen3, and
needs accelerate to load anything. Skipped only where pip reaches no package index.
"""

from __future__ import annotations

import json
import math
import subprocess
import sysconfig
import venv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.architectures import in_transformers_4
from support.architectures.drawn import CONFIGS
from support.architectures.runs import beginning, saved, trained_pieces
from support.architectures.transformers_models import ours
from support.ranks.rank_pool import RankPool

from tpengine.commands.export import export

OLDEST = "4.51.1"
LAYOUT = (1, 2, 2)
NUM_TOKENS = 1000
# What pip says where it reaches no index, whichever the reason.
UNREACHED = "connection broken by"

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("architecture", CONFIGS)
def test_transformers_4_loads_what_was_trained(
    ranks: RankPool, tmp_path: Path, python_4: Path, architecture: str
) -> None:
    """Two steps at tp 2 and pp 2, in float32: the logits of version 5 and ours, and the same loss."""
    from transformers import AutoModelForCausalLM

    saved(architecture, tmp_path / "theirs", torch.float32, **GIVEN.get(architecture, {}))
    save_tokenizer(tmp_path / "theirs")
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    settings = dict(dtype="float32", steps=2, checkpoint_every=2)
    config = replace(beginning(tmp_path / "theirs", LAYOUT, **settings), run_dir=str(run))
    ranks.run(trained_pieces, math.prod(LAYOUT), config)
    export(run, None, out)

    drawn = torch.randint(256, (NUM_TOKENS // 20, 21), generator=torch.Generator().manual_seed(0))
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    save_file({"tokens": tokens, "labels": labels}, tmp_path / "tokens")
    program = [str(python_4), in_transformers_4.__file__, str(out), str(tmp_path / "tokens"), str(tmp_path / "logits")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = json.loads((tmp_path / "logits.json").read_text(encoding="utf-8"))
    assert found["version"] == OLDEST and found["torch"] == torch.__version__
    assert [found[f"{what}_keys"] for what in ("missing", "unexpected", "mismatched")] == [[], [], []]
    assert found["ids"] and found["text"] == in_transformers_4.TEXT

    got = load_file(tmp_path / "logits")["logits"]
    theirs: Any = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    net = ours(config.model, theirs.state_dict(), torch.float32)
    with torch.no_grad():
        of_5 = theirs.eval()(tokens).logits
        of_ours = net(tokens.flatten(), tokens.shape[1]).view(*tokens.shape, -1)[..., : config.model.vocab_size]
    for want in (of_5, of_ours):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        loss = torch.nn.functional.cross_entropy(want.flatten(0, 1).double(), labels.flatten())
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
