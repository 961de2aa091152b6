"""Makes tinker_near.jsonl and tinker_far.jsonl, logs that code of the Tinker cookbook computes and writes.

    python tests/doctor/make_tinker_run.py FOLDER

in an environment of its own: pip install torch tinker-cookbook. No service runs: the log-probs are the random
ones of `batch`. `near` is an asynchronous run, half of whose groups are one step old. `far` is a synchronous
run with a larger gap. Made with tinker-cookbook 0.6.1, tinker 0.38.0 and torch 2.13.0 on a CPU.
"""

import pathlib
import sys
import tempfile
import types

import numpy as np

RUNS = {"near": 0.1, "far": 0.4}  # standard deviation of a token's log ratio; its square / 2 is the KL
STEPS, ANSWERS, PROMPT = 24, 4, 5
LONGEST = 150


def batch(run: str, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns (sampler's, learner's log-probs) of each answer, float32."""
    rng, spread = np.random.default_rng([list(RUNS).index(run), step]), RUNS[run]
    answers = []
    for length in rng.integers(LONGEST // 2, LONGEST, ANSWERS):
        sampler = -rng.exponential(0.5, length)
        learner = sampler + spread * rng.standard_normal(length) - spread**2 / 2
        answers.append((sampler.astype(np.float32), learner.astype(np.float32)))
    return answers


def sampled_at(step: int) -> list[int]:
    """Returns the steps of the weights that sampled the groups of an asynchronous step."""
    return [max(step - 1, 0), step]


def main(folder: str) -> None:
    # The tests import `batch`, and have none of these packages.
    import tinker
    import torch
    from tinker_cookbook.rl import metrics
    from tinker_cookbook.utils import ml_log

    def datum(logps):
        padded = torch.cat([torch.zeros(PROMPT), torch.from_numpy(logps)])
        mask = (torch.arange(len(padded)) >= PROMPT).float()
        inputs = {"logprobs": padded, "mask": mask}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(list(range(len(padded)))),
            loss_fn_inputs={name: tinker.TensorData.from_torch(x) for name, x in inputs.items()},
        )

    for run in RUNS:
        logger = ml_log.JsonLogger(tempfile.mkdtemp())
        for step in range(STEPS):
            answers = batch(run, step)
            # Of the learner there are log-probs at prompts, too, which the mask leaves out.
            learner = [torch.cat([torch.ones(PROMPT), torch.from_numpy(x)]) for _, x in answers]
            values = {"progress/batch": step}
            if run == "near":
                groups = [
                    types.SimpleNamespace(
                        sampling_client_step=sampled,
                        metrics={"time/trajectory_group_worker_loop/total": 1.0},
                    ) for sampled in sampled_at(step)
                ]
                values = {"training_client/step": step} | metrics.compute_sampling_client_metrics(groups)
            values |= metrics.compute_kl_sample_train([datum(x) for x, _ in answers], learner)
            logger.log_metrics(values, step=step)
        made = pathlib.Path(logger.log_dir) / "metrics.jsonl"
        (pathlib.Path(folder) / f"tinker_{run}.jsonl").write_bytes(made.read_bytes())


if __name__ == "__main__":
    main(sys.argv[1])
