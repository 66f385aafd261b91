"""A model's directory of 1 GB whose files have holes: they take no room on disk, and are read like any other bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tpengine.architectures.model_path import model_at
from tpengine.config import ModelConfig
from tpengine.dtypes import FILE_BITS
from tpengine.hugging_face.directory import INDEX
from tpengine.hugging_face.names import stored_of

NUM_FILES = 8
# Embedding and head are half of it: whole, one of a rank's is larger than what is allowed besides parameters.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


# One matrix of one expert is larger than what is allowed, and three quarters are experts.
EXPERTS: dict[str, Any] = {
    **CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "intermediate_size": 17408,
    "num_hidden_layers": 1,
    "num_local_experts": 4,
    "sliding_window": None,
    "vocab_size": 24576,
}


def sparse_model(directory: Path, dtype: str, config: dict[str, Any] = CONFIG) -> int:
    """Make a model's directory of 8 files; return the bytes of its tensors: 1 GB where dtype is F32."""
    (directory / "config.json").write_text(json.dumps(config))
    places = stored_of(model_at(ModelConfig(path=str(directory))))
    files: list[dict[str, tuple[int, ...]]] = [{} for _ in range(NUM_FILES)]
    sizes = [0] * NUM_FILES
    of_files = [tensor for _, place in places.values() for tensor in place.apart()]
    for stored in sorted(of_files, key=lambda place: -place.matrix[0] * place.matrix[1]):
        smallest = sizes.index(min(sizes))
        files[smallest][stored.name] = stored.shape
        sizes[smallest] += stored.matrix[0] * stored.matrix[1] * FILE_BITS[dtype] // 8
    weight_map = {}
    for number, shapes in enumerate(files):
        header, end = {}, 0
        for name, shape in shapes.items():
            begin, end = end, end + FILE_BITS[dtype] // 8 * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
            weight_map[name] = f"model-{number}.safetensors"
        text = json.dumps(header).encode()
        with (directory / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return sum(sizes)
