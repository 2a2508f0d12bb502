"""How much memory there is, and what running out of it looks like."""

from pathlib import Path

import psutil
import torch

from pennyclip.errors import RunError

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux tells a container its limit (cgroup v2)."""


class OutOfMemory(RunError):
    """There is not enough memory, and no smaller micro-batch helps."""


def ran_out(error: RuntimeError) -> bool:
    """Whether an error says that a tensor found no room.

    On GPUs torch raises a class of its own; on CPUs its allocator, a plain RuntimeError.
    """
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def available(device: torch.device) -> int:
    """Bytes that this process may still take on a device without pushing others out.

    On a CPU: what the system can hand out without swapping, or less where a container is limited
    to less. On a GPU: what is free there and in torch's own reserve.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        statistics = (CGROUP / "memory.stat").read_text().split()
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return free
    # File pages that nobody reads are given back under pressure.
    idle = int(statistics[statistics.index("inactive_file") + 1])
    return min(free, limit - used + idle)
