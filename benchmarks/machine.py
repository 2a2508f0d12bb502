"""What every benchmark says of the machine it ran on, and where its table goes."""

import platform
from pathlib import Path


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def publish(lines: list[str], out: Path | None) -> None:
    """Print a table, and keep it where a file was named."""
    text = "\n".join(lines) + "\n"
    print(text)
    if out is not None:
        out.write_text(text)
