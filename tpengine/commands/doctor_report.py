"""What `tpengine doctor` prints and writes: the table, the verdict, the machine's file, and both as JSON. No torch."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tpengine.doctor.facts import HostFacts
from tpengine.doctor.finding import MachineFinding, change, is_ready, table, verdict_lines
from tpengine.files import keep_aside, write_beside
from tpengine.planner.machine import Machine, machine_text
from tpengine.planner.machine.found import differ, each_of, machine_of_found, mean_of

_FORMAT = 1


def machine_of(facts: Sequence[HostFacts], measured: Mapping[str, Any], *, is_quick: bool) -> Machine | str:
    """Return the machine that was measured, or in words why there is none.

    Args:
        facts: of all ranks.
        measured: examination.Record.measured.
        is_quick: few sizes were measured, once.
    """
    if not facts or "passes" not in measured:
        return "its rates were not measured"
    if facts[0].ranks_here > 1 and not measured.get("messages"):
        return "what its ranks exchange was not measured"
    passes = [mean_of(answers) for answers in measured["passes"]]
    first, hosts = facts[0], len({of.host for of in facts})
    is_gpu = first.gpu is not None
    found = {**each_of(passes, statistics.median), "messages": [], "sums": {}, "fused": {}}
    found |= {name: measured[name] for name in ("messages", "sums", "fused", "between") if name in measured}
    told = ["quick sizes, rough: " if is_quick else ""]
    told.append(f"tpengine doctor, {len(facts)} rank{'s' if len(facts) > 1 else ''} at once{differ(passes)}")
    if len(facts) == 1:
        told.append("; its links are copies within a rank's memory")
    elif hosts == 1:
        told.append("; one host: between hosts as within")
    return machine_of_found(
        found,
        name=str(first.gpu["name"]) if first.gpu else "this CPU",
        source="".join(told),
        is_gpu=is_gpu,
        ranks_per_node=first.ranks_here,
        num_nodes=hosts,
        memory_bytes=min(int(of.gpu["total_bytes"]) if of.gpu else 0 for of in facts),
    )


def report(
    findings: list[MachineFinding],
    facts: Sequence[HostFacts],
    measured: Mapping[str, Any],
    out: Path,
    *,
    is_quick: bool,
) -> list[str]:
    """Write the machine's file and the findings beside it; return the lines of the whole answer.

    Args:
        findings, facts, measured: examination.Record's. A file that cannot be written, on a disk that has filled
            meanwhile, is one more finding.
        out: the machine's file; an older one is kept aside.
        is_quick: as of `machine_of`.
    """
    machine = machine_of(facts, measured, is_quick=is_quick)
    beside = out.with_suffix(".json")
    content = {
        "format": _FORMAT,
        "ready": is_ready(findings),
        "findings": [finding.to_json() for finding in findings],
        "facts": [of.to_json() for of in facts],
    }
    files = {beside: json.dumps(content, indent=1) + "\n"}
    if isinstance(machine, str):
        said = f"no machine's file: {machine}; the table is in {beside}"
    else:
        files[out] = machine_text(machine)
        # A CPU's file has a rate of float32 alone, the dtype of small presets.
        model = "llama_1b" if facts[0].gpu else "tiny"
        said = f"wrote {out} and {beside}: tpengine advise --model {model} --machine {out}"
    unwritten = [finding for path, text in files.items() if (finding := _unwritten(path, text))]
    findings.extend(unwritten)
    return [*table(findings), *([] if unwritten else [said]), *verdict_lines(findings)]


def _unwritten(path: Path, text: str) -> MachineFinding | None:
    """Write a file; return what is to change where that fails."""
    try:
        keep_aside(path)
        write_beside(path, text.encode())
    except OSError as error:
        remedy = "tpengine doctor --out /tmp/machine.toml   # or another place that has room"
        return change(f"file {path}", f"not written: {error.strerror or error}", remedy=remedy)
    return None
