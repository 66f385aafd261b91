"""What triton has compiled of a kernel on a device, found at a fraction of what its own launch takes the host.

`launch.run` looks here first. Nothing here launches or compiles: what is not known yet, triton has to say.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

try:
    import triton
except ImportError:  # not on Linux: nothing is launched
    triton = None

# Launches of a kernel on a device, each with numbers of its own.
_MOST_CODES = 4096
# A number or a pointer is compiled for; nothing of it is; the value is.
_SPECIALISED, _IGNORED, _CONSTANT = range(3)
# By the identity of triton's caches of a kernel on a device.
known_kernels: dict[int, KnownKernel] = {}
# Reads the settings that triton adds to a kernel's options besides "debug"; which there are depends on its version.
_added = operator.attrgetter(
    *(
        name
        for name in ("instrumentation_mode", "fpsan_homomorphic_casts")
        if triton is None or hasattr(triton.knobs.compilation, name)
    )
)


class Code(NamedTuple):
    """What triton compiled, and what the launcher is passed behind a launch's arguments."""

    compiled: Any
    constants: tuple[Any, ...]


class KnownKernel:
    """What triton has compiled of a kernel on a device, found at a fraction of what its own launch takes the host.

    Triton asks for each argument what it is compiled for, writes the options as text, and calls hooks that nobody has
    set. Here numbers are looked up as they are: quick, and finer than what is compiled for them. Those that are not
    found, as numbers that change with every call, are looked up by what triton's binder says of them. A launch passes
    on all its arguments, and no tensor is kept.

    Args:
        kernel: what `jit` made.
        caches: triton's, of that kernel and a device. Held, so that no others can have their identity.
    """

    def __init__(self, kernel: Any, caches: tuple[Any, ...]) -> None:
        self._kernel, self._caches = kernel, caches
        *_, self._backend, self._binder = caches
        self._roles = [_role(parameter) for parameter in kernel.params]
        self._by_numbers: dict[tuple[Any, ...], Code] = {}
        self._by_kinds: dict[tuple[Any, ...], Any] = {}
        # Global names that the kernel's source reads: whose, the name, its value when it was compiled.
        self._reads: list[tuple[dict[str, Any], str, Any]] = []

    def code(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Code | None:
        """Return what is launched; None if triton has to say: it is new, or a global name has changed."""
        for names, name, value in self._reads:
            if names.get(name) is not value:
                return None
        key = self._key(arguments, options)
        code = None if key is None else self._by_numbers.get(key)
        if code is not None:
            return code
        kinds, constants = self._kinds(arguments, options)
        if kinds not in self._by_kinds:
            return None
        code = Code(self._by_kinds[kinds], constants)
        if key is not None:
            if len(self._by_numbers) >= _MOST_CODES:  # numbers that change with every call
                self._by_numbers.clear()
            self._by_numbers[key] = code
        return code

    def compiled(self, compiled: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Keep and return what triton has launched; None if a hook of triton's has kept it from that."""
        if compiled is not None:
            self._by_kinds[self._kinds(arguments, options)[0]] = compiled
            reads = self._kernel.used_global_vals.items()
            self._reads = [(names, name, names[name]) for (name, _), (_, names) in reads]
        return compiled

    def _key(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return what is compiled for, or more than that; None if an argument is of a kind that this does not know."""
        key: list[Any] = [_settings(self._kernel), tuple(options), *options.values()]
        append, has_native = key.append, self._backend.supports_native_tensor_specialization
        for x, role in zip(arguments, self._roles, strict=False):
            if role == _IGNORED:
                continue
            kind = type(x)
            if kind is int or role == _CONSTANT:
                append(x)
            elif kind is Tensor or kind is Parameter:
                append(x.dtype)
                # On AMD triton also looks at the memory's size.
                append(x.data_ptr() % 16 if has_native else self._backend.get_tensor_specialization(x, align=True))
            elif x is None or kind is float or kind is bool:
                append(kind)
            elif kind.__module__ == "triton.tools.tensor_descriptor":
                append((x.base.dtype, *x.block_shape))
            else:
                return None
        return tuple(key)

    def _kinds(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what triton compiles for, and the kernel's parameters that follow the arguments."""
        bound, kinds, others = self._binder(*arguments, **options)
        return (_settings(self._kernel), *others.items(), *kinds), tuple(bound.values())[len(arguments) :]


def _role(parameter: Any) -> int:
    """Return how triton compiles for a parameter of a kernel, as its binder has it."""
    if parameter.is_constexpr:
        return _CONSTANT
    annotation = parameter.annotation_type
    never = annotation[:2] in ("u1", "fp", "bf")
    return _IGNORED if annotation and (never or parameter.do_not_specialize) else _SPECIALISED


def _settings(kernel: Any) -> tuple[Any, Any]:
    """Return what triton adds to a kernel's options."""
    knobs = triton.knobs
    return kernel.debug or knobs.runtime.debug, _added(knobs.compilation)
