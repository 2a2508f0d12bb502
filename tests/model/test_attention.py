"""On the CPU under bfloat16 autocast, attention computes in float32."""

import torch
import torch.nn.functional as F

from pennyclip.config.keys import ImageTower as ImageConfig
from pennyclip.model.attention import attention_context
from pennyclip.model.image import ImageTower


def qkv(dtype):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 7, 8)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def test_it_equals_float32_attention_rounded_at_the_end():
    narrow = qkv(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), attention_context(narrow[0], torch.float32):
        out = F.scaled_dot_product_attention(*narrow, is_causal=True)
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()

    wide = [x.detach().float().requires_grad_() for x in narrow]
    exact = F.scaled_dot_product_attention(*wide, is_causal=True)
    assert torch.equal(out, exact.bfloat16())
    exact.bfloat16().float().square().sum().backward()
    for a, b in zip(narrow, wide, strict=True):
        assert torch.equal(a.grad, b.grad.bfloat16())


def test_float_masks_are_widened_too():
    narrow = qkv(torch.bfloat16)
    mask = torch.zeros(7, 7, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), attention_context(narrow[0], torch.float32):
        out = F.scaled_dot_product_attention(*narrow, attn_mask=mask)
    exact = F.scaled_dot_product_attention(*(x.float() for x in narrow))
    assert torch.equal(out, exact.bfloat16())


def test_with_16_bit_weights_it_needs_no_autocast():
    narrow = qkv(torch.bfloat16)
    with attention_context(narrow[0], torch.bfloat16):
        out = F.scaled_dot_product_attention(*narrow, is_causal=True)
    exact = F.scaled_dot_product_attention(*(x.float() for x in narrow), is_causal=True)
    assert torch.equal(out, exact.bfloat16())


def test_where_autocast_is_switched_off_inside_float32_stays():
    x = qkv(torch.float32)
    with (
        torch.autocast("cpu", torch.bfloat16),
        attention_context(x[0], torch.float32),
        torch.autocast("cpu", enabled=False),
    ):
        inside = F.scaled_dot_product_attention(*x)
    assert torch.equal(inside, F.scaled_dot_product_attention(*x))


def test_other_operations_and_float32_are_left_alone():
    x = qkv(torch.float32)
    with attention_context(x[0], torch.float32):
        inside = F.scaled_dot_product_attention(*x)
    assert torch.equal(inside, F.scaled_dot_product_attention(*x))
    with torch.autocast("cpu", torch.bfloat16), attention_context(x[0], torch.float32):
        assert (x[0] @ x[1].mT).dtype == torch.bfloat16


def test_a_timm_tower_goes_through_it(monkeypatch):
    torch.manual_seed(0)
    tower = ImageTower(ImageConfig(name="test_vit", image_size=160), embed_dim=8)
    images = torch.randint(256, (2, 3, 160, 160), dtype=torch.uint8)
    seen = []
    plain = torch.Tensor.float

    def spy(x):
        seen.append(tuple(x.shape))
        return plain(x)

    monkeypatch.setattr(torch.Tensor, "float", spy)
    with torch.autocast("cpu", torch.bfloat16):
        out = tower(images)
    heads, tokens = tower.trunk.blocks[0].attn.num_heads, 1 + tower.patches()
    assert len([shape for shape in seen if shape[1:3] == (heads, tokens)]) == 3 * 6
    torch.testing.assert_close(out.to(torch.float32), tower(images), atol=0.05, rtol=0.05)
