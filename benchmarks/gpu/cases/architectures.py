"""Cases of whole architectures: the logits of tiny models, and of published ones, against transformers on one device.

Both read the same files, of bfloat16, and see the same tokens.

    float32     KL(transformers || ours) of the next token, in nats: below 1e-6 for every token
    bfloat16    distance of the logits from transformers' in float64: at most 1.5 times that of transformers in bfloat16

The tiny models have the head sizes for which kernels are compiled (64, 80, 128, 256), grouped heads, biases, norms of
heads, ties, windows, scaled scores and each way to scale rotary frequencies; none divides its blocks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpkernels.exchange.communicator import Communicator

from benchmarks.gpu.cases.clock import device_here, write
from benchmarks.gpu.tables.bars import LARGEST_ERROR_RATIO
from benchmarks.harness.timing import PASSED
from tpengine.architectures.model_path import model_at
from tpengine.config import ModelConfig
from tpengine.hugging_face.directory import check_tensors, open_directory
from tpengine.hugging_face.names import ignorable, stored_of, wanted
from tpengine.hugging_face.read import BoxReader
from tpengine.model.parts import FastParts
from tpengine.model.transformer import Transformer

LARGEST_KL_NATS = 1e-6
_HIDDEN, _VOCABULARY, _LAYERS = 256, 1003, 3


def tiny_entries(architecture: str, seq: int) -> dict[str, Any]:
    """Return the entries of a tiny config.json that are not transformers' own defaults.

    Args:
        architecture: one of ours.
        seq: tokens of a sequence; windows are shorter, and rotary frequencies are scaled from shorter ones.
    """
    window, original = seq // 5, seq // 4
    plain = {"rope_type": "default", "rope_theta": 1e4}
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": original}
    llama3 = {**yarn, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    windows = ["sliding_attention", "full_attention", "sliding_attention"]
    of_each: dict[str, dict[str, Any]] = {
        "llama": {"head_dim": 64, "rope_parameters": llama3},
        "qwen2": {
            "rope_parameters": plain,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": 1,
        },
        "qwen3": {"head_dim": 128, "rope_parameters": yarn},
        "mistral": {"head_dim": 80, "rope_parameters": plain, "sliding_window": window},
        "gpt2": {"n_embd": 320, "n_layer": _LAYERS, "n_head": 4, "n_positions": seq, "tie_word_embeddings": True},
        "gemma3": {
            "head_dim": 256,
            "rope_parameters": {windows[0]: plain, windows[1]: linear},
            "layer_types": windows,
            "sliding_window": window,
            "tie_word_embeddings": True,
        },
        "granite": {
            "rope_parameters": plain,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 1 / 64,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        "smollm3": {
            "rope_parameters": plain,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": window,
        },
        "olmo3": {
            "rope_parameters": {windows[0]: plain, windows[1]: {**yarn, "rope_theta": 1e4}},
            "layer_types": windows,
            "sliding_window": window,
        },
        "ministral3": {"head_dim": 64, "rope_parameters": {**yarn, "llama_4_scaling_beta": 0.1}},
        "qwen3_moe": {
            "head_dim": 128,
            "rope_parameters": plain,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 144,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        "mixtral": {"rope_parameters": plain, "num_local_experts": 4, "sliding_window": window},
        "phi3": {
            "original_max_position_embeddings": original,
            "rope_parameters": {
                **plain,
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + i / 24 for i in range(24)],
                "long_factor": [1.0 + i / 8 for i in range(24)],
            },
        },
    }
    entries: dict[str, Any] = {"tie_word_embeddings": False, "vocab_size": _VOCABULARY}
    if architecture != "gpt2":
        entries |= {"hidden_size": _HIDDEN, "intermediate_size": 400, "num_hidden_layers": _LAYERS}
        entries |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4 * original}
    # A token that is padding would get no gradient, and those of the vocabulary's defaults are beyond it.
    return entries | {f"{name}_token_id": None for name in ("bos", "eos", "pad")} | of_each[architecture]


def save_tiny(architecture: str, directory: Path, seq: int) -> None:
    """Save a drawn tiny model in bfloat16, as transformers does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {"gemma3": "gemma3_text"}.get(architecture, architecture)
    config = AutoConfig.for_model(kind, **tiny_entries(architecture, seq))
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            # Logits of about 2; norms and biases near what they begin with.
            weight.copy_(weight + 0.1 * drawn if weight.dim() == 1 else 2 * _HIDDEN**-0.5 * drawn)
    model.to(torch.bfloat16).save_pretrained(directory)


def tiny(rows: Path, architectures: Sequence[str], seq: int = 500, batch: int = 2) -> int:
    """Compare tiny models of some architectures; return 1 if one is wrong.

    Args:
        rows: gets two rows for each, of float32 and of bfloat16.
        architectures: names of ours.
        seq: tokens of a sequence.
        batch: sequences.
    """
    wrong = 0
    for name in architectures:
        # Said before it runs: after an illegal access nothing of this process runs.
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            save_tiny(name, Path(directory), seq)
            wrong += compare(rows, f"architectures/{name}", Path(directory), seq, batch)
    return int(wrong > 0)


def directory(rows: Path, name: str, path: str, seq: int = 200, batch: int = 1) -> int:
    """Compare the model of a directory: a published one; return 1 if it is wrong.

    Args:
        rows: gets two rows, of float32 and of bfloat16.
        name: of the model.
        path: config.json and safetensors.
        seq: tokens of a sequence.
        batch: sequences.
    """
    return compare(rows, f"architectures/{name}", Path(path), seq, batch)


def compare(rows: Path, case: str, path: Path, seq: int, batch: int) -> int:
    """Compare our logits with transformers', and write two rows; return 1 if they are wrong."""
    device = device_here()
    model = model_at(ModelConfig(path=str(path)))
    tokens = torch.randint(model.vocab_size, (batch, seq), generator=torch.Generator().manual_seed(0)).to(device)

    def both(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return our_logits(path, model, tokens, dtype), their_logits(path, tokens, dtype)

    got, want = both(torch.float32)
    kl = largest_kl(got, want) / LARGEST_KL_NATS
    of_float32 = PASSED if kl < 1 else f"failed: KL is {kl * LARGEST_KL_NATS:.2g} nats, the limit {LARGEST_KL_NATS:g}"
    write(rows, f"{case}/float32", {"kl_over_limit_ratio": kl}, of_float32)

    exact = their_logits(path, tokens, torch.float64)
    ours, theirs = (distance(logits, exact) for logits in both(torch.bfloat16))
    over = ours / theirs
    of_bfloat16 = PASSED if over <= LARGEST_ERROR_RATIO else f"failed: {over:.2f} times transformers' error in bfloat16"
    fields = {"error_ratio": ours, "transformers_error_ratio": theirs, "error_over_transformers_ratio": over}
    write(rows, f"{case}/bfloat16", fields, of_bfloat16)
    return int(of_float32 != PASSED or of_bfloat16 != PASSED)


@torch.no_grad()
def our_logits(path: Path, model: ModelConfig, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits[B, S, V] of our model in one process, its weights read as `--model.path` reads them."""
    directory = open_directory(path)
    check_tensors(directory, wanted(model), ignorable(model))
    net = Transformer(FastParts(model, Communicator(None), dtype=dtype, device=tokens.device))
    places = stored_of(model)
    with BoxReader(directory) as reader:
        for name, parameter in net.held.items():
            reader.fill(places[net.pieces[name].spec.name][1], (0,) * parameter.dim(), parameter)
    logits = net(tokens.flatten(), tokens.shape[1])[:, : model.vocab_size]
    return logits.view(*tokens.shape, -1)


@torch.no_grad()
def their_logits(path: Path, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return logits[B, S, V] of transformers' model, by its default attention."""
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    logits: Tensor = theirs.to(tokens.device).eval()(tokens, use_cache=False).logits
    return logits


def largest_kl(got: Tensor, want: Tensor) -> float:
    """Return the largest KL(want || got) of a token, in nats, from logits [B, S, V]."""
    log_p, log_q = (F.log_softmax(logits.double(), -1) for logits in (want, got))
    return (log_p.exp() * (log_p - log_q)).sum(-1).max().item()


def distance(got: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the logits' error, relative to that of the logits."""
    return ((got.double() - exact).norm() / exact.norm()).item()
