"""Tokenizers of each kind that models have, trained on the standard library's text, and texts that are hard to cut."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tpengine.data import stdlib_text

END = "<|end|>"
_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def sample_text() -> str:
    """The first 200,000 characters of the standard library."""
    return stdlib_text()[:200_000].tobytes().decode("utf-8", "ignore")


def _byte_pairs(regex: Any, **model: Any) -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.BPE(**model))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex is None)
    steps = [] if regex is None else [pre_tokenizers.Split(regex, "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)


def _whole_text() -> tuple[Tokenizer, trainers.Trainer]:
    """As Llama 2's: byte pairs of the whole text, which is not split into words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return tokenizer, trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, limit_alphabet=100, show_progress=False
    )


def _word_pieces() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)


def _unigram() -> tuple[Tokenizer, trainers.Trainer]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"
    )


_KINDS = {
    "gpt2": lambda: _byte_pairs(None),
    "llama3": lambda: _byte_pairs(_WORDS, ignore_merges=True),
    "llama2": _whole_text,
    "bert": _word_pieces,
    "unigram": _unigram,
}
KINDS = tuple(_KINDS)


@cache
def trained(kind: str) -> str:
    """The content of tokenizer.json of this kind, with an end token, and with settings of a call that cuts and pads."""
    tokenizer, trainer = _KINDS[kind]()
    # Byte pairs of whole texts take lines, or their training would take minutes.
    lines = sample_text()[:60_000].splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    number = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, number)])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    return tokenizer.to_str()


def saved_tokenizer(directory: Path, kind: str = "gpt2", **config: Any) -> Path:
    """Write tokenizer.json and a tokenizer_config.json that declares the end token; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(trained(kind), encoding="utf-8")
    declared = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(declared), encoding="utf-8")
    return directory


def hard_text(rng: random.Random, num_characters: int) -> str:
    """Code, runs of one character, long words, composed and odd characters, and end tokens."""
    source, parts = sample_text(), [""]
    while sum(map(len, parts)) < num_characters:
        kind = rng.randrange(8)
        if kind < 4:
            place = rng.randrange(len(source))
            parts.append(source[place : place + rng.randrange(1, 200)])
        elif kind == 4:
            parts.append("".join(rng.choices("aé\u0301😀中文 \n\t'sᄀ각\u200d", k=rng.randrange(60))))
        elif kind == 5:
            parts.append(rng.choice([" ", "=", "\n", "\xa0", "a", "!"]) * rng.randrange(1, 80))
        elif kind == 6:
            parts.append("".join(rng.choices("ACGT", k=rng.randrange(1, 150))))
        else:
            parts.append(END)
    return "".join(parts)


def long_words(rng: random.Random, num_characters: int) -> str:
    """Runs and words of up to 300 characters, which a window of a test may begin and end inside of."""
    parts = [""]
    while sum(map(len, parts)) < num_characters:
        if rng.randrange(2):
            parts.append(rng.choice(["a", " ", "=", "- ", "\n", "😀", "  \n", "é"]) * rng.randrange(1, 300))
        else:
            letters = rng.choice(["ACGT", "selfreturn", "0123456789", "\n ", "😀中"])
            parts.append("".join(rng.choices(letters, k=rng.randrange(1, 300))))
    return "".join(parts)
