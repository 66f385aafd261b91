"""The ranks meet before there is a process group: over torchrun's store, or over one that rank 0 keeps.

Every rank reports whether it can continue, and rank 0 decides for all. So a mistake that only one rank can see (a
directory that is taken, a file that a node lacks) ends all ranks at once, even if the launcher would not end them.

No call blocks inside the library for longer than an answer takes. A waiting rank asks again and again, and the watch's
time limit ends it with the names of the ranks that have not come.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tpengine.distributed.launch import Launch
from tpengine.last_words import one_line

_POLL_SECONDS = 0.05
_CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 1.0
# Once one rank has reported a mistake, wait this long for the reports of others.
_GRACE_SECONDS = 1.0
# A rank with a mistake prints it itself if rank 0 has not answered by then.
_SILENCE_SECONDS = 10.0
# Rank 0 stays this long for ranks that have not yet heard why the run ends.
_FAREWELL_SECONDS = 30.0
# torch's default for a store that it creates itself.
_ANSWER_TIMEOUT = timedelta(minutes=30)
_NUM_NAMED = 8


def prefix_of_attempt(environ: Mapping[str, str]) -> str:
    """Return the prefix in the store under which the ranks of this attempt meet.

    torchrun --max-restarts passes on the store of the previous attempt, which still has the entries of dead ranks. If
    each attempt has a store of its own, torchrun's count must not be used: a node that joins later has a lower count.
    """
    keeps_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"attempt/{environ.get('TORCHELASTIC_RESTART_COUNT', '0') if keeps_store else 'own'}"


class Meeting:
    """One rank's part in the meeting.

    Args:
        launch: this rank's.
        environ: says whether torchrun keeps the store, and which attempt this is.
        clock: seconds; only differences matter.

    Attributes:
        store: where the ranks meet, and which the process groups use too; opened by `connect`.
        told_at: what rank 0's clock said when it answered the last `tell` that was given a clock.
    """

    store: Any

    def __init__(self, launch: Launch, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._launch, self._clock = launch, clock
        self._keeps_store = launch.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._prefix = prefix_of_attempt(environ)
        self._awaited = self._about = ""
        self.told_at = 0.0

    def explain(self, _: object) -> str:
        """Return which rank this one waits for, in words; any thread may call it."""
        return f", waiting for {self._awaited}" if self._awaited else ""

    def connect(self) -> None:
        """Open the store; wait until it exists.

        Raises:
            ValueError: the port is taken.
        """
        launch = self._launch
        if launch.world_size == 1:
            self.store = dist.HashStore()  # type: ignore[attr-defined]
            return
        if not self._keeps_store:
            self._await_server()
        self.store = self._client(is_master=self._keeps_store)

    def agree(self, mistake: str, speak: Callable[[str], None], about: str = "") -> bool:
        """Report whether this rank can continue, and return whether all can; collective.

        Args:
            mistake: why this rank cannot continue; empty if it can. Rank 0 has already printed its own.
            speak: prints a line for the user. Rank 0 prints the others' mistakes before any of them leaves; a rank that
                hears nothing from rank 0 for a while prints its own.
            about: what is agreed on, another name each time.

        Returns:
            Whether all ranks continue.

        Raises:
            ValueError: the store belongs to another run; that run does not notice this, unless it has as many ranks and
                neither run has a name.
        """
        self._about = about
        rank, store = self._launch.rank, self._about_store()
        is_said = False
        if rank != 0:
            is_said = self._hear("world_size", mistake, speak)
            self._check_run()
        if store.add(f"here/{rank}", 1) > 1:
            raise ValueError(self._another_run(f"its rank {rank} was here first"))
        if rank == 0:
            store.set("run", self._launch.run)
            store.set("world_size", str(self._launch.world_size))
        store.set(f"mistake/{rank}", mistake)
        store.add("mistakes", int(bool(mistake)))
        store.add("arrived", 1)
        if rank == 0:
            others = mistake or self._gather()
            if others and not mistake:
                speak(others)
            store.set("verdict", others)
            if others:
                self._wait_until_heard()
            return not others
        self._hear("verdict", "" if is_said else mistake, speak)
        verdict = store.get("verdict")
        store.add("heard", 1)
        return not verdict

    def tell(self, what: str, value: Any, clock: Callable[[], float] | None = None) -> list[Any]:
        """Tell all ranks a value, and return what each has told, by rank; collective, with another name each time.

        Args:
            what: the values' name, on all ranks alike.
            value: this rank's: anything that JSON can hold.
            clock: rank 0's is read when all values have come, and what it says is `told_at` of all ranks.

        Returns:
            Every rank's value; tuples become lists.

        Cost: rank 0 asks the store for each, all others once: for as many answers as ranks, not their square.
        """
        self._about = what
        rank, store = self._launch.rank, self._about_store()
        store.set(f"of/{rank}", json.dumps(value))
        store.add("arrived", 1)
        if rank == 0:
            look_at = self._clock() + _LOOK_SECONDS
            while store.add("arrived", 0) < self._launch.world_size:
                if self._clock() > look_at:
                    self._note_missing("of")
                    look_at = self._clock() + _LOOK_SECONDS
                time.sleep(_POLL_SECONDS)
            self._awaited = ""
            values = [json.loads(store.get(f"of/{other}")) for other in range(self._launch.world_size)]
            store.set("all", json.dumps([values, clock() if clock else 0.0]))
        else:
            self._hear("all", "", lambda _: None)
        found: list[Any]
        found, self.told_at = json.loads(store.get("all"))
        return found

    def _about_store(self) -> Any:
        """Return the store, with the names of what is being agreed on."""
        return dist.PrefixStore(self._about, self.store) if self._about else self.store  # type: ignore[attr-defined]

    def _note_missing(self, name: str) -> None:
        """Note which ranks have not written under a name."""
        store, ranks = self._about_store(), range(self._launch.world_size)
        self._awaited = named([rank for rank in ranks if not store.check([f"{name}/{rank}"])])

    def another_client(self) -> Any:
        """Return another connection to the same store, for a thread that must not wait for other threads' calls."""
        return self._client(is_master=False)

    def _hear(self, name: str, mistake: str, speak: Callable[[str], None]) -> bool:
        """Wait until rank 0 has decided; return whether this rank has printed its mistake meanwhile."""
        self._awaited = "rank 0"
        silent_until = self._clock() + _SILENCE_SECONDS
        has_spoken = False
        store = self._about_store()
        while not store.check([name]):
            time.sleep(_POLL_SECONDS)
            if mistake and not has_spoken and self._clock() > silent_until:
                speak(mistake)
                has_spoken = True
        self._awaited = ""
        return has_spoken

    def _check_run(self) -> None:
        """Leave a store of another run before writing to it; rank 0 has written which run it is.

        Raises:
            ValueError: the store's run has another number of ranks, or another name.
        """
        store = self._about_store()
        size, run = int(store.get("world_size")), store.get("run").decode()
        if size != self._launch.world_size:
            raise ValueError(self._another_run(f"it has {size} ranks, this one {self._launch.world_size}"))
        if run and self._launch.run and run != self._launch.run:
            raise ValueError(self._another_run(f"it is {one_line(run)}, this one {one_line(self._launch.run)}"))

    def _another_run(self, why: str) -> str:
        place = f"{self._launch.address}:{self._launch.port}"
        return (
            f"the port at which the ranks meet must be for this run only: {place} is another run's, {why}: use another "
            "MASTER_PORT; an elastic torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )

    def _client(self, *, is_master: bool) -> Any:
        launch = self._launch
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                launch.address,
                launch.port,
                None,
                is_master,
                timeout=_ANSWER_TIMEOUT,
                wait_for_workers=False,
                multi_tenant=is_master,
            )
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ValueError(
                f"the port at which the ranks meet must be free: {launch.port} on rank 0's host is taken: use another "
                "MASTER_PORT"
            ) from None
        return dist.PrefixStore(self._prefix, store)  # type: ignore[attr-defined]

    def _await_server(self) -> None:
        """Wait until the server listens; torch's own attempts would print many lines."""
        place = self._launch.address, self._launch.port
        self._awaited = f"rank 0 at {place[0]}:{place[1]}"
        while True:
            try:
                socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
                return
            except OSError as error:
                self._awaited = f"rank 0 at {place[0]}:{place[1]} ({error.strerror or error})"
                time.sleep(_POLL_SECONDS)

    def _gather(self) -> str:
        """Wait for all ranks, or for one that cannot continue; return the mistakes in one line, empty if none."""
        store, world_size = self._about_store(), self._launch.world_size
        leave_at, look_at = float("inf"), self._clock() + _LOOK_SECONDS
        while store.add("arrived", 0) < world_size and self._clock() < leave_at:
            if leave_at == float("inf") and store.add("mistakes", 0):
                leave_at = self._clock() + _GRACE_SECONDS
            if self._clock() > look_at:
                self._note_missing("mistake")
                look_at = self._clock() + _LOOK_SECONDS
            time.sleep(_POLL_SECONDS)
        self._awaited = ""
        if not store.add("mistakes", 0):
            return ""
        ranks_of: dict[str, list[int]] = {}
        for rank in range(world_size):
            said = store.get(f"mistake/{rank}") if store.check([f"mistake/{rank}"]) else b""
            if said:
                ranks_of.setdefault(one_line(said.decode("utf-8", "replace")), []).append(rank)
        return "; ".join(f"{named(ranks)}: {text}" for text, ranks in ranks_of.items())

    def _wait_until_heard(self) -> None:
        """Wait until the others have heard: the store goes with this process, or with its node's torchrun."""
        end, store = self._clock() + _FAREWELL_SECONDS, self._about_store()
        while store.add("heard", 0) < self._launch.world_size - 1 and self._clock() < end:
            time.sleep(_POLL_SECONDS)


def named(ranks: list[int]) -> str:
    """Return "rank 3", "ranks 2, 3" or "ranks 0, 1, ... and 5 more"."""
    some = ", ".join(map(str, ranks[:_NUM_NAMED]))
    more = f" and {len(ranks) - _NUM_NAMED} more" if len(ranks) > _NUM_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"
