"""Text as tokens: token files, where text comes from, and the order of samples; see README.md. No torch."""

from tpengine.checkpoint.fingerprint import change_of
from tpengine.data.columns import Column, write_column
from tpengine.data.content import CPU_SHARE, GPU_SHARE, ContentCheck, ContentChecks
from tpengine.data.corpus import OpenedCorpus, for_phase, open_corpora, open_corpus
from tpengine.data.order import permute
from tpengine.data.samples import Samples
from tpengine.data.source import Source, open_file, open_source
from tpengine.data.stored_tokens import StoredTokens
from tpengine.data.text_corpus import TextCorpus
from tpengine.data.text_files import stdlib_text
from tpengine.data.token_file import TokenFile, open_tokens, write_tokens
from tpengine.data.token_writer import TokenWriter
from tpengine.training.ahead import ReadAhead, StepSamples
from tpengine.training.samples import Corpus, HeldOut, SamplePosition, SampleReader, batch_digest, first_sample_index

__all__ = [
    "CPU_SHARE",
    "GPU_SHARE",
    "Column",
    "ContentCheck",
    "ContentChecks",
    "Corpus",
    "HeldOut",
    "OpenedCorpus",
    "ReadAhead",
    "SamplePosition",
    "SampleReader",
    "Samples",
    "Source",
    "StepSamples",
    "StoredTokens",
    "TextCorpus",
    "TokenFile",
    "TokenWriter",
    "batch_digest",
    "change_of",
    "first_sample_index",
    "for_phase",
    "open_corpora",
    "open_corpus",
    "open_file",
    "open_source",
    "open_tokens",
    "permute",
    "stdlib_text",
    "write_column",
    "write_tokens",
]
