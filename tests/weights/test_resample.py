"""Resampling: known answers, and the two manners where they differ."""

import pytest
import torch

from pennyclip.weights.resample import image_positions, patch_kernel, text_positions


def test_positions_keep_the_class_token_and_a_linear_ramp() -> None:
    """Bicubic interpolation reproduces a ramp away from the border."""
    ramp = torch.arange(8.0).repeat_interleave(8)  # the row of each patch
    positions = torch.cat([torch.tensor([100.0]), ramp]).view(1, 65, 1)
    larger, method = image_positions(positions, (16, 16), 1, "timm")
    assert larger.shape == (1, 257, 1)
    assert larger[0, 0, 0] == 100
    rows = larger[0, 1:, 0].view(16, 16)
    # Centres of the new cells in the old grid: (i + 0.5) / 2 - 0.5.
    expected = (torch.arange(16) + 0.5) / 2 - 0.5
    torch.testing.assert_close(rows[4:12, 8], expected[4:12], atol=1e-5, rtol=0)
    assert method == "grid 8 x 8 to 16 x 16, bicubic with antialiasing (timm)"


def test_the_manners_use_two_bicubic_kernels() -> None:
    """Keys 1981: W(d) = (a + 2) d^3 - (a + 3) d^2 + 1 for d < 1, in each direction."""
    positions = torch.zeros(1, 64, 1)
    positions[0, 8 * 4 + 4] = 1
    for manner, a in (("timm", -0.5), ("eva", -0.75)):
        larger, method = image_positions(positions, (16, 16), 0, manner)
        weight = (a + 2) * 0.25**3 - (a + 3) * 0.25**2 + 1
        assert larger.view(16, 16)[8, 8] == pytest.approx(weight**2, abs=1e-5)
        assert method.endswith(f"({manner})")


def test_only_timms_manner_averages_when_shrinking() -> None:
    noise = torch.randn(1, 256, 64, generator=torch.manual_seed(0))
    smooth, _ = image_positions(noise, (4, 4), 0, "timm")
    sampled, method = image_positions(noise, (4, 4), 0, "eva")
    assert smooth.std() < 0.5 * sampled.std()
    assert method == "grid 16 x 16 to 4 x 4, bicubic without antialiasing (eva)"


def test_positions_that_are_no_square_are_refused() -> None:
    with pytest.raises(ValueError, match="63 positions behind 1 prefix"):
        image_positions(torch.zeros(1, 64, 4), (4, 4), 1, "timm")


def test_a_larger_patch_kernel_sees_the_same_in_a_larger_image() -> None:
    """FlexiViT, equation 3: the kernel's product with an enlarged patch stays as it was."""
    kernel = torch.randn(5, 3, 8, 8, generator=torch.manual_seed(0))
    patch = torch.randn(1, 3, 8, 8, generator=torch.manual_seed(1))
    enlarged = torch.nn.functional.interpolate(patch, (16, 16), mode="bicubic", antialias=True)
    resampled, method = patch_kernel(kernel, (16, 16), "timm")
    before = (kernel * patch).sum((1, 2, 3))
    torch.testing.assert_close((resampled * enlarged).sum((1, 2, 3)), before, atol=1e-3, rtol=1e-4)
    assert method == "patch 8 to 16, pseudo-inverse of the bicubic resize (FlexiViT; timm)"
    plain, method = patch_kernel(kernel, (16, 16), "eva")
    assert plain.shape == (5, 3, 16, 16)
    assert method == "patch 8 to 16, bicubic without antialiasing (eva)"
    # Plainly enlarged, the sum over the patch grows with its area.
    assert ((plain * enlarged).sum((1, 2, 3)) / before).abs().median() > 2


def test_text_positions_are_cut_or_interpolated() -> None:
    positions = torch.arange(8.0)[:, None].expand(8, 3)
    short, method = text_positions(positions, 5)
    assert torch.equal(short, positions[:5])
    assert method == "the first 5 of 8 positions"
    long, method = text_positions(positions, 16)
    assert long[:, 0].tolist()[:4] == [0.0, 0.25, 0.75, 1.25]
    assert long.shape == (16, 3)
    assert method == "8 to 16 positions, linear interpolation"
