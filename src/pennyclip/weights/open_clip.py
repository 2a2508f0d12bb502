"""Our models in open_clip's terms: the configuration that its `local-dir:` reads."""

from typing import Any

from pennyclip.config import ClipText
from pennyclip.model.clip import CLIP
from pennyclip.model.text_clip import NORM_EPS

POOLERS = {"mean": "mean_pooler", "cls": "cls_last_hidden_state_pooler"}
SIGLIP_TEXT = {
    "no_causal_mask": True,
    "proj_bias": True,
    "pool_type": "last",
    "norm_kwargs": {"eps": NORM_EPS["siglip"]},
}


def open_clip_config(model: CLIP) -> dict[str, Any]:
    """What open_clip needs to build the same model and feed it the same pixels.

    open_clip cannot be told an image activation other than that of timm's model of this name.
    A transformers text tower is named ".", which open_clip resolves in the working folder: it
    loads where the working folder is the checkpoint.
    """
    config = model.config
    text: dict[str, Any]
    # Without a head of its own, open_clip passes the pooling on as it is, empty too.
    pool = config.image.pool or ""
    if config.image.head == "none":
        pool = pool or getattr(model.visual.trunk, "global_pool", "")
    if isinstance(config.text, ClipText):
        text = {
            "context_length": config.text.context_length,
            "vocab_size": config.text.vocab_size,
            "width": config.text.width,
            "heads": config.text.heads,
            "layers": config.text.layers,
        }
        if config.text.activation == "gelu_tanh":
            text["act_kwargs"] = {"approximate": "tanh"}
        if config.text.family == "siglip":
            text |= SIGLIP_TEXT
    else:
        text = {
            "hf_model_name": ".",
            "hf_tokenizer_name": ".",
            "hf_proj_type": config.text.head,
            "hf_pooler_type": POOLERS[config.text.pool],
            "hf_model_pretrained": False,
            "context_length": config.text.context_length,
        }
    bias = {"init_logit_bias": 0.0} if config.logit_bias else {}  # makes it own one
    return {
        "model_cfg": {
            "embed_dim": config.embed_dim,
            "quick_gelu": isinstance(config.text, ClipText)
            and config.text.activation == "quick_gelu",
            "vision_cfg": {
                "timm_model_name": config.image.name,
                "timm_model_pretrained": False,
                "timm_pool": pool,
                "timm_proj": config.image.head,
                "timm_proj_bias": config.image.head_bias,
                "image_size": config.image.image_size,
            },
            "text_cfg": text,
            "custom_text": True,
            **bias,
        },
        "preprocess_cfg": {
            "mean": [round(v / 255, 8) for v in model.visual.mean.flatten().tolist()],
            "std": [round(v / 255, 8) for v in model.visual.std.flatten().tolist()],
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }
