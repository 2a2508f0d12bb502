"""Key maps backwards: our parameters under the names of another library.

The tables that read a layout (`weights/layouts.py`) also write it: what is imported and what is
exported cannot drift apart.
"""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from pennyclip.weights.layouts import ALL, Rule

GROUP = re.compile(r"\([^()]+\)")


def renamed(state: Mapping[str, Tensor], rules: Sequence[Rule]) -> dict[str, Tensor]:
    """The tensors under the keys that these rules read.

    Args:
        state: parameters under our names; all of them must have a rule.
        rules: of a layout. Rules that copy a part of a file's tensor (`take`) are left out: no
            export writes such tensors.

    Raises:
        KeyError: a parameter that no rule leads to.
    """
    backwards = [(*_reversed(rule), rule) for rule in rules if rule.to and rule.take == ALL]
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        keys: dict[str, Tensor] = {}
        for pattern, template, rule in backwards:
            if match := pattern.fullmatch(name):
                start, stop, of = rule.put
                rows = value.shape[0] // of if value.ndim else 0
                part = value[start * rows : stop * rows] if of > 1 else value
                keys[match.expand(template)] = part.T if rule.transpose else part
        if not keys:
            raise KeyError(name)
        result |= {key: part.contiguous() for key, part in keys.items()}
    return result


def _reversed(rule: Rule) -> tuple[re.Pattern[str], str]:
    """A pattern for our name, and the template of the file's key."""
    assert rule.to is not None
    groups = GROUP.findall(rule.pattern)
    pattern = re.escape(rule.to)
    template = rule.pattern
    for number, group in enumerate(groups, start=1):
        pattern = pattern.replace(rf"\\{number}", f"(?P<g{number}>{group[1:-1]})", 1)
        template = template.replace(group, rf"\g<g{number}>", 1)
    return re.compile(pattern), re.sub(r"\\([.])", r"\1", template)


def without_batch(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """timm's class token and positions [1, ..., W] as CLIP's own: [W] and [N, W]."""
    batched = ("visual.trunk.cls_token", "visual.trunk.pos_embed")
    return {
        name: value[0].squeeze(0) if name in batched else value for name, value in state.items()
    }
