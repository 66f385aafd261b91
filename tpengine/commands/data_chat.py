"""`tpengine data --chat`: conversations become a token file, with weights for the tokens that are trained on.

A conversation is a document, so that packing keeps it whole. It takes transformers, which loads torch where that is
there.

The decision a reader will question: one process renders, and a call that was stopped begins anew. Chat data are small
beside texts: 270 conversations of 4 messages a second on a core of an AMD EPYC.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpengine.commands.data_write import BYTES, Reading, encoding_of
from tpengine.data.chat import conversations, end_of_turn
from tpengine.data.columns import Column
from tpengine.data.documents import PIPE, DocumentReader, is_json_lines
from tpengine.data.text_files import find_files
from tpengine.data.token_writer import TokenWriter
from tpengine.hugging_face.chat_template import ChatTemplate
from tpengine.observe.safe_console import SafeConsole
from tpengine.training.samples import WEIGHTS


def write_chat(sources: Sequence[Path], tokenizer: str, out: Path, train_on: str, seq_len: int | None) -> None:
    """Write a token file and its weights, and say what is in them.

    Args:
        sources: files of JSON lines, a conversation each; or PIPE alone.
        tokenizer: directory of a tokenizer with a chat template.
        out: the token file; a new one.
        train_on: one of data.chat.TRAIN_ON.
        seq_len: the most tokens of a conversation; None for any number.

    Raises:
        ValueError: a mistake of the user, in one line.
    """
    if tokenizer == BYTES:
        raise ValueError("--chat needs a tokenizer with a chat template: got none: use --tokenizer DIR, of the model")
    paths = _files(sources, out)
    encoding, template = encoding_of(tokenizer), ChatTemplate(Path(tokenizer))
    console = SafeConsole(soft_wrap=True)
    if end_of_turn(template) is None:
        console.print(
            "warning: no special token ends an answer of this template: a model learns to answer from it, not to end"
        )
    documents, column = DocumentReader(paths, None), Column(WEIGHTS, "uint8")
    longest = num_trained = 0
    with (
        TokenWriter(out, encoding.vocab_size, [column], encoding.about(), replaces=False) as writer,
        Reading(console, documents) as reading,
    ):
        for conversation in reading.shown(conversations(documents, template, train_on, seq_len)):
            writer.add(conversation.ids, weights=conversation.weights)
            longest = max(longest, conversation.ids.size)
            num_trained += int(conversation.weights.sum())
    console.print(
        f"{out}: {writer.num_tokens:,} tokens of {writer.num_documents:,} conversations, the longest of {longest:,}; "
        f"{num_trained:,} are trained on ({train_on}), vocabulary {encoding.vocab_size}; train on it with --data.path "
        f"{out}{encoding.model} --data.packing fit, behind tpengine data --fit SEQ_LEN {out}"
    )


def _files(sources: Sequence[Path], out: Path) -> list[Path]:
    """Return the files to read.

    Raises: ValueError: one that is not there, or empty, or is not of JSON lines by its name; the output among them.
    """
    if list(sources) == [PIPE]:
        return [PIPE]
    for path in sources:
        if not path.is_file() or not is_json_lines(path):
            problem = "is not named so" if path.is_file() else "is no file"
            raise ValueError(
                f"--chat must be files of JSON lines, *.jsonl, *.jsonl.gz or *.jsonl.zst: {path} {problem}: check the "
                "path, or write a conversation on each line"
            )
        if not path.stat().st_size:
            raise ValueError(f"a chat file must have a conversation on each line: {path} is empty: leave it out")
    return find_files(sources, out=out)
