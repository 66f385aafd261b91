"""A held-out text of its own (data.held_out, or held_out of a source): all of it is evaluated, none is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tpengine.config import Config
from tpengine.data.corpora.opened_text import OpenedText, open_text
from tpengine.data.fit.index import FitIndex, open_index
from tpengine.data.samples.fitted import fitted
from tpengine.data.samples.windows import Samples
from tpengine.data.token_file import TokenFile


@dataclass(frozen=True)
class HeldOutText:
    """A text that is held out as a whole.

    Attributes:
        opened: the text.
        samples: all its windows, in its order.
        fit: the index of samples whose documents are fitted; else None.
    """

    opened: OpenedText
    samples: Samples
    fit: FitIndex | None = None

    @property
    def texts(self) -> tuple[TokenFile, ...]:
        """The text, and the index of its fitted samples, with the SHA-256 of their contents."""
        return (self.opened.file,) if self.fit is None else (self.opened.file, self.fit.file)

    def identity(self) -> tuple[str, str]:
        """Return where it is, and what identifies it."""
        return self.opened.path, self.opened.fingerprint(self.fit)

    def viewed(self, config: Config) -> HeldOutText:
        """Return it in windows of a configuration's length, its targets that do not count.

        Raises:
            ValueError: it is too short, or has no index of that length.
        """
        opened, data, seq_len = self.opened, config.data, config.train.seq_len
        packs = data.packing != "cut"
        samples = Samples(opened.tokens, seq_len, config.model.vocab_size, data.ignore_token, packs=packs)
        fit = None
        if data.packing == "fit":
            # Its index has all samples in the part that is trained on: that of a text of which nothing is held out.
            fit = open_index(opened.file, opened.path, seq_len, len(opened.tokens), 0.0)
            samples = fitted(samples, fit.train)
        check_length("held-out", opened.path, samples, config)
        return replace(self, samples=samples, fit=fit)


def open_held_out(config: Config, say: Callable[[str], None] = lambda _: None) -> HeldOutText:
    """Open the text that data.held_out names, without its hash.

    Args: config: as for open_text_corpus. say: as for open_text.
    Raises: ValueError: as open_text, and as `viewed`.
    """
    opened = open_text(config.data.held_out, config, say)
    return HeldOutText(opened, Samples(opened.tokens, 1, 1)).viewed(config)


def check_apart(trained: OpenedText, held_out: OpenedText) -> None:
    """Raise ValueError unless a held-out text has one tokenizer with what is trained on, and no file of it.

    Args: trained, held_out: both with their hashes.
    """
    said = [(of.path, of.file.about) for of in (trained, held_out)]
    named = [f"{path} has {about.tokenizer}" for path, about in said if about is not None]
    hashes = [about.tokenizer_sha256 for _, about in said if about is not None and about.tokenizer_sha256]
    if len(set(hashes)) > 1:
        each = ", ".join(f"{name} (SHA-256 {sha256[:16]})" for name, sha256 in zip(named, hashes, strict=True))
        raise ValueError(
            f"a held-out text must have the tokenizer of the text that is trained on: {each}: write one of them again "
            "with the other's"
        )
    remedy = "leave it out of one of them, or hold out a share of the text (data.held_out_fraction) instead"
    both = [path for path in held_out.paths if path in set(trained.paths)]
    if both:
        raise ValueError(
            f"a held-out text must not be trained on: {both[0]} is in {trained.path} and in {held_out.path}: {remedy}"
        )
    alike = [key for key in held_out.contents if key in trained.contents]
    if alike:
        raise ValueError(
            f"a held-out text must not be trained on: {held_out.contents[alike[0]]} has the content of "
            f"{trained.contents[alike[0]]}: {remedy}"
        )


def check_length(part: str, path: str, samples: Samples, config: Config) -> None:
    """Raise ValueError if a part of a text has no window that a run needs.

    Args: part: what it is, training or held-out. path: of its text. samples: of the part.
    """
    if samples.num_windows:
        return
    remedy = f"use seq_len {len(samples.tokens) - 1}" if len(samples.tokens) > 1 else "use more text"
    share = config.data.held_out_share
    if part == "held-out" and not config.data.held_out:
        remedy += ", a larger held_out_fraction, or eval_micro_batches 0 and sample_tokens 0"
    of = path if config.data.held_out else f"held_out_fraction {share}"
    raise ValueError(
        f"the {part} text must hold a window of seq_len + 1 tokens: {len(samples.tokens)} tokens, seq_len "
        f"{config.train.seq_len}, {of}: {remedy}"
    )
