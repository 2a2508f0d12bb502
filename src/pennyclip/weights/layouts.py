"""Key maps: how the keys of each kind of weights file become the names of our parameters.

A layout is a table. The first rule whose pattern matches a whole key decides; rules with that same
pattern that follow it apply too (one tensor of the file for several of ours).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Tower = Literal["image", "text"]
Rows = tuple[int, int, int]
"""(start, stop, of): of a tensor's rows cut into `of` equal parts, those from start to stop."""
ALL: Rows = (0, 1, 1)


@dataclass(frozen=True)
class Rule:
    """What becomes of the keys that match `pattern` wholly."""

    pattern: str
    to: str | None = None
    """Name in our model; None: the tensor is not copied, for `reason`."""
    reason: str = ""
    derived: bool = False
    """Not copied because the model computes it anew."""
    refused: bool = False
    """Not copied because no tower here has such a part: the file does not fit."""
    transpose: bool = False
    take: Rows = ALL
    """Which rows of the file's tensor are copied,"""
    put: Rows = ALL
    """and into which rows of ours: separate q, k and v into one matrix."""
    where: str = ""
    """The rule applies only to models that have this parameter."""


@dataclass(frozen=True)
class Layout:
    """One way to name the parts of one tower."""

    name: str
    tower: Tower
    marker: str
    """A file is of this layout when one of its keys matches this pattern."""
    scope: str
    """The keys that belong to this tower match this pattern; others are the other tower's."""
    rules: tuple[Rule, ...]


MASK_TOKEN = "stands for masked patches in pretraining"
LM_HEAD = "predicts masked patches in pretraining"
SIZE = "a size of the model, kept as a tensor"
RECOMPUTED = "recomputed by the model"
TEMPERATURE = re.compile(r"logit_(scale|bias)")


def _block(pattern: str, to: str, **more: object) -> tuple[Rule, Rule]:
    """Rules for a layer's weight and bias. `N` stands for the number of a block."""
    pattern = re.escape(pattern).replace("N", r"(\d+)")
    to = to.replace("N", r"\1")
    return (
        replace(Rule(rf"{pattern}\.weight", f"{to}.weight"), **more),  # type: ignore[arg-type]
        replace(Rule(rf"{pattern}\.bias", f"{to}.bias"), **more),  # type: ignore[arg-type]
    )


def _table(*rows: Rule | Iterable[Rule]) -> tuple[Rule, ...]:
    return tuple(r for row in rows for r in ((row,) if isinstance(row, Rule) else row))


def _fused(source: str, to: str) -> tuple[Rule, ...]:
    """Rules for transformers' separate q, k and v, which become one projection."""
    return _table(
        *(
            _block(f"{source}.{part}_proj", to, put=(i, i + 1, 3))
            for i, part in enumerate(("q", "k", "v"))
        )
    )


def _in_proj(source: str, to: str) -> tuple[Rule, Rule]:
    """torch's MultiheadAttention fuses q, k and v as timm does, under other names."""
    pattern, to = re.escape(source).replace("N", r"(\d+)"), to.replace("N", r"\1")
    return (
        Rule(rf"{pattern}\.in_proj_weight", f"{to}.weight"),
        Rule(rf"{pattern}\.in_proj_bias", f"{to}.bias"),
    )


TRUNK = "visual.trunk"
BLOCK = f"{TRUNK}.blocks.N"
TEXT_BLOCK = "text.transformer.resblocks.N"

# OpenAI's ViTs and open_clip's own: Radford et al. 2021; github.com/openai/CLIP, clip/model.py.
NATIVE_IMAGE = _table(
    Rule(r"visual\.class_embedding", f"{TRUNK}.cls_token"),
    Rule(r"visual\.positional_embedding", f"{TRUNK}.pos_embed"),
    Rule(r"visual\.proj", "visual.head.proj.weight", transpose=True),
    _block("visual.conv1", f"{TRUNK}.patch_embed.proj"),
    _block("visual.ln_pre", f"{TRUNK}.norm_pre"),
    _block("visual.ln_post", f"{TRUNK}.norm"),
    _block("visual.transformer.resblocks.N.ln_1", f"{BLOCK}.norm1"),
    _block("visual.transformer.resblocks.N.ln_2", f"{BLOCK}.norm2"),
    _in_proj("visual.transformer.resblocks.N.attn", f"{BLOCK}.attn.qkv"),
    _block("visual.transformer.resblocks.N.attn.out_proj", f"{BLOCK}.attn.proj"),
    _block("visual.transformer.resblocks.N.mlp.c_fc", f"{BLOCK}.mlp.fc1"),
    _block("visual.transformer.resblocks.N.mlp.c_proj", f"{BLOCK}.mlp.fc2"),
)
RESNET = Rule(
    r"visual\..+",
    reason="of CLIP's ResNet under OpenAI's names, which no table here maps. timm has the same "
    "weights under its own: hub:timm/resnet50_clip.openai, and likewise for its other sizes",
    refused=True,
)
NATIVE_TEXT_SCOPE = (
    r"(token_embedding|transformer\.resblocks|ln_final|text_projection)(\..+)?"
    r"|positional_embedding|attn_mask|input_resolution|context_length|vocab_size"
)
NATIVE_TEXT = _table(
    Rule(r"attn_mask", reason=RECOMPUTED, derived=True),
    Rule(r"input_resolution|context_length|vocab_size", reason=SIZE),
    Rule(r"(.+)", r"text.\1"),
)

# open_clip's CustomTextCLIP, and pennyclip's own checkpoints.
TWO_TOWER_IMAGE = _table(
    _block("visual.trunk.head", "visual.head.proj"),  # a trunk's own head; ours stands outside
    Rule(r"visual\.trunk\.rope\..+", reason=RECOMPUTED, derived=True),
    Rule(r"(visual\..+)", r"\1"),
)
TWO_TOWER_TEXT = _table(
    Rule(r"text\.attn_mask", reason=RECOMPUTED, derived=True),
    Rule(r"text\.(.+\.)?position_ids", reason=RECOMPUTED, derived=True),
    Rule(r"(text\..+)", r"\1"),
)

# transformers' CLIPModel and SiglipModel.
HF_VISION = r"vision_model.encoder.layers.N"
HF_TEXT = r"text_model.encoder.layers.N"
POOL = f"{TRUNK}.attn_pool"
TRANSFORMERS_IMAGE = _table(
    Rule(r"vision_model\.embeddings\.position_ids", reason=RECOMPUTED, derived=True),
    Rule(r"vision_model\.embeddings\.class_embedding", f"{TRUNK}.cls_token"),
    Rule(r"vision_model\.embeddings\.position_embedding\.weight", f"{TRUNK}.pos_embed"),
    Rule(r"visual_projection\.weight", "visual.head.proj.weight"),
    _block("vision_model.embeddings.patch_embedding", f"{TRUNK}.patch_embed.proj"),
    _block("vision_model.pre_layrnorm", f"{TRUNK}.norm_pre"),  # spelt so
    _block("vision_model.post_layernorm", f"{TRUNK}.norm"),
    _block(f"{HF_VISION}.layer_norm1", f"{BLOCK}.norm1"),
    _block(f"{HF_VISION}.layer_norm2", f"{BLOCK}.norm2"),
    _fused(f"{HF_VISION}.self_attn", f"{BLOCK}.attn.qkv"),
    _block(f"{HF_VISION}.self_attn.out_proj", f"{BLOCK}.attn.proj"),
    _block(f"{HF_VISION}.mlp.fc1", f"{BLOCK}.mlp.fc1"),
    _block(f"{HF_VISION}.mlp.fc2", f"{BLOCK}.mlp.fc2"),
    # SigLIP pools by attention: one query, keys and values fused in timm, all three in torch.
    Rule(r"vision_model\.head\.probe", f"{POOL}.latent"),
    *(
        Rule(rf"vision_model\.head\.attention\.in_proj_{part}", f"{POOL}.{to}.{part}", take=rows)
        for part in ("weight", "bias")
        for to, rows in (("q", (0, 1, 3)), ("kv", (1, 3, 3)))
    ),
    _block("vision_model.head.attention.out_proj", f"{POOL}.proj"),
    _block("vision_model.head.layernorm", f"{POOL}.norm"),
    _block("vision_model.head.mlp.fc1", f"{POOL}.mlp.fc1"),
    _block("vision_model.head.mlp.fc2", f"{POOL}.mlp.fc2"),
)
TRANSFORMERS_TEXT = _table(
    Rule(r"text_model\.embeddings\.position_ids", reason=RECOMPUTED, derived=True),
    Rule(r"text_model\.embeddings\.token_embedding\.weight", "text.token_embedding.weight"),
    Rule(r"text_model\.embeddings\.position_embedding\.weight", "text.positional_embedding"),
    Rule(r"text_projection\.weight", "text.text_projection", transpose=True),
    _block("text_model.head", "text.text_projection"),  # SigLIP's
    _block("text_model.final_layer_norm", "text.ln_final"),
    _block(f"{HF_TEXT}.layer_norm1", f"{TEXT_BLOCK}.ln_1"),
    _block(f"{HF_TEXT}.layer_norm2", f"{TEXT_BLOCK}.ln_2"),
    *(
        Rule(rule.pattern, str(rule.to).replace(".in_proj.", ".in_proj_"), put=rule.put)
        for rule in _fused(f"{HF_TEXT}.self_attn", f"{TEXT_BLOCK}.attn.in_proj")
    ),
    _block(f"{HF_TEXT}.self_attn.out_proj", f"{TEXT_BLOCK}.attn.out_proj"),
    _block(f"{HF_TEXT}.mlp.fc1", f"{TEXT_BLOCK}.mlp.c_fc"),
    _block(f"{HF_TEXT}.mlp.fc2", f"{TEXT_BLOCK}.mlp.c_proj"),
)
# transformers' VisionTextDualEncoderModel: a ViT (Dosovitskiy et al. 2021), a BERT or a RoBERTa.
# Their poolers are folded into the projections beforehand, where that is exact (dual_encoder.py).
VIT_IMAGE = _table(
    Rule(r"vision_model\.embeddings\.cls_token", f"{TRUNK}.cls_token"),
    Rule(r"vision_model\.embeddings\.position_embeddings", f"{TRUNK}.pos_embed"),
    Rule(r"visual_projection\.weight", "visual.head.proj.weight"),
    _block("vision_model.embeddings.patch_embeddings.projection", f"{TRUNK}.patch_embed.proj"),
    _block("vision_model.encoder.layer.N.layernorm_before", f"{BLOCK}.norm1"),
    _block("vision_model.encoder.layer.N.layernorm_after", f"{BLOCK}.norm2"),
    *(
        _block(
            f"vision_model.encoder.layer.N.attention.attention.{part}",
            f"{BLOCK}.attn.qkv",
            put=(i, i + 1, 3),
        )
        for i, part in enumerate(("query", "key", "value"))
    ),
    _block("vision_model.encoder.layer.N.attention.output.dense", f"{BLOCK}.attn.proj"),
    _block("vision_model.encoder.layer.N.intermediate.dense", f"{BLOCK}.mlp.fc1"),
    _block("vision_model.encoder.layer.N.output.dense", f"{BLOCK}.mlp.fc2"),
    _block("vision_model.layernorm", f"{TRUNK}.norm"),
)
BERT_TEXT = _table(
    Rule(r"text_model\.(.+\.)?position_ids", reason=RECOMPUTED, derived=True),
    Rule(r"text_model\.(.+)", r"text.transformer.\1"),
    Rule(r"text_projection\.weight", "text.proj.weight"),
)


def _encoder_rules(prefix: str) -> tuple[Rule, ...]:
    """timm's and EVA's own names (github.com/baaivision/EVA): they differ inside the blocks."""
    block = rf"{prefix}blocks\.(\d+)"
    return _table(
        Rule(rf"{prefix}mask_token", reason=MASK_TOKEN),
        Rule(rf"{prefix}lm_head\..+", reason=LM_HEAD),
        Rule(
            rf"{prefix}(.+\.)?rope\.(freqs_cos|freqs_sin|bands|pos_embed)",
            reason="RoPE table, recomputed for the tower's grid",
            derived=True,
        ),
        Rule(rf"{prefix}(.+\.)?relative_position_index", reason=RECOMPUTED, derived=True),
        Rule(
            rf"{block}\.attn\.([qv])_bias",
            rf"{TRUNK}.blocks.\1.attn.\2_proj.bias",
            where=f"{TRUNK}.blocks.0.attn.q_proj.weight",
        ),
        Rule(rf"{block}\.attn\.inner_attn_ln\.(\w+)", rf"{TRUNK}.blocks.\1.attn.norm.\2"),
        Rule(rf"{block}\.mlp\.ffn_ln\.(\w+)", rf"{TRUNK}.blocks.\1.mlp.norm.\2"),
        Rule(rf"{block}\.mlp\.w12\.(\w+)", rf"{TRUNK}.blocks.\1.mlp.fc1.\2"),
        Rule(rf"{block}\.mlp\.w1\.(\w+)", rf"{TRUNK}.blocks.\1.mlp.fc1_g.\2"),
        Rule(rf"{block}\.mlp\.w2\.(\w+)", rf"{TRUNK}.blocks.\1.mlp.fc1_x.\2"),
        Rule(rf"{block}\.mlp\.w3\.(\w+)", rf"{TRUNK}.blocks.\1.mlp.fc2.\2"),
        # A tower that pools the mean norms it once, after pooling: timm's start for it.
        Rule(rf"{prefix}norm\.(\w+)", rf"{TRUNK}.fc_norm.\1", where=f"{TRUNK}.fc_norm.weight"),
        # timm's CLIP ResNets: the last layer of their attention pooling.
        Rule(rf"{prefix}head\.(?:proj\.)?(weight|bias)", r"visual.head.proj.\1"),
        Rule(rf"{prefix}(.+)", rf"{TRUNK}.\1"),
    )


# A transformers encoder saved with a task's head keeps the encoder under its own name.
ENCODERS = r"(?:bert|roberta|distilbert|electra|mpnet|deberta|model)\."
PLAIN_TEXT = _table(
    Rule(r"(.+\.)?position_ids", reason=RECOMPUTED, derived=True),
    Rule(rf"(?:{ENCODERS})?pooler\..+", reason="a pooling layer that CLIP does not use"),
    Rule(r"(cls|lm_head)\..+", reason="predicts words in pretraining"),
    Rule(rf"(?:{ENCODERS})?(.+\.LayerNorm)\.gamma", r"text.transformer.\1.weight"),
    Rule(rf"(?:{ENCODERS})?(.+\.LayerNorm)\.beta", r"text.transformer.\1.bias"),
    Rule(rf"(?:{ENCODERS})?(.+)", r"text.transformer.\1"),
)

EVA_KEY = r"blocks\.0\.(attn\.(q_bias|q_proj\.weight|inner_attn_ln\.weight)|mlp\.w12?\.weight)"
HF_IMAGE_SCOPE, HF_TEXT_SCOPE = r"(vision_model|visual_projection)\..+", r"text_\w+\..+"

# In this order: the first whose marker is in the file. The last of each tower fits everything.
LAYOUTS = (
    Layout("CLIP ResNet (OpenAI)", "image", r"visual\.layer1\..+", r"visual\..+", (RESNET,)),
    Layout(
        "CLIP (OpenAI, open_clip)", "image", r"visual\.conv1\.weight", r"visual\..+", NATIVE_IMAGE
    ),
    Layout("two towers (open_clip)", "image", r"visual\.trunk\..+", r"visual\..+", TWO_TOWER_IMAGE),
    Layout("EVA-CLIP", "image", rf"visual\.{EVA_KEY}", r"visual\..+", _encoder_rules(r"visual\.")),
    Layout(
        "transformers dual encoder",
        "image",
        r"vision_model\.encoder\.layer\..+",
        HF_IMAGE_SCOPE,
        VIT_IMAGE,
    ),
    Layout("transformers", "image", r"vision_model\..+", HF_IMAGE_SCOPE, TRANSFORMERS_IMAGE),
    Layout("EVA", "image", EVA_KEY, r".+", _encoder_rules("")),
    Layout("plain encoder", "image", r".+", r".+", _encoder_rules("")),
    Layout(
        "CLIP (OpenAI, open_clip)", "text", r"positional_embedding", NATIVE_TEXT_SCOPE, NATIVE_TEXT
    ),
    Layout("two towers (open_clip)", "text", r"text\..+", r"text\..+", TWO_TOWER_TEXT),
    Layout(
        "transformers dual encoder",
        "text",
        r"text_model\.encoder\.layer\..+",
        HF_TEXT_SCOPE,
        BERT_TEXT,
    ),
    Layout("transformers", "text", r"text_model\..+", HF_TEXT_SCOPE, TRANSFORMERS_TEXT),
    Layout("plain encoder", "text", r".+", r".+", PLAIN_TEXT),
)


def recognise(keys: Iterable[str], tower: Tower) -> Layout:
    """The layout of a file's tower, told by its keys."""
    keys = list(keys)
    return next(
        layout
        for layout in LAYOUTS
        if layout.tower == tower and any(re.fullmatch(layout.marker, key) for key in keys)
    )


def matching(key: str, rules: tuple[Rule, ...], names: Iterable[str]) -> list[tuple[Rule, str]]:
    """The rules that apply to a key, each with the name that it leads to."""
    first: Rule | None = None
    found = []
    for rule in rules:
        if first is not None and rule.pattern != first.pattern:
            continue
        if match := re.fullmatch(rule.pattern, key):
            if rule.where and rule.where not in names:
                continue
            first = first or rule
            found.append((rule, match.expand(rule.to) if rule.to else ""))
    return found
