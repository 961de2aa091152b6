"""Parameters on a mesh: which degrees and widths are legal, and where each axis lies."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_tis import sharding
from jaxrl_tis.models import placement
from jaxrl_tis.models.config import ModelConfig, RopeConfig


CONFIG = ModelConfig(
    family="qwen2", vocab_size=24, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, mlp_dim=48, rope=RopeConfig("default", 10000.0), max_position=64, norm_eps=1e-6,
    qkv_bias=True, qk_norm=False, tie_embeddings=False,
)


@pytest.mark.parametrize("heads, kv_heads, legal", [(14, 2, [1, 2]), (9, 3, [1, 3])])
def test_legal_tensor_parallel_degrees(heads, kv_heads, legal):
    """Qwen2.5-0.5B and SmolLM2-135M."""
    config = dataclasses.replace(CONFIG, num_heads=heads, num_kv_heads=kv_heads)
    for degree in range(1, 17):
        if degree in legal:
            placement.check_tensor_parallel(config, degree)
        else:
            with pytest.raises(ValueError) as error:
                placement.check_tensor_parallel(config, degree)
            assert f"parallelism {degree} " in str(error.value)
            assert f"{heads} query heads and {kv_heads} key/value heads" in str(error.value)
            assert str(error.value).endswith(f"legal degrees are {legal}")


def test_an_illegal_degree_is_refused_before_any_array_is_placed():
    config = dataclasses.replace(CONFIG, num_heads=14, num_kv_heads=2, head_dim=4)
    with pytest.raises(ValueError, match=r"legal degrees are \[1, 2\]"):
        placement.shardings(sharding.layout((2, 1, 4), sharding.SERVE_RULES), config)


def test_a_width_that_does_not_divide_is_refused_with_both_numbers():
    config = dataclasses.replace(CONFIG, vocab_size=19)
    message = "'embed'.*axis 'vocab' of size 19 cannot be cut into 2 shards"
    with pytest.raises(ValueError, match=message):
        placement.shardings(sharding.layout((1, 4, 2), sharding.TRAIN_RULES), config)


def test_a_vocabulary_that_tensor_shards_do_not_divide_is_whole_on_each():
    config = dataclasses.replace(CONFIG, vocab_size=19)
    layout = sharding.layout((1, 4, 2), sharding.TRAIN_RULES, vocab_size=19)
    placed = placement.shardings(layout, config)
    assert (placed["embed"].spec, placed["head"].spec) == (P(None, "fsdp"), P("fsdp", None))
    assert placed["layers"]["q"].spec == P(None, "fsdp", "tensor")
    divided = sharding.layout((1, 4, 2), sharding.TRAIN_RULES, vocab_size=24)
    assert divided == sharding.layout((1, 4, 2), sharding.TRAIN_RULES)
