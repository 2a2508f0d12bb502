"""Options of recipes: what is set by them, and what is said of those that don't exist."""

import pytest

from pennyclip.cli import main, parse
from pennyclip.config.keys import ModulePrecision, PatternRates, Stage

TRAIN = ["train", "scratch-vit-tiny", "--data", "d", "--out", "o"]


def test_lists_of_tables_are_given_as_in_a_recipe() -> None:
    command = parse(
        [
            *TRAIN,
            "--optim.patterns",
            '[{match = "text.*", lr = 1e-5}, {match = "*.bias", betas = [0.9, 0.99]}]',
            '--precision-of=[{modules = "visual.head", precision = "fp32"}]',
            "--optim.patterns.0.lr",
            "3e-5",
            "--no-compile",
            "--stages",
            "[{epochs = 1.5, image_layers = 'none'}, {samples = 900}]",
            "--stages.1.lr-factor",
            "0.5",
        ]
    )
    assert command.config.optim.patterns == (
        PatternRates(match="text.*", lr=3e-5),
        PatternRates(match="*.bias", betas=(0.9, 0.99)),
    )
    own = ModulePrecision(modules="visual.head", precision="fp32")
    assert command.config.precision_of == (own,)
    assert command.config.stages == (
        Stage(epochs=1.5, image_layers="none"),
        Stage(samples=900, lr_factor=0.5),
    )
    assert command.config.data == "d"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--optim.learning_rate", "3"], "unknown key 'learning_rate'. Did you mean '--optim.lr'?"),
        (["--lr", "1e-4"], "no option --lr: unknown key 'lr'. Did you mean '--optim.lr'?"),
        (["--epochs", "3"], "Did you mean '--stages.0.epochs'?"),
        (["--optim.warmup-step=3"], "Did you mean 'warmup_steps'?"),
        (["--batch_sise", "3"], "no option --batch_sise: unknown key 'batch_sise'. Did you mean"),
        (["--stages.4.epochs", "3"], "unknown key '4'. Known keys: 0."),
        (["--no-seed"], "unknown key 'no_seed'"),
        (["--optim.lr.peak", "3"], "unknown key 'peak'. Known keys: none."),
        (["--optim.patterns", "text.*"], "a list of tables as TOML, such as '[{match = ...}]'"),
        (["--optim.patterns"], "with the keys match, lr, weight_decay, betas; found ''"),
        (["--optim.patterns", '[{matc = "x"}]'], "unknown key 'matc'. Did you mean 'match'?"),
        (["--precision", "bfloat16"], "found 'bfloat16'. Did you mean 'bf16'?"),
        (
            ["--optim.schedule=cosin"],
            "one of cosine, linear, constant, wsd; found 'cosin'. Did",
        ),
        (["--precision_of", "3"], "--precision_of: precision_of: expected"),
    ],
)
def test_mistaken_options_are_named(
    option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, *option]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--continue"],
        ["--no-json"],
        ["--checkpoint.every_minutes", "3"],
        ["--model.image.no-head-bias"],
        ["--model.text.activation", "gelu"],
        ["--weights", "2", "0.5"],
        ["--optim.betas", "0.9", "0.95", "--seed", "-1"],
    ],
)
def test_options_that_exist_are_taken(options: list[str]) -> None:
    assert parse([*TRAIN, *options]).config.subset == "train"
