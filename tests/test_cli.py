"""The command line: help, refusals and answers for programs."""

import json

import pytest

from pennyclip.cli import main


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


@pytest.mark.parametrize("argv", [["train", "--help"], ["eval", "--help"]])
def test_every_command_has_help(argv: list[str]) -> None:
    try:
        code = main(argv)
    except SystemExit as exit_:
        code = exit_.code
    assert code == 0
