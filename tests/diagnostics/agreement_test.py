"""Agreement of kept sets of tokens, by hand."""

import numpy as np

from jaxrl_tis.diagnostics import agreement
from tests import jitted

agreement = jitted.Module(agreement)

kept_metrics = agreement.kept_metrics


def assert_metrics(metrics, expected, prefix):
    assert set(metrics) == {prefix + name for name in expected}
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[prefix + name], value, rtol=1e-6, err_msg=name)


# Kept ids of five tokens and padding: equal in another order; one of three in common; both without
# a filter; only the sampler filters; the learner drops the sampled token.
KEPT_OLD = np.array([[[3, 5, -1], [1, 2, -1], [-1] * 3, [-1] * 3, [0, 1, 2], [7, 8, 9]]])
KEPT_BEHAV = np.array([[[5, 3], [2, 4], [-1, -1], [6, 0], [4, 2], [1, 2]]])
TOKENS = np.array([[3, 2, 9, 6, 4, 0]])
MASK = np.array([[1, 1, 1, 1, 1, 0]])
EXPECTED = {
    "jaccard": (1 + 1 / 3 + 1 + 0 + 1 / 4) / 5,
    "identical": 2 / 5,
    "token_outside": 1 / 5,
}


def test_kept_sets_as_ids():
    metrics = kept_metrics(KEPT_OLD, KEPT_BEHAV, TOKENS, MASK)
    assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_kept_sets_as_bits():
    def bits(ids):
        return np.any(np.array(ids)[..., None] == np.arange(10), axis=-2)

    metrics = kept_metrics(bits(KEPT_OLD), bits(KEPT_BEHAV), TOKENS, MASK)
    assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_padding_and_the_type_of_the_mask_do_not_count():
    is_valid = np.array(MASK) > 0
    for dtype, fill in ((bool, -1), (np.int32, 0), (np.float32, 999)):
        kept = [np.where(is_valid[..., None], x, fill) for x in (KEPT_OLD, KEPT_BEHAV)]
        metrics = kept_metrics(*kept, np.where(is_valid, TOKENS, fill), is_valid.astype(dtype))
        assert_metrics(metrics, EXPECTED, "mismatch/kept_")


def test_without_a_valid_token_every_metric_is_zero():
    none = np.zeros_like(MASK)
    metrics = kept_metrics(KEPT_OLD, KEPT_BEHAV, TOKENS, none)
    for name, value in metrics.items():
        assert value == 0.0, name
