"""Text as tokens: token files, where text comes from, and the order of samples. No torch.

token_file.py stored_tokens.py     token files, and tokens that are read only when they are needed
text/                              text files become ids: documents, bytes, tokenizers
samples.py order.py                the windows of a text, and the order in which they are read
content_hash.py content_check.py   the hash of a text, and its check while training goes on
"""

from tpengine.data.content_check import CPU_SHARE, GPU_SHARE, ContentCheck
from tpengine.data.order import permute
from tpengine.data.samples import Corpus, Samples, batch_digest, first_sample_index, open_corpus
from tpengine.data.stored_tokens import StoredTokens
from tpengine.data.text.sources import stdlib_text
from tpengine.data.token_file import TokenFile, open_tokens, write_tokens

__all__ = [
    "CPU_SHARE",
    "GPU_SHARE",
    "ContentCheck",
    "Corpus",
    "Samples",
    "StoredTokens",
    "TokenFile",
    "batch_digest",
    "first_sample_index",
    "open_corpus",
    "open_tokens",
    "permute",
    "stdlib_text",
    "write_tokens",
]
