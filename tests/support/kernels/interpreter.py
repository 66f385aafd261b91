"""Triton's interpreter, made cheaper: patch the language once per launch, not for every function called.

A launch replaces triton.language's functions by such as compute at once, and puts them back at its end. A call of a
function inside the kernel replaces them again, all 200, by ones that do the same, which was 40 % of the time of a
kernel. Ranks with TRITON_INTERPRET=1 have it (rank_pool.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def patch_language_once() -> None:
    """Patch once per launch from now on in this process; do nothing if this triton has another interpreter."""
    import triton.language as tl
    from triton.runtime import interpreter

    scope = getattr(interpreter, "_LangPatchScope", None)
    if scope is None:
        return
    patch = interpreter._patch_lang

    @functools.cache
    def languages_of(function: Callable[..., Any]) -> list[Any]:
        """Return the language modules that a function uses, found as `patch` finds them."""
        return [one for one in function.__globals__.values() if inspect.ismodule(one) and one in (tl, tl.core)]

    def patch_what_is_not(function: Callable[..., Any]) -> Any:
        languages = languages_of(function)
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return scope()
        return patch(function)

    interpreter._patch_lang = patch_what_is_not
