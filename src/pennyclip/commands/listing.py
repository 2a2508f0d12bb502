"""What a recipe can name, with a line about each."""

from pennyclip.base.errors import RequestError
from pennyclip.config.file import RECIPES, load_recipe, recipe_names


def listing(what: str) -> dict[str, str]:
    """Names of `recipes`, `towers`, `losses`, `optimizers` or `presets`, with a line about each."""
    if what == "recipes":
        return {name: _first_comment(name) for name in recipe_names()}
    if what == "towers":
        import timm

        return dict.fromkeys(timm.list_models(), "")
    if what == "losses":
        from pennyclip.loss import LOSSES

        return {name: _first_line(loss.compute.__doc__) for name, loss in LOSSES.items()}
    if what == "optimizers":
        from pennyclip.optim import OPTIMIZERS

        return {name: _first_line(make.__doc__) for name, make in OPTIMIZERS.items()}
    if what == "presets":
        from pennyclip.config.presets import PRESETS

        return {name: str(preset) for name, preset in PRESETS.items()}
    raise RequestError(f"list '{what}': expected recipes, towers, losses, optimizers or presets")


def recipe_text(what: str, name: str) -> str:
    """A recipe as its file has it: a copy, changed, is a recipe of one's own."""
    if what != "recipes":
        raise RequestError(f"list {what} {name}: only recipes can be printed. Leave {name} out.")
    load_recipe(name)  # or say which there are
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


def _first_comment(recipe: str) -> str:
    lines = (RECIPES / f"{recipe}.toml").read_text(encoding="utf-8").split("\n")
    opening = [line.removeprefix("#").strip() for line in lines[: lines.index("#")]]
    return " ".join(opening)


def _first_line(text: str | None) -> str:
    return (text or "").strip().split("\n", 1)[0]
