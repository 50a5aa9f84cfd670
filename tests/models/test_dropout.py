"""Dropout with masks of 16 bits an entry."""

import pytest
import torch

from recapp.errors import ConfigError
from recapp.models.layers import FastDropout, FieldDropout


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_share_of_entries_is_dropped_and_the_mean_stays(share):
    torch.manual_seed(0)
    kept = FastDropout(share)(torch.ones(501, 333))
    assert kept.unique().tolist() == pytest.approx([0, 1 / (1 - share)], rel=1e-3)
    assert (kept == 0).float().mean().item() == pytest.approx(share, abs=0.005)
    assert kept.mean().item() == pytest.approx(1, abs=0.03)
    columns = (kept == 0).float().mean(0)
    assert columns.std() < 2 * (share * (1 - share) / 501) ** 0.5, "entries are independent"


def test_gradients_are_those_of_the_same_mask():
    entries = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    kept = FastDropout(0.5)(entries)
    kept.backward(torch.ones_like(kept))
    torch.testing.assert_close(entries.grad * entries, kept)


def test_evaluation_and_a_share_of_zero_keep_the_entries():
    entries = torch.randn(3, 5)
    assert FastDropout(0.5).eval()(entries) is entries
    assert FastDropout(0.0)(entries) is entries


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 1, 5)])
def test_any_shape_and_dtype_is_kept(shape):
    for dtype in (torch.float64, torch.bfloat16):
        kept = FastDropout(0.3)(torch.ones(shape, dtype=dtype))
        assert kept.shape == shape and kept.dtype == dtype


def test_equal_seeds_drop_the_same_entries():
    def dropped(seed):
        torch.manual_seed(seed)
        return FastDropout(0.5)(torch.ones(20, 20))

    assert torch.equal(dropped(1), dropped(1))
    assert not torch.equal(dropped(1), dropped(2))


@pytest.mark.parametrize("dims", [[4, 4, 4], [1, 4, 2]])
def test_fields_are_dropped_whole_and_the_mean_stays(dims):
    torch.manual_seed(0)
    dropped = FieldDropout(0.25, dims)
    vectors_BK = torch.ones(4000, sum(dims), requires_grad=True)
    kept_BK = dropped(vectors_BK)
    fields = kept_BK.split(dims, 1)
    assert all(torch.equal(field, field[:, :1].expand_as(field)) for field in fields)
    of_field_BF = torch.stack([field[:, 0] for field in fields], 1)
    assert of_field_BF.unique().tolist() == pytest.approx([0, 4 / 3], rel=1e-3)
    assert (of_field_BF == 0).float().mean(0).tolist() == pytest.approx([0.25] * 3, abs=0.03)
    assert 0 < (of_field_BF == 0).all(1).float().mean() < 0.05, "fields are independent"
    kept_BK.sum().backward()
    torch.testing.assert_close(vectors_BK.grad, kept_BK.detach())
    assert dropped.eval()(vectors_BK) is vectors_BK


def test_fields_know_their_columns_before_the_step_and_on_the_meta_device():
    """So nothing waits for a GPU; checkpoints have no such numbers."""
    with torch.device("meta"):
        dropped = FieldDropout(0.25, [1, 4, 2])
    assert FieldDropout(0.25, [1, 4, 2]).field_K.tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert dropped.field_K.shape == (7,) and not dropped.state_dict()


@pytest.mark.parametrize("share", [1, -0.1, "half", True])
def test_a_share_of_fields_that_is_none_is_refused(share):
    with pytest.raises(
        ConfigError, match=r"model.field_dropout=.*must be at least 0 and less than"
    ):
        FieldDropout(share, [4])
