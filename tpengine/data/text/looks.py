"""Whether the beginning of a file looks like text: for a warning, since any bytes can be tokens."""

from __future__ import annotations

import codecs

HEAD_BYTES = 1 << 13
# As Perl's -T has it: of bytes that are no UTF-8, this share may be other than printable ASCII.
_MOST_ODD = 0.3
_PRINTABLE = frozenset((*range(32, 127), *b"\n\r\t\f\b\x1b"))
_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)


def why_no_text(head: bytes) -> str:
    """Return why bytes do not look like text; empty if they do.

    Args: head: the first bytes of a file; of more than HEAD_BYTES the rest is not looked at.
    """
    head = head[:HEAD_BYTES]
    if head.startswith(_BOMS):
        return "it begins as UTF-16 or UTF-32 does: convert it to UTF-8"
    if (place := head.find(0)) >= 0:
        return f"byte {place} is zero"
    try:
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head)
        odd = sum(byte < 32 and byte not in _PRINTABLE for byte in head)
    except UnicodeDecodeError:
        odd = sum(byte not in _PRINTABLE for byte in head)
    return f"{odd} of its first {len(head)} bytes are no text" if odd > _MOST_ODD * len(head) else ""
