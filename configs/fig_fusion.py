"""A teacher in the sampler: five ways to learn from its answers, and none.

    ./launch/figures.sh fusion    # 12 arms of 8 seeds

A prompt has four digits, or eight in the long arms, and a mark. After "=" the answer repeats the digits. After
"+" each digit is one larger, 9 becomes 0. The policy is warmed up on both, but after "+" with random
digits: it knows the form of an answer and solves none. The teacher is the same model, warmed up on right
answers. `python -m experiments.fusion` writes the files and trains the two teachers.

The teacher's share falls from 0.5 to 0 in 80 of 120 steps; in `scheduled` it also falls with the mean reward
of a prompt. `on-policy` and `alone` have PPO's ratio to the learner before the step.

Fixed before the runs: does `mixed` beat `on-policy`, and `scheduled` beat `mixed`? An arm beats another where
the interval of the paired difference of their gains in sampled accuracy, of the policy alone, is above 0. Task,
steps and learning rate were chosen on seed 100, where `on-policy` and `shaped` learned the second mark, and
`mixed`, `decoupled` and `scheduled` did not.
"""

from configs import fig_base

FOLDER = "runs/figures/fusion-data"
DIGITS = {"short": 4, "long": 8}
PPO = "ppo(clip_high=0.28)"
FALLS = "start=0.5, steps=80"
METHODS = {
    "on-policy": {},
    "mixed": {"correction.objective": "fusion_cap(cap=3.0)"},
    "shaped": {"correction.objective": "fusion_shaped(fusion_gamma=0.1)"},
    "decoupled": {"correction.weight": "token_tis(cap=2.0)"},
    "scheduled": {
        "correction.objective": "fusion_cap(cap=1e9)",
        "rollout.alpha": f"linear({FALLS}, difficulty=reward)",
    },
}


def path(length: str, name: str) -> str:
    """Returns the file with the examples of a name: train, eval, student or teacher."""
    return f"{FOLDER}/{length}-{name}.jsonl"


def get_config():
    c = fig_base.get_config()
    c.steps = c.checkpoint.every = 120
    c.task.name = "jsonl"
    c.task.params = c.warmup.params = c.eval.params = {}
    c.update_from_flattened_dict(fields("short"))
    c.correction.objective = PPO
    c.optimizer.lr = 1e-3
    c.warmup.steps = 300
    c.eval.every = 10
    c.eval.prompts = 256
    return c


def fields(length: str) -> dict:
    digits = DIGITS[length]
    return {
        "task.params.path": path(length, "train"), "warmup.params.path": path(length, "student"),
        "eval.params.path": path(length, "eval"), "task.max_prompt_tokens": digits + 2,
        "rollout.max_new_tokens": digits + 1,
    }


def sweep():
    taught = lambda length: {
        "rollout.teacher": f"{FOLDER}/{length}-teacher", "rollout.alpha": f"linear({FALLS})",
    }
    return {
        f"{length}-{name}": fields(length) | method
        for length in DIGITS
        for name, method in {
            "alone": {}, **{name: taught(length) | own for name, own in METHODS.items()},
        }.items()
    }
