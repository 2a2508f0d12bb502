"""Models of every image layout, exported and read back: the same embeddings."""

from dataclasses import replace
from pathlib import Path

import onnxruntime
import open_clip
import pytest
import torch
from tiny_towers import assert_same, config, eva_file, images, native, pixels

from pennyclip.base.errors import RequestError
from pennyclip.commands.export import export
from pennyclip.config.keys import ClipText, Model
from pennyclip.model.clip import CLIP
from pennyclip.weights.build import build
from pennyclip.weights.checkpoint import write_model

LAYOUTS = {  # tower, kind of file
    "OpenAI": ("vit_pico_patch16_clip_64", "openai"),
    "EVA-01": ("eva_pico_patch16_64", "mim"),
    "EVA-01-CLIP": ("eva_pico_patch16_clip_64", "clip"),
    "EVA-02 Ti, S": ("eva02_pico_fused_64", "mim"),
    "EVA-02 B, L": ("eva02_pico_split_64", "mim"),
    "EVA02-CLIP": ("eva02_pico_clip_64", "clip"),
    "EVA02-CLIP-E": ("eva_pico_postnorm_clip_64", "clip"),
}
TEXT = ClipText(width=64, layers=1, heads=1, context_length=12)


def loaded(folder: Path, layout: str) -> tuple[CLIP, Model, Path]:
    """A model whose image tower comes from a file of this layout, as a checkpoint."""
    name, kind = LAYOUTS[layout]
    file = folder / "weights.pt"
    if kind == "openai":
        torch.save(native(quick_gelu=False).state_dict(), file)
    else:
        eva_file(file, name, kind=kind)
    asked = config(file, name, both=False, pool="token", head_bias=kind == "clip")
    model, _ = build(replace(asked, text=TEXT), seed=0)
    (path := folder / "checkpoint").mkdir()
    write_model(path, model, None, {"step": 1, "score": None, "dataset": ""})
    return model.eval(), model.config, path


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_open_clip_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    model, described, path = loaded(tmp_path, layout)
    done = export(path, "open_clip", tmp_path / "out")
    expected = model.visual(images())
    monkeypatch.chdir(done.path)
    peer = open_clip.create_model("local-dir:.").eval()
    assert_same(expected, peer.encode_image(pixels()))
    towers = {
        part: replace(getattr(described, part), weights=str(done.path))
        for part in ("image", "text")
    }
    back, matches = build(replace(described, **towers), seed=9)
    assert all(match.share == 1.0 and not match.new for match in matches)
    assert_same(back.eval().visual(images()), expected)
    tokens = open_clip.tokenize(["a photo of a cat", "!"], context_length=12)
    assert_same(back.text(tokens, torch.tensor([7, 3])), peer.encode_text(tokens))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "OpenAI"])
def test_transformers_has_no_eva(tmp_path: Path, layout: str) -> None:
    _, _, path = loaded(tmp_path, layout)
    with pytest.raises(RequestError, match=r"no model like this one: 'eva.* is not a plain ViT"):
        export(path, "hf", tmp_path / "out")


def test_eva_with_rotary_positions_as_onnx(tmp_path: Path) -> None:
    model, _, path = loaded(tmp_path, "EVA02-CLIP")
    done = export(path, "onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(done.path / "image.onnx")
    with torch.no_grad():
        expected = torch.nn.functional.normalize(model.visual(images()))
    for batch in (1, 3):
        (found,) = session.run(None, {"images": images()[:batch].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected[:batch], atol=1e-4, rtol=0)
