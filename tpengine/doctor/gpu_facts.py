"""What torch and the driver say of a rank's GPU and of its peers; nothing is launched."""

from __future__ import annotations

from typing import Any

import torch

from tpengine.doctor import nvml


def gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """Return the facts of this rank's GPU, as JSON holds them; None on a CPU.

    Returns:
        index, name, uuid, capability, processors, total_bytes, free_bytes; driver, cuda, nccl, versions as text;
        visible, the number of GPUs this process sees; peers, the indices whose memory it can address; links, what
        connects it to each other GPU by index (NVLink, PCIe, host, empty where the driver does not tell); most_mhz.
    """
    if device.type != "cuda":
        return None
    index = device.index or 0
    of = torch.cuda.get_device_properties(index)
    uuid = str(getattr(of, "uuid", ""))
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    has_nccl = torch.distributed.is_nccl_available()
    return {
        "index": index,
        "name": of.name,
        "uuid": uuid,
        "capability": f"{of.major}.{of.minor}",
        "processors": of.multi_processor_count,
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        "driver": nvml.driver_version(),
        "cuda": torch.version.cuda or torch.version.hip or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "",
        "visible": 1 + len(others),
        "peers": [other for other in others if torch.cuda.can_device_access_peer(index, other)],
        "links": {str(other): _link(uuid, other) for other in others},
        "most_mhz": nvml.most_mhz(),
    }


def _link(uuid: str, other: int) -> str:
    return nvml.link_between(uuid, str(getattr(torch.cuda.get_device_properties(other), "uuid", "")))
