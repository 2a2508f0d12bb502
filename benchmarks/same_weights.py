"""Do two versions of pennyclip train the same weights, bit for bit?

    python benchmarks/same_weights.py --against 64b3c63

Each version prepares examples/clipart and trains three recipes (both towers frozen, fine-tuning by
stages, from scratch with masked patches) in processes of one thread. Then the newer version takes
up what the older left: it finishes a copy of an interrupted run, and reports and exports a
finished one. Every file of tensors is compared by its hash. Takes about ten minutes on two cores.
"""

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import processor

ROOT = Path(__file__).parents[1]
RECIPES = {
    "frozen": ["frozen-lite0-minilm", "--stages.0.epochs", "8"],
    "fine-tuning": ["finetune-lite0-minilm"]
    + [f"--stages.{n}.epochs={epochs}" for n, epochs in enumerate((2, 0.3, 0.3, 0.3))],
    "scratch": ["scratch-vit-tiny", "--stages.0.epochs", "2", "--stages.0.mask-ratio", "0.5"],
}


class Version:
    """One checkout of pennyclip, and the folder that it works in."""

    def __init__(self, source: Path, work: Path) -> None:
        self.work = work
        work.mkdir(parents=True, exist_ok=True)
        self.environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        code = "from pennyclip.cli import main; import sys; sys.exit(main())"
        with (self.work / "log.txt").open("ab") as log:
            command = [sys.executable, "-c", code, *arguments]
            return subprocess.Popen(
                command, cwd=self.work, env=self.environment, stdout=log, stderr=log
            )

    def run(self, *arguments: str) -> None:
        if code := self.start(*arguments).wait():
            sys.exit(f"pennyclip {' '.join(arguments)} ended with {code}: {self.work / 'log.txt'}")

    def train(self) -> None:
        """A dataset, a finished run of each recipe, and one that was interrupted."""
        if not (self.work / "data").exists():
            self.run("prepare", str(ROOT / "examples/clipart"), "--out", "data", "--dev-share=0.1")
        for name, recipe in RECIPES.items():
            if not (self.work / name).exists():
                self.run("train", *recipe, "--data", "data", "--out", name)

    def interrupt(self) -> None:
        """A scratch run that SIGTERM stopped before its last update."""
        if (self.work / "interrupted").exists():
            return
        process = self.start("train", *RECIPES["scratch"], "--data", "data", "--out", "interrupted")
        metrics = self.work / "interrupted" / "metrics.jsonl"
        while process.poll() is None and not (
            metrics.exists() and '"kind": "train"' in metrics.read_text().replace('":"', '": "')
        ):
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        process.wait()

    def hashes(self, run: str) -> dict[str, str]:
        """The hash of each file of tensors in the run's checkpoints."""
        folder = self.work / run / "checkpoints"
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.suffix in {".safetensors", ".bin", ".pt"} and path.is_file()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True, help="the older revision")
    parser.add_argument("--keep", type=Path, help="work here, and use again what is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        work = options.keep or Path(scratch)
        source = work / "source"
        if not source.exists():
            source.mkdir(parents=True)
            archive = subprocess.run(
                ["git", "archive", options.against, "src"],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
            subprocess.run(["tar", "x", "-C", source], input=archive.stdout, check=True)
        old, new = Version(source / "src", work / "old"), Version(ROOT / "src", work / "new")
        old.train()
        old.interrupt()
        shutil.rmtree(new.work)
        new.work.mkdir()
        new.train()
        print(f"{processor()}\nagainst {options.against}")
        failed = False
        for name in RECIPES:
            failed |= compare(name, old.hashes(name), new.hashes(name))
        # The newer version takes up the older one's folders, at the place that they name.
        saved = work / "saved"
        shutil.rmtree(saved, ignore_errors=True)
        shutil.copytree(old.work / "interrupted", saved)
        taker = Version(ROOT / "src", old.work)
        try:
            taker.run("train", "--resume", "interrupted")
            failed |= compare(
                "resumed", old.hashes("scratch"), last_checkpoint(taker.hashes("interrupted"))
            )
        finally:
            shutil.rmtree(old.work / "interrupted")
            shutil.move(saved, old.work / "interrupted")
        for name in RECIPES:
            taker.run("report", name)
            for target in ("open_clip", "onnx"):
                out = work / f"{name}-{target}"
                shutil.rmtree(out, ignore_errors=True)
                taker.run("export", name, "--to", target, "--out", str(out))
            print(f"{name}: the old run is reported, and exported to open_clip and onnx")
    sys.exit(failed)


def last_checkpoint(hashes: dict[str, str]) -> dict[str, str]:
    """Only the last checkpoint: an interrupted run has one more on its way."""
    last = max(path.split("/")[0] for path in hashes)
    return {path: value for path, value in hashes.items() if path.startswith(last)}


def compare(name: str, old: dict[str, str], new: dict[str, str]) -> bool:
    """Print what differs, and whether anything does."""
    common = old.keys() & new.keys()
    different = sorted(path for path in common if old[path] != new[path])
    missing = sorted(new.keys() - old.keys())
    same = bool(common) and not different and not missing
    print(f"{name}: {len(common)} files of tensors, " + ("the same" if same else "DIFFERENT"))
    for path in [*different, *missing]:
        print(f"    {path}")
    return not same


if __name__ == "__main__":
    main()
