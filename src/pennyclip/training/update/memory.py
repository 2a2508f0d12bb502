"""How much memory there is and was taken, and what running out of it looks like."""

import ctypes
import gc
import resource
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from pennyclip.base.errors import RunError

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


def peak(device: torch.device) -> int:
    """Most bytes that this process has held since `reset_peak`, libraries included on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, whose ru_maxrss a new process inherits from its parent
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return 1024 * int(fields["VmHWM"].split()[0])
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak(device: torch.device) -> None:
    """Give back what is free, and count the peak from what is held now.

    Other systems than Linux do not let a process do that on a CPU: there the peak stays.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        with suppress(AttributeError):  # a C library that has none
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # a sandbox that refuses
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
