"""onnxruntime gives the same from uint8 pixels and token ids, at batches it was not made at."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from small_models import (
    CONTEXT,
    EMBED,
    TEXTS,
    assert_same,
    bert,
    checkpoint,
    clip_text,
    embeddings,
    images,
    load_tokenizer,
)

from pennyclip.base.errors import RunError
from pennyclip.commands.export import export, onnx
from pennyclip.config.keys import ImageTower, Model
from pennyclip.data.text import pad, truncate

CASES = {
    "clip": ("vit_femto_patch16_clip_64", "clip"),
    "siglip text": ("vit_femto_patch16_64", "siglip"),
    "siglip text, own tokens": ("vit_femto_patch16_64", "siglip"),
    "convolutional, bert": ("test_efficientnet", "bert"),
}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_gives_the_same(tmp_path: Path, case: str) -> None:
    name, kind = CASES[case]
    text = bert(tmp_path / "bert")
    if kind != "bert":
        own = {"tokenizer": text.name, "vocab_size": 11} if "own tokens" in case else {}
        text = clip_text(family=kind, **own)
    image = ImageTower(name=name, image_size=64)
    config = Model(image=image, text=text, embed_dim=EMBED)  # type: ignore[arg-type]
    path = checkpoint(tmp_path / "run", config)
    done = export(path, "onnx", tmp_path / "out")
    assert {"image.onnx", "text.onnx", "model.json", "README.md"} <= set(done.files)
    about = json.loads((done.path / "model.json").read_text())
    assert (about["image_size"], about["context_length"]) == (64, CONTEXT)

    encoder, image_embeddings, text_embeddings = embeddings(path)
    assert about["logit_scale"] == pytest.approx(encoder.model.logit_scale.item())
    images_in = onnxruntime.InferenceSession(done.path / "image.onnx")
    texts_in = onnxruntime.InferenceSession(done.path / "text.onnx")
    tokenizer = load_tokenizer(config)
    ids = [truncate(tokenizer.encode(text), CONTEXT) for text in TEXTS]  # type: ignore[attr-defined]
    for batch in (1, 3):
        (found,) = images_in.run(None, {"images": images()[:batch].numpy()})
        assert_same(image_embeddings[:batch], torch.from_numpy(found), within=1e-4)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        tokens, lengths = pad(ids[:batch], limit=CONTEXT)
        (found,) = texts_in.run(None, {"tokens": tokens, "lengths": lengths})
        assert_same(text_embeddings[:batch], torch.from_numpy(found), within=1e-4)


def test_a_graph_that_differs_is_not_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ImageTower(name="vit_femto_patch16_64", image_size=64)
    path = checkpoint(tmp_path / "run", Model(image=image, text=clip_text(), embed_dim=EMBED))
    monkeypatch.setattr(onnx, "TOLERANCE", -1.0)
    with pytest.raises(RunError, match=r"image\.onnx gives other embeddings.*batch 1"):
        export(path, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
