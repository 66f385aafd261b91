"""`tpengine export`: a checkpoint of a run as a directory that transformers loads, whatever layout trained it.

One process reads the checkpoint block by block and writes tensor by tensor: never a whole tensor is in memory. Weights
come from the wider copies of a run of 16 bits, where it has them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpengine.architectures.describe import Attention
from tpengine.architectures.describe.rope import written_rope
from tpengine.architectures.registry import architecture_of
from tpengine.checkpoint.block import Block
from tpengine.checkpoint.index import CheckpointError, Index, check_file
from tpengine.checkpoint.run.resume import saved_config
from tpengine.checkpoint.storage import fill
from tpengine.commands.weights.progress import shown
from tpengine.config import Config, ModelConfig
from tpengine.dtypes import FILE_NAMES
from tpengine.files import new_directory
from tpengine.hugging_face.companions import copy_companions
from tpengine.hugging_face.directory import CONFIG
from tpengine.hugging_face.kept import kept_dtypes
from tpengine.hugging_face.names import name_of, stored_of
from tpengine.hugging_face.write import tensors_to_write, write_weights
from tpengine.layout.parameters import EMBEDDING, HEAD
from tpengine.training.state.beginning import checkpoint_of
from tpengine.training.state.training_state import MASTER, hf_name


def export(run: Path, step: int | None, out: Path, dtype: str | None = None, own: str = "") -> list[str]:
    """Write a checkpoint of a run as a directory of Hugging Face's form.

    Args:
        run: directory of the run.
        step: which checkpoint; None for the newest whole one.
        out: a directory that is not there yet, or is empty.
        dtype: float64, float32, float16 or bfloat16; None for those of the directory that the run began from, or the
            run's own.
        own: the user's own file of the run's architecture; empty takes the run's copy.

    Returns:
        The names of the tensors that were written.

    Raises:
        ValueError: no such checkpoint, or a damaged one; an output directory that is not empty; an architecture whose
            config.json the run does not have.
    """
    if dtype is not None and dtype not in FILE_NAMES:
        raise ValueError(f"--dtype must be one of {', '.join(FILE_NAMES)}: got {dtype!r}: use float32")
    config = saved_config(str(run), own)
    directory, index = checkpoint_of(run, step)
    values = config_json(config, run)
    for name, entry in sorted(index.files.items()):
        check_file(directory, name, entry)
    with new_directory(out, "an export directory") as beside:
        tensors = tensors_to_write(_parts(config.model, directory, index, run), _dtypes(config, run, dtype))
        with shown(tensors, f"writing {out}") as counted:
            write_weights(beside, counted)
        most = Counter[str]()
        for tensor in tensors:
            most[tensor.dtype] += tensor.num_bytes
        name = next(name for name, short in FILE_NAMES.items() if short == most.most_common(1)[0][0])
        values |= {"dtype": name, "torch_dtype": name}
        (beside / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        copy_companions(run, beside)
    return [tensor.name for tensor in tensors]


def _parts(model: ModelConfig, directory: Path, index: Index, run: Path) -> Any:
    """Yield as what each parameter is stored, and how a box of it is read; a tied head if its source had one."""
    stored = stored_of(model)
    for name, (spec, place) in stored.items():
        yield place, partial(read_weight, directory, index, hf_name(name), spec.stored_shape)
    head = name_of(model, HEAD)
    if model.tie_embeddings and head in (kept_dtypes(run) or {}):
        spec, place = stored[EMBEDDING]
        read = partial(read_weight, directory, index, hf_name(EMBEDDING), spec.stored_shape)
        yield replace(place, name=head), read


def read_weight(
    directory: Path, index: Index, name: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """Return a box of a weight of a checkpoint, of its wider copy where there is one; float32, or float64 if it is.

    Args:
        directory: of the checkpoint.
        index: the checkpoint's; its files have been checked.
        name: the weight's, as checkpoints have it.
        shape: of the whole weight, without padding.
        offset: of the box.
        size: of the box.

    Raises:
        DamagedCheckpoint: a file cannot be read, or does not hold what the index says.
        CheckpointError: the checkpoint has no such weight.
    """
    name = MASTER + name if MASTER + name in index.tensors else name
    if name not in index.tensors:
        raise CheckpointError(
            f"a checkpoint must be of the model that its run says: {directory} has no {name}: use another checkpoint"
        )
    values = torch.empty(size, dtype=torch.float64 if index.tensors[name].dtype == "F64" else torch.float32)
    fill(directory, index, {name: Block(values, offset, shape, False)})
    return values


def _dtypes(config: Config, run: Path, dtype: str | None) -> Mapping[str, str] | str:
    """Return the dtype of each tensor by its name in the files, or that of all."""
    kept = kept_dtypes(run)
    if dtype is not None or kept is None:
        return FILE_NAMES[dtype or config.train.dtype]
    return kept


def config_json(config: Config, run: Path) -> dict[str, Any]:
    """Return config.json: the one that the run began from, with what transformers 4 and 5 each want to read.

    Raises:
        ValueError: the run began from none, and its architecture is not Llama.
    """
    model, path = config.model, run / CONFIG
    if path.is_file():
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    elif model.architecture == "llama":
        values = _llama(config)
    else:
        raise ValueError(
            f"an export needs the config.json of its architecture: {run} began from none, and has architecture "
            f"{model.architecture}: put one into {run}"
        )
    attentions = [part for part in architecture_of(model).block(model, 0).values() if isinstance(part, Attention)]
    if attentions[0].rotates:
        local = model.details.local_rope_theta
        written = written_rope(model.rope_theta, model.details.rope, local)
        # Entries of the source that are not read here, such as yarn's, stay.
        values |= written | {"rope_parameters": {**written["rope_parameters"], **(values.get("rope_parameters") or {})}}
        if local and (every := _full_every(model.details.windows, model.num_layers)):
            # What transformers reads before 4.53, which has layer_types.
            values["sliding_window_pattern"] = every
    return values | {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_embeddings}


def _full_every(windows: Sequence[int], num_layers: int) -> int:
    """Return the number n if every n-th layer, and no other, has no window; 0 if there is none."""
    return next(
        (
            every
            for every in range(1, num_layers + 2)
            if [bool(window) for window in windows or [0] * num_layers]
            == [bool((layer + 1) % every) for layer in range(num_layers)]
        ),
        0,
    )


def _llama(config: Config) -> dict[str, Any]:
    """Return the config.json of a Llama that was trained from nothing."""
    model = config.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.train.seq_len,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.details.attention_bias,
        "mlp_bias": model.details.mlp_bias,
        # The ids of a byte vocabulary mean nothing of the kind.
        "bos_token_id": None,
        "eos_token_id": None,
    }
