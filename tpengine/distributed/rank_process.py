"""A rank that local_ranks.py has started: joins the group, makes its object, and answers calls until its parent ends.

No file imports this one: the parent must not need torch, and passes its name to the process that it starts.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist


class Function:
    """A function, named as a factory is, as an object with one method."""

    def __init__(self, path: str) -> None:
        self._function = imported(path)

    def run(self, *args: Any) -> Any:
        """Call it."""
        return self._function(*args)


class NotImportable(ValueError):
    """There is no such module or name; the message is one line, because a traceback would not say more."""


def serve(
    connection: Connection,
    rank: int,
    world: int,
    store: str,
    num_threads: int,
    factory: str,
    args: tuple[Any, ...],
) -> NoReturn:
    """Be one rank; ends the process.

    Args:
        connection: to the parent; it gets (True, answer) for the construction and each call, or once (False, report).
        store: path of the file over which the group meets.
        num_threads: of torch in this rank.
        factory: see Ranks.
    """
    try:
        torch.set_num_threads(num_threads)
        make = imported(factory)
        _join(store, rank, world)
        target = make(*args)
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(target, method)(*arguments)))
    except BaseException as error:
        # This fails if the parent is gone, but then no process reads the report.
        with contextlib.suppress(OSError):
            connection.send((False, str(error) if isinstance(error, NotImportable) else traceback.format_exc()))
    # Other ranks may hang in a collective with this one, so no cleanup may wait for them.
    os._exit(0)


def _join(path: str, rank: int, world: int) -> None:
    """Join the group that meets over a file, and go on when all ranks have joined it.

    A rank that went on alone and failed would end while others still connect to it; they would report that as an error
    of their own, beside the one mistake.
    """
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]  # torch's stubs do not name it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if store.add("joined", 1) == world:
        store.set("all have joined", "")
    store.wait(["all have joined"])


def imported(path: str) -> Callable[..., Any]:
    """Return what "package.module:name" names.

    Raises:
        NotImportable: another form, no such module, or no such name in it. Errors inside the module are not changed.

    """
    module_name, _, name = path.partition(":")
    rule = f"what a rank runs must be importable as package.module:name: got {path!r}"
    if not (module_name and name):
        raise NotImportable(f"{rule}: name a module and what it defines")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise NotImportable(f"{rule}: there is no module {error.name}") from None
        raise
    if not hasattr(module, name):
        raise NotImportable(f"{rule}: {module_name} defines no {name}")
    function: Callable[..., Any] = getattr(module, name)
    return function
