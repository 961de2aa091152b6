"""Models, their experts and their stacks of layers, described here and not read from files."""

import dataclasses

import pytest

from jaxrl_tis.models.config import ModelConfig, MoeConfig, RopeConfig

DENSE = ModelConfig(
    family="qwen3", vocab_size=11, embed_dim=8, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=4, mlp_dim=12, rope=RopeConfig(kind="default", theta=10000.0), max_position=32,
    norm_eps=1e-6, qkv_bias=False, qk_norm=True, tie_embeddings=False)
MOE = MoeConfig(num_experts=8, top_k=2, expert_dim=16)


def test_stacks_of_layers():
    assert DENSE.stacks == {"layers": (0, 1, 2, 3)} and DENSE.num_moe_layers == 0
    sparse = dataclasses.replace(DENSE, moe=MOE)
    assert sparse.stacks == {"layers": (0, 1, 2, 3)} and sparse.num_moe_layers == 4
    mixed = dataclasses.replace(DENSE, moe=dataclasses.replace(MOE, dense_layers=(0, 2)))
    assert mixed.stacks == {"layers": (1, 3), "dense_layers": (0, 2)}
    assert mixed.num_moe_layers == 2


@pytest.mark.parametrize("dense", [(1, 0), (1, 1), (4,), (-1,), (0, 1, 2, 3)])
def test_dense_layers_are_some_of_the_layers(dense):
    with pytest.raises(ValueError, match=r"dense_layers=.* ascending .* the 4 layers"):
        dataclasses.replace(DENSE, moe=dataclasses.replace(MOE, dense_layers=dense))


@pytest.mark.parametrize("changes, message", [
    ({"num_experts": 0}, "num_experts=0 must be from 1"),
    ({"expert_dim": 0}, "expert_dim=0 must be from 1"),
    ({"num_experts": 2**16 + 1}, "num_experts=65537 must be at most 65536"),
    ({"shared_dim": -1}, "shared_dim=-1"),
    ({"score": "tanh"}, "score='tanh' is none of softmax, sigmoid"),
    ({"num_groups": 3}, "num_experts=8 cannot be cut into num_groups=3"),
    ({"num_groups": 2, "top_groups": 3}, "top_groups=3 is above num_groups=2"),
    ({"top_k": 9}, "top_k=9 is above the 8 experts"),
    ({"top_k": 5, "num_groups": 2}, "top_k=5 is above the 4 experts"),
    ({"num_groups": 8, "top_groups": 8}, "fewer than two experts each"),
    ({"scale": 0.0}, "scale=0.0 must be positive"),
])
def test_experts_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MOE, **changes)


def test_more_experts_than_a_checkpoint_has():
    many = dataclasses.replace(MOE, num_experts=2**15)
    dataclasses.replace(DENSE, num_layers=8, moe=many)
    with pytest.raises(ValueError, match="num_experts=32768 in 9 layers are 294912 experts"):
        dataclasses.replace(DENSE, num_layers=10, moe=dataclasses.replace(many, dense_layers=(4,)))


def test_only_sigmoid_routers_have_a_bias():
    assert not MOE.has_bias and dataclasses.replace(MOE, score="sigmoid").has_bias


def test_rotated_dimensions():
    rope = RopeConfig(kind="default", theta=1e4, fraction=0.5)
    assert rope.rotary_dim(128) == 64
    assert dataclasses.replace(rope, fraction=1.0).rotary_dim(128) == 128
    for fraction in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"partial_rotary_factor={fraction}"):
            dataclasses.replace(rope, fraction=fraction)
    with pytest.raises(ValueError, match="rotates 3 of head_dim=4"):
        dataclasses.replace(DENSE, rope=dataclasses.replace(rope, fraction=0.75))


def test_positions():
    config = dataclasses.replace(DENSE, max_position=8192)
    assert config.check_length(8192) == ""
    with pytest.raises(ValueError, match="8193 tokens exceed max_position_embeddings = 8192"):
        config.check_length(8193)
    extended = dataclasses.replace(config, rope=RopeConfig(kind="linear", theta=1e4, factor=2.0))
    assert extended.check_length(8192) == ""
    assert "8193 tokens exceed" in extended.check_length(8193)
    assert "'linear' extends" in extended.check_length(8193)
