"""A program for any version of transformers: load an exported directory, and write down what came of it.

    python loading_program.py DIRECTORY TOKENS OUT

TOKENS is a safetensors file with `tokens` and `labels`. OUT becomes one with `logits` in float32; OUT.json has what was
missing or unexpected, the loss, and the tokenizer's ids and text of TEXT. It imports nothing of ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXT = "To be, or not to be: être, 存在.\n"


def main(directory: str, tokens: str, out: str) -> None:
    """Load, compute, write."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    options: dict[str, Any] = dict(output_loading_info=True, attn_implementation="eager")
    # Version 5 loads in the dtype of the files, version 4 in float32.
    options["torch_dtype" if transformers.__version__.startswith("4.") else "dtype"] = torch.float32
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    model, said = loaded
    given = load_file(tokens)
    with torch.no_grad():
        logits = model.eval()(given["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), given["labels"].flatten())
    save_file({"logits": logits.contiguous()}, out)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(TEXT)["input_ids"]
    found: dict[str, Any] = {what: sorted(map(str, keys)) for what, keys in said.items() if what.endswith("_keys")}
    found |= {"loss": loss.item(), "class": type(model).__name__, "ids": ids, "text": tokenizer.decode(ids)}
    found |= {"version": transformers.__version__, "torch": torch.__version__}
    Path(f"{out}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
