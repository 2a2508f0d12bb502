"""The command line: help, refusals and answers for programs."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pennyclip.cli import main
from pennyclip.commands.options import recipe_usage
from pennyclip.config.file import load_recipe, recipe_names


@pytest.mark.parametrize(
    "argv",
    [
        ["search", "run", "--json"],
        ["list", "--json"],
        ["train", "scratch-vit-tiny", "--out", "x", "--no-such", "3", "--json"],
    ],
)
def test_a_refused_argument_answers_as_json(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert "error" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["prepar", "x.csv"], "no command 'prepar'. Did you mean 'prepare'?"),
        (["eval", "zeroshott"], "no command 'eval zeroshott'. Did you mean 'eval zeroshot'?"),
        (["train", "--resume", "run", "--optim.lr", "1e-5"], "train RUN/config.toml --init RUN"),
        (["list", "losses", "lit"], "only recipes can be printed"),
        (["list", "recipes", "lot"], "Did you mean 'lit'?"),
    ],
)
def test_a_mistaken_request_is_told_what_was_meant(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_train_says_how_to_begin_and_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["train", "--help"], ["train", "lit", "--help"]):
        with pytest.raises(SystemExit) as exit_:
            main(argv)
        assert exit_.value.code == 0
        told = capsys.readouterr().out
        assert "--resume" in told
        assert "--cooldown" in told
    assert all(name in recipe_usage("train") for name in recipe_names())


def test_a_recipe_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "recipes", "lit"]) == 0
    (tmp_path / "mine.toml").write_text(capsys.readouterr().out)
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("lit")


@pytest.mark.parametrize("argv", [["train", "--help"], ["eval", "--help"]])
def test_every_command_has_help(argv: list[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["list", "towers"],  # more than a pipe holds
        ["list", "losses"],  # less: it is written when Python ends
        ["list", "losses", "--json"],
        ["train", "lit", "--help"],
    ],
)
def test_a_reader_that_has_gone_ends_it_quietly(argv: list[str]) -> None:
    command = [sys.executable, "-m", "pennyclip.cli", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
    assert (process.returncode, told) == (128 + signal.SIGPIPE, b"")
