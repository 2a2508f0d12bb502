"""The console: plain lines where nobody watches, one bar on a terminal, all on standard error."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from pennyclip.training.telemetry.console import Console, describe

RECORD = {
    "loss": 2.0794,
    "logit_scale": 2.6593,
    "lr": {"image.0": 5e-6, "image.1.no_decay": 1e-5, "heads": 1e-3},
    "samples_per_second": 1234.4,
    "input_wait": 0.042,
}


def test_describe() -> None:
    assert describe(RECORD) == [
        "1,234 samples/s",
        "loss 2.079",
        "temperature 0.0700",  # CLIP's starting value, exp(-2.6593)
        "lr image 1.0e-05 heads 1.0e-03",
        "input wait 4%",
    ]
    assert describe({"loss": "nan", "lr": {"image": 1e-3, "heads": 1e-3}}) == [
        "loss nan",
        "lr 1.0e-03",
    ]


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    """As in: pennyclip train ... 2>&1 | head -1"""
    run = (
        "import sys; from pennyclip.training.telemetry.console import Console; "
        "console = Console(2); "
        "console.say('first'); sys.stdin.readline(); console.say('second'); "
        "console.say('third'); console.close(); print('done')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", run],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "first\n"
    process.stderr.close()
    process.stderr = None
    out, _ = process.communicate("go on\n")
    assert (process.returncode, out) == (0, "done\n")


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(total_steps=200, start_step=50, quiet=False)
    console.update(50, {"loss": 3.0})
    now[0] = 130.0
    console.update(60, RECORD)
    console.say("saved [bold]step_000060[/bold]")
    console.close()
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert first == "step 50/200 (25%), ETA ?, loss 3.000"
    # 10 steps took 30 s, so the other 140 take 420 s.
    assert second.startswith("step 60/200 (30%), ETA 0:07:00, 1,234 samples/s, loss 2.079")
    assert third == "saved [bold]step_000060[/bold]"


def test_slow_updates_are_told_before_a_record_is_due(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of a start, and then one where nothing was said for a minute."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(total_steps=62)
    for step, now[0] in enumerate((17.0, 34.0, 51.0, 80.0), start=1):
        console.update(step)
    console.say("saved")
    for step, now[0] in enumerate((100.0, 139.0, 140.0, 160.0), start=5):
        console.update(step, {"loss": 3.0} if step == 8 else None)
    assert capsys.readouterr().err.splitlines() == [
        "step 1/62 (2%), ETA 0:17:17",  # 61 times 17 s
        "step 4/62 (6%), ETA 0:19:20",  # 58 times 20 s
        "saved",
        "step 7/62 (11%), ETA 0:18:20",  # 55 times 20 s
        "step 8/62 (13%), ETA 0:18:00, loss 3.000",
    ]


def test_the_time_left_is_that_of_a_stage_whose_rate_is_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1: 10 updates in 3 s, 12 left. Stage 2: 8 in 12 s, 104 left, at 1.5 s each."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(total_steps=134)
    console.enter_stage(0, (22, 134))
    now[0] = 3.0
    console.update(10, {})
    console.update(22)
    now[0] = 20.0
    console.enter_stage(1, (22, 134))
    now[0] = 32.0
    console.update(30, {})
    first, second = capsys.readouterr().err.splitlines()
    assert first == "step 10/134 (7%), ETA 0:00:04 of stage 1 of 2, later ones unknown"
    assert second == "step 30/134 (22%), ETA 0:02:36"


def test_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Console(total_steps=200)
    for done, now[0] in ((10, 1.0), (20, 11.0), (30, 12.0), (4000, 13.0)):
        console.progress("image features", done, 4000)
    assert capsys.readouterr().err == "image features 20/4,000\nimage features 4,000/4,000\n"


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(total_steps=2, start_step=0, quiet=True)
    console.update(1, RECORD)
    console.say("saved")
    console.progress("image features", 2, 2)
    console.close()
    assert capsys.readouterr() == ("", "")


def test_a_bar_on_a_terminal() -> None:
    code = (
        "from pennyclip.training.telemetry.console import Console\n"
        "console = Console(200, 50, False)\n"
        "console.update(100, {'loss': 1.25, 'input_wait': 0.5})\n"
        "console.update(101)\n"
        "console.say('saved [x]')\n"
        "console.close(); console.close()\n"
    )
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=os.environ | {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
        check=True,
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    text = shown.decode()
    assert done.stdout == b""
    assert "101/200" in text
    assert "loss 1.250, input wait 50%" in text
    assert "saved [x]" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
