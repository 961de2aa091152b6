"""Times Tunix's GRPOLearner on the model and batch of benchmarks.grpo_step.

    /path/to/venv/bin/python -P benchmarks/grpo_tunix.py [--steps=6]

The interpreter needs google-tunix. Prints the seconds from each step's rewards to the next one's
(update, then generation) as Tunix's own learner runs them, with its own sampler, in float32 on CPU;
the first two warm up. With one update a batch, as here, it computes no old log-probs.
"""

import argparse
import statistics
import time

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

VOCAB, PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 49152, 4, 8, 64, 64


class Words:
    """A tokenizer of the words w0, w1, ...; id 0 is padding and id 1 the end."""

    pad_id = lambda self: 0
    eos_id = lambda self: 1
    bos_id = lambda self: 0  # for none

    def encode(self, text: str, **_) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: list[int], **_) -> str:
        return " ".join(f"w{i}" for i in ids)

    def dedup_bos_ids(self, ids: list[int]) -> list[int]:
        return ids


def random_model() -> llama.Llama3:
    model = llama.Llama3(llama.ModelConfig(
        num_layers=4, vocab_size=VOCAB, embed_dim=256, hidden_dim=768, num_heads=8, head_dim=32,
        num_kv_heads=4, rope_theta=10_000, norm_eps=1e-5, weight_tying=True,
    ), rngs=nnx.Rngs(0))
    params, rng = nnx.state(model), np.random.default_rng(0)
    draw = lambda x: jax.numpy.asarray(0.02 * rng.standard_normal(x.shape), x.dtype)
    nnx.update(model, jax.tree.map(draw, params))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args()
    rng, rewarded = np.random.default_rng(0), []

    def reward(prompts, completions, **_):
        rewarded.append(time.perf_counter())
        return rng.random(len(completions)).tolist()

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=random_model(), tokenizer=Words(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6), eval_every_n_steps=10**9,
                max_steps=args.steps + 1, mini_batch_size=PROMPTS, train_micro_batch_size=PROMPTS,
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=NEW_TOKENS, max_prompt_length=PROMPT_TOKENS,
                kv_cache_size=PROMPT_TOKENS + NEW_TOKENS, temperature=1.0, top_p=None,
            ),
        ),
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=GROUP, beta=0.0), reward)
    ids = rng.integers(2, 1000, (args.steps + 1, PROMPTS, PROMPT_TOKENS))
    texts = [np.array([Words().decode(row) for row in batch]) for batch in ids]
    learner.train([{"prompts": batch} for batch in texts])
    seconds = np.diff(rewarded).tolist()
    print("steps:", " ".join(f"{s:.2f}" for s in seconds), "s")
    print(f"median without the first two: {statistics.median(seconds[2:]):.2f} s")


if __name__ == "__main__":
    main()
