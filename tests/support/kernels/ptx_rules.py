"""What compiled code must be like for signals between ranks to be right: a checker of PTX and of gfx942's assembly.

    faults(ptx), faults_amd(assembly) -> a line for each breach

Triton's own semantics promise less than the kernels need (it puts no barrier before a release), so what it made of them
is looked at:

 1. What programs share by the word is ordered: every atomic, and every load or store with a scope, acquires, releases
    or both; what is counted or taken does not only release; and no loop ends by a value that a load without acquire
    brought.
 2. A release is later than the stores of all threads: back from a release, on every path, a barrier of the program
    comes before any store or other atomic.
 3. An acquire is earlier than the loads of all threads: on from an acquire, on every path, a barrier comes before any
    access of global memory.
 4. Peers are told and heard at scope sys. Scope gpu is for claims: an atomic add that both acquires and releases.
 5. No store that runs on its own (TMA, bulk copies, st.async) comes before a release at scope sys.
 6. Threads go one way: no branch asks for a value that each of them read for itself where peers write (`volatile`), or
    from a clock: they would meet different barriers.
 7. No wait is endless: a loop that polls, which loads with acquire at scope sys, reads a clock in each round or some.

Code is taken apart into instructions and what may come after each; a path is any way through, whatever the conditions.
That asks for more than is needed where conditions rule a path out, and never for less. Of gfx942's code the rules about
conditions (the last of 1, and 6) are not checked, and there are no stores of rule 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field

_SEMANTICS = frozenset({"relaxed", "acquire", "release", "acq_rel"})
_SCOPES = frozenset({"cta", "cluster", "gpu", "sys"})
_NOT_GLOBAL = frozenset({"shared", "local", "param", "const"})
# These have no register that they write.
_WRITES_NONE = frozenset({"st", "red", "bra", "bar", "barrier", "ret", "exit", "cp", "fence", "membar", "call"})
_REGISTER = re.compile(r"%[a-z]+\d+")
_LABEL = re.compile(r"([$\w]+):(?!:)")


@dataclass
class Instruction:
    """One instruction, and the numbers of those that may come after it.

    Attributes:
        text: as written, in one line.
        words: its name, taken apart at the dots; gfx942's are said in PTX's words.
        guard: the register that decides whether it is done; empty if it always is.
        writes, reads: registers.
        kind: "load", "store" or "atomic" of global memory, "asynchronous" store, "barrier" of all threads, "branch",
            "clock" that is read, "" of anything else.
    """

    text: str
    words: frozenset[str]
    guard: str = ""
    writes: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    kind: str = ""
    next: list[int] = field(default_factory=list)

    @property
    def synchronises(self) -> bool:
        return self.kind == "atomic" or (self.kind in ("load", "store") and bool(self.words & (_SEMANTICS | _SCOPES)))

    @property
    def acquires(self) -> bool:
        return self.kind in ("load", "atomic") and bool(self.words & {"acquire", "acq_rel"})

    @property
    def releases(self) -> bool:
        return self.kind in ("store", "atomic") and bool(self.words & {"release", "acq_rel"})


def faults(ptx: str) -> list[str]:
    """What breaks the rules in the PTX of a kernel.

    Raises:
        ValueError: it is not one kernel, or jumps where cannot be seen.
    """
    every = instructions_of(ptx)
    return _order_faults(every) + _condition_faults(every) + _endless(every)


def faults_amd(assembly: str) -> list[str]:
    """What breaks the rules in a kernel's code for gfx942, as far as they are checked there."""
    every = amd_instructions_of(assembly)
    return _order_faults(every) + _endless(every)


def instructions_of(ptx: str) -> list[Instruction]:
    """Take the PTX of a kernel apart. Raises ValueError as `faults`."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    entries = [match.end() for match in re.finditer(r"\.entry\b[^{]*", ptx)]
    if len(entries) != 1 or re.search(r"^\s*(\.visible\s+)?\.func\b[^;]*\{", ptx, re.MULTILINE):
        raise ValueError(f"expected the PTX of one kernel without functions beside it, got {len(entries)} kernels")
    every: list[Instruction] = []
    # Inline assembly has labels of its own between braces, the same ones each time.
    scopes, num_scopes = [0], 1
    labels: dict[tuple[int, str], int] = {}
    jumps: list[tuple[int, str, tuple[int, ...]]] = []
    for statement in _statements(ptx, entries[0]):
        if statement == "{":
            scopes.append(num_scopes)
            num_scopes += 1
        elif statement == "}":
            scopes.pop()
        elif statement.endswith(":"):
            labels[scopes[-1], statement[:-1]] = len(every)
        else:
            instruction = _instruction(statement)
            if "brx" in instruction.words:
                raise ValueError(f"a jump through a table cannot be followed: {statement}")
            if instruction.kind == "branch":
                jumps.append((len(every), statement.split()[-1], tuple(scopes)))
            every.append(instruction)
    for i, one in enumerate(every[:-1]):
        if one.guard or not one.words & {"bra", "ret", "exit", "trap"}:
            one.next.append(i + 1)
    for i, label, within in jumps:
        every[i].next.append(next(labels[scope, label] for scope in reversed(within) if (scope, label) in labels))
    return every


def _statements(ptx: str, at: int) -> Iterator[str]:
    """A kernel's braces, labels with their colons, and instructions, from its first brace to its last."""
    depth = 0
    while True:
        if ptx[at].isspace():
            at += 1
        elif ptx[at] in "{}":
            depth += 1 if ptx[at] == "{" else -1
            yield ptx[at]
            at += 1
            if not depth:
                return
        elif label := _LABEL.match(ptx, at):
            yield label.group()
            at = label.end()
        elif ptx.startswith(".loc", at):
            at = ptx.index("\n", at)
        else:
            end = ptx.index(";", at)
            if ptx[at] not in ".;":
                yield " ".join(ptx[at:end].split())
            at = end + 1


def _instruction(text: str) -> Instruction:
    guard, rest = text.split(maxsplit=1) if text.startswith("@") else ("", text)
    name, _, operands = rest.partition(" ")
    words = name.split(".")
    written, _, read = operands.partition("}" if operands.startswith("{") else ",")
    if words[0] in _WRITES_NONE:
        written, read = "", operands
    return Instruction(
        text=text,
        words=frozenset(word.split("::")[0] for word in words),
        guard=guard.lstrip("@!"),
        writes=frozenset(_REGISTER.findall(written)),
        reads=frozenset(_REGISTER.findall(read + guard)),
        kind=_kind(words, operands),
    )


def _kind(words: list[str], operands: str) -> str:
    name, spaces = words[0], [word.split("::")[0] for word in words]
    if "%globaltimer" in operands:
        return "clock"
    if name in ("bar", "barrier"):
        # Others are of some warps only, or do not wait.
        return "barrier" if words[1:] in (["sync"], ["sync", "aligned"]) and operands == "0" else ""
    if name in ("st", "red") and "async" in words:
        return "asynchronous"
    if name == "cp":
        if "global" not in spaces or "shared" not in spaces:
            return ""
        return "asynchronous" if spaces.index("global") < spaces.index("shared") else "load"
    if not _NOT_GLOBAL.isdisjoint(spaces):
        return ""
    return {
        "ld": "load",
        "st": "store",
        "atom": "atomic",
        "red": "atomic",
        "multimem": "store",
        "call": "store",  # whatever it does
        "bra": "branch",
    }.get(name, "")


def amd_instructions_of(assembly: str) -> list[Instruction]:
    """Take gfx942's code of a kernel apart, in PTX's words.

    There a release is an atomic or store after `buffer_wbl2`, an acquire a load or atomic before a wait and
    `buffer_inv`; both at scope sys with sc0 and sc1, at scope gpu with sc1 alone. That the write-back is waited for is
    not asked: LLVM leaves the wait out where it knows of no other access in flight, which is its fault and was mended
    in its pull request 178316, later than triton 3.7. The barriers of a program of one wave are none, and not missed.
    """
    every: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = [re.split(r";|//", line)[0].strip() for line in assembly.splitlines()]
    for line in lines:
        if label := re.fullmatch(r"(\.?L?BB\w+):", line):
            labels[label.group(1)] = len(every)
        elif re.match(r"(s|v|ds|global|flat|buffer|scratch)_\w+", line):
            every.append(_amd_instruction(line))
    # Its instructions are done for all threads at once, and a release waits for them.
    is_one_wave = re.search(r"\.max_flat_workgroup_size:\s*64$", assembly, re.MULTILINE) is not None
    for i, one in enumerate(every):
        name, *operands = one.text.split()
        if not name.startswith(("s_branch", "s_endpgm", "s_setpc")) and i + 1 < len(every):
            one.next.append(i + 1)
        if name.startswith(("s_branch", "s_cbranch")):
            one.next.append(labels[operands[0]])
        if one.kind in ("load", "store", "atomic"):
            one.words |= _amd_semantics(every, i)
        elif is_one_wave and one.text.startswith(("buffer_wbl2", "buffer_inv")):
            one.kind = "barrier"
    return every


def _amd_instruction(text: str) -> Instruction:
    name = text.split()[0]
    if name == "s_barrier":
        return Instruction(text, frozenset(), kind="barrier")
    if name == "s_memrealtime":
        return Instruction(text, frozenset(), kind="clock")
    found = re.match(r"(?:global|flat|buffer)_(load|store|atomic)_(\w+)", name)
    if not found:
        return Instruction(text, frozenset())
    short = {"load": "ld", "store": "st", "atomic": "atom"}[found.group(1)]
    return Instruction(text, frozenset({short, found.group(2)}), kind=found.group(1))


def _amd_semantics(every: list[Instruction], i: int) -> set[str]:
    def near(step: int, name: str) -> str:
        """The cache instruction before or after this one, but for waits; a compiler puts nothing else between."""
        j = i + step
        while 0 <= j < len(every) and every[j].text.startswith(("s_waitcnt", "s_nop")):
            j += step
        return every[j].text if 0 <= j < len(every) and every[j].text.startswith(name) else ""

    scope = {"buffer_wbl2": "", "buffer_inv": ""}
    for step, name in ((-1, "buffer_wbl2"), (1, "buffer_inv")):
        if text := near(step, name):
            scope[name] = "sys" if "sc0 sc1" in text else "gpu" if "sc1" in text else "cta"
    releases = "" if every[i].kind == "load" else scope["buffer_wbl2"]
    acquires = "" if every[i].kind == "store" else scope["buffer_inv"]
    if releases or acquires:
        return {"acq_rel" if releases and acquires else "release" if releases else "acquire", releases or acquires}
    return {"sys", "relaxed"} if every[i].text.endswith("sc0 sc1") else set()


def _order_faults(every: list[Instruction]) -> list[str]:
    """Breaches of rules 1 to 5, but for the loops of 1."""
    after, before = _ways(every)
    found = []
    for i, one in enumerate(every):
        if one.synchronises and not (one.acquires or one.releases):
            found.append(f"is relaxed: {one.text}")
        if one.kind == "atomic" and "release" in one.words and not one.words & {"exch", "swap", "red"}:
            found.append(f"does not acquire: {one.text}")
        if one.synchronises and "sys" not in one.words and not {"atom", "add", "gpu", "acq_rel"} <= one.words:
            found.append(f"is not at scope sys: {one.text}")
        if one.releases and (met := _met(every, i, before, ("store", "atomic", "asynchronous"))):
            found.append(f"releases what other threads may not have stored yet: {one.text}: {met[0]}")
        if one.acquires and (met := _met(every, i, after, ("load", "store", "atomic", "asynchronous"))):
            found.append(f"acquires what other threads may have read before: {one.text}: {met[0]}")
        if one.kind == "asynchronous":
            later = (every[j] for j in _reached(after, i, lambda _: False))
            flags = [other.text for other in later if other.releases and "sys" in other.words]
            found += [f"may be overtaken by a flag: {one.text}: {flag}" for flag in flags[:1]]
    return found


def _condition_faults(every: list[Instruction]) -> list[str]:
    """Breaches of the rules about conditions: 6 and the last of 1."""
    loops = _loops(every)
    writers: dict[str, list[int]] = {}
    for i, one in enumerate(every):
        for register in one.writes:
            writers.setdefault(register, []).append(i)
    found = []
    for i, one in enumerate(every):
        if one.kind != "branch" or not one.guard:
            continue
        for load in _origins(every, writers, one.guard, range(len(every))):
            if "volatile" in load.words or load.kind == "clock":
                found.append(f"may part the threads: {one.text}: {load.text}")
        for loop in loops:
            if i in loop and not loop.issuperset(one.next):
                for load in _origins(every, writers, one.guard, loop):
                    if load.kind != "clock" and not load.acquires:
                        found.append(f"waits without acquire: {one.text}: {load.text}")
    return list(dict.fromkeys(found))


def _endless(every: list[Instruction]) -> list[str]:
    """Breaches of rule 7; an outer loop reads the clocks that its inner loops read."""
    found = []
    for loop in _loops(every):
        polls = [i for i in sorted(loop) if every[i].acquires and not every[i].releases and "sys" in every[i].words]
        if polls and not any(every[i].kind == "clock" for i in loop):
            found.append(f"may poll for ever: {every[polls[0]].text}")
    return found


def _ways(every: list[Instruction]) -> tuple[list[list[int]], list[list[int]]]:
    """Return for each instruction those that may come after it, and those that may come before it."""
    before: list[list[int]] = [[] for _ in every]
    for i, one in enumerate(every):
        for other in one.next:
            before[other].append(i)
    return [one.next for one in every], before


def _reached(ways: list[list[int]], start: int, ends: Callable[[int], bool]) -> set[int]:
    """What can be reached from an instruction (itself only around a loop); ways end where `ends` says so."""
    seen: set[int] = set()
    waiting = [*ways[start]]
    while waiting:
        i = waiting.pop()
        if i not in seen:
            seen.add(i)
            waiting += [] if ends(i) else ways[i]
    return seen


def _met(every: list[Instruction], start: int, ways: list[list[int]], kinds: tuple[str, ...]) -> list[str]:
    """The instructions of these kinds that some way from `start` meets before a barrier."""
    met = _reached(ways, start, lambda i: every[i].kind in ("barrier", *kinds))
    return [every[i].text for i in sorted(met) if every[i].kind in kinds]


def _origins(
    every: list[Instruction], writers: dict[str, list[int]], register: str, within: Container[int]
) -> list[Instruction]:
    """The loads, atomics and clocks among `within` that a register's value is made of. Values are not followed through
    shared memory, where triton puts those of atomics for all threads.
    """
    found, seen, waiting = [], {register}, [register]
    while waiting:
        for one in (every[i] for i in writers.get(waiting.pop(), ()) if i in within):
            if one.kind in ("load", "atomic", "clock"):
                found.append(one)
            else:
                waiting += one.reads - seen
                seen |= one.reads
    return found


def _loops(every: list[Instruction]) -> list[set[int]]:
    """The natural loops: of each edge back to an instruction that there is no way around, what lies between."""
    after, before = _ways(every)
    loops = []
    for head, tails in enumerate(before):
        if len(tails) < 2 and head:
            continue
        around = {0} | _reached(after, 0, head.__eq__) if head else set()
        backs = [tail for tail in tails if tail == head or tail not in around or not head]
        if backs:
            loop = {head, *backs}
            for tail in backs:
                if tail != head:
                    loop |= _reached(before, tail, head.__eq__)
            loops.append(loop)
    return loops
