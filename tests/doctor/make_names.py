"""Makes names.json: the names of metrics that other frameworks write, by version, out of their own sources.

    python tests/doctor/make_names.py FOLDER OUT.json

FOLDER has a git clone of each repository under the last part of its name, and unpacked wheels of the
versions that PyPI alone has, as verl-0.9.1. Read are keys of dict literals, of assignments and of *_metrics,
names that functions are given, and f-strings of these, whose fields become <>; around them is put what the
framework puts there.
"""

import ast
import json
import pathlib
import re
import subprocess
import sys

NAME = re.compile(r"[\w<>@-]+(/[\w<>@-]+)*")
# What compares sampler and learner, tells how old samples are, how long, how often clipped, and whose.
WANTED = re.compile(
    r"kl(_|$|/)|ratio|clip|diff|pearson|ppl|chi2|/[to]is$|/tis|is_m|is_eff|is_oob|weight_|mask|stale"
    r"|off_policy/|_age$|len/|lengths?($|/|_mean)|num_tokens|_tokens|turns/|truncated|log_probs$|score/mean|reward_zero"
    r"|entropy|grad_norm|/step$|global_step|prob_error|kl_error|divergence|policy_lr|final_loss|norm_factor|timing/make"
    r"|progress/batch|client/step|_episodes?$|reward/total"
)
NOISE = re.compile(r"attention_mask|prompt_mask|_mask$|^generation$|/mean/mean$|sequence_|^max_|^logp")
# framework -> (repository, {file: forms of the names in it}, {version: git revision, or folder of a wheel}).
# Forms: {0} the name, {1} its part before the first /, {2} the rest.
PPO, SLIME, SKY = "verl/trainer/ppo/", "slime/backends/megatron_utils/", "skyrl/backends/skyrl_train/"
SKY_OLD = "skyrl-train/skyrl_train/"
RENAMED = "actor/rollout_corr/{0}"
# A form that some versions have alone: the file and the text that show it.
SHOWN_BY = {RENAMED: (PPO + "ray_trainer.py", 'rename_dict(actor_output, "actor/")')}
FRAMEWORKS = {
    "verl": ("volcengine/verl", {
        PPO + "ray_trainer.py": ("{0}",), PPO + "metric_utils.py": ("{0}",), PPO + "core_algos.py": ("{0}",),
        PPO + "v1/trainer_base.py": ("{0}",), "verl/utils/debug/metrics.py": ("{0}",),
        "verl/workers/actor/dp_actor.py": ("{0}",), PPO + "mismatch_helper.py": ("mismatch/{0}",),
        PPO + "rollout_corr_helper.py": ("rollout_corr/{0}", RENAMED),
    }, {
        "0.5.0": "v0.5.0", "0.6.0": "v0.6.0", "0.6.1": "v0.6.1", "0.7.0": "v0.7.0", "main": "b178a3cd5",
        "0.7.1": "verl-0.7.1", "0.8.0": "verl-0.8.0", "0.9.1": "verl-0.9.1",
    }),
    "trl": ("huggingface/trl", {
        "trl/trainer/grpo_trainer.py": ("{0}",),
    }, {
        "0.16.0": "v0.16.0", "0.19.1": "v0.19.1", "0.24.0": "v0.24.0", "1.0.0": "v1.0.0",
        "1.9.0": "v1.9.0", "1.16.0": "trl-1.16.0",
    }),
    "trl, asynchronous": ("huggingface/trl", {
        "trl/experimental/async_grpo/async_grpo_trainer.py": ("{0}",),
    }, {"1.0.0": "v1.0.0", "1.9.0": "v1.9.0", "1.16.0": "trl-1.16.0"}),
    "openrlhf": ("OpenRLHF/OpenRLHF", {
        "openrlhf/trainer/ppo_trainer.py": ("{0}", "train/{0}"),
        "openrlhf/trainer/ray/ppo_actor.py": ("{0}", "train/{0}"),
        "openrlhf/trainer/ppo_utils/experience_maker.py": ("{0}", "train/{0}"),
    }, {"0.8.0": "v0.8.0", "0.9.0": "v0.9.0", "0.9.10": "v0.9.10", "0.11.0": "v0.11.0"}),
    "slime": ("THUDM/slime", {
        SLIME + "loss.py": ("train/{0}",), SLIME + "model.py": ("{0}",), SLIME + "data.py": ("rollout/{0}",),
        "slime/backends/fsdp_utils/actor.py": ("train/{0}",), "slime/ray/rollout.py": ("{0}", "rollout/{0}"),
        "slime/ray/buffer.py": ("{0}",), "slime/observability/rollout_metrics.py": ("{0}", "rollout/{0}"),
        "slime/utils/metric_utils.py": ("rollout/response_len/{0}",),
        "examples/train_infer_mismatch_helper/mis.py": ("train/mis_{0}",),
    }, {
        "0.1.0": "v0.1.0", "0.2.0": "v0.2.0", "0.2.4": "v0.2.4", "0.3.1": "v0.3.1", "main": "624b824a8",
    }),
    "skyrl": ("NovaSky-AI/SkyRL", {
        **{b + "workers/worker.py": ("policy/{0}",) for b in (SKY, SKY_OLD)},
        **{b + f"utils/{f}.py": ("policy/loss_metrics/{0}",) for b in (SKY, SKY_OLD)
           for f in ("off_policy_correction_utils", "ppo_utils")},
        **{f: ("{0}",) for b in ("skyrl/train/", SKY_OLD) for f in (
            b + "trainer.py", b + "fully_async_trainer.py", b + "generators/utils.py",
        )},
    }, {
        "train-0.2.0": "skyrl_train-v0.2.0", "train-0.4.0": "skyrl_train-v0.4.0", "0.1.0": "skyrl-v0.1.0",
        "0.2.0": "skyrl-v0.2.0", "0.3.0": "skyrl-v0.3.0",
    }),
    "prime_rl": ("PrimeIntellect-ai/prime-rl", {
        "src/prime_rl/trainer/rl/loss.py": ("{0}/mean",),
        "src/prime_rl/trainer/rl/train.py": ("{0}", "{0}/mean"),
        "src/prime_rl/orchestrator/orchestrator.py": ("{0}",),
        "src/prime_rl/orchestrator/scheduler.py": ("{0}",),
        "src/prime_rl/orchestrator/metrics.py": ("{0}", "train/agg/effective/{0}/mean"),
        "src/prime_rl/orchestrator/dispatcher.py": ("{0}",),
    }, {
        "0.3.0": "v0.3.0", "0.5.0": "v0.5.0", "0.6.0": "v0.6.0", "0.7.0": "v0.7.0", "0.8.0": "v0.8.0",
        "main": "559b44772",
    }),
    "nemo_rl": ("NVIDIA-NeMo/RL", {
        f"nemo_rl/{f}": ("train/{0}",) for f in (
            "algorithms/loss_functions.py", "algorithms/loss/loss_functions.py", "algorithms/grpo.py",
            "algorithms/utils.py", "experience/rollouts.py",
        )
    }, {
        "0.3.1": "v0.3.1", "0.4.0": "v0.4.0", "0.5.0": "v0.5.0", "0.6.0": "v0.6.0",
        "0.7.0": "v0.7.0", "main": "7ea279abf",
    }),
    "tunix": ("google/tunix", {
        f"tunix/rl/{f}": ("{1}/train/{2}", "actor/train/{0}") for f in (
            "grpo/grpo_learner.py", "agentic/agentic_grpo_learner.py", "ppo/ppo_learner.py",
        )
    }, {"0.1.5": "v0.1.5", "0.1.6": "v0.1.6", "0.1.7": "v0.1.7", "main": "c7d8950f"}),
    "tinker": ("thinking-machines-lab/tinker-cookbook", {
        "tinker_cookbook/rl/metrics.py": ("{0}",), "tinker_cookbook/rl/train.py": ("{0}",),
        "tinker_cookbook/rl/metric_util.py": ("env/all/{0}",),
    }, {
        "0.1.0": "v0.1.0", "0.2.0": "v0.2.0", "0.3.0": "v0.3.0", "0.4.0": "v0.4.0", "0.5.5": "v0.5.5",
        "0.6.1": "tinker_cookbook-0.6.1",
    }),
}


def _text(folder, repository, revision, file):
    """Returns the text of a file, or None where this version has none."""
    wheel, clone = folder / revision, folder / repository.split("/")[1]
    if wheel.is_dir():
        found = wheel / file
        return found.read_text(encoding="utf-8") if found.exists() else None
    shown = subprocess.run(
        ["git", "-C", clone, "show", f"{revision}:{file}"], capture_output=True, text=True, check=False)
    return shown.stdout if shown.returncode == 0 else None


def _source(folder, repository, revision):
    if (folder / revision).is_dir():
        return f"{repository}, the wheel {revision}"
    shown = subprocess.run(
        ["git", "-C", folder / repository.split("/")[1], "log", "-1", "--format=%h %cs", revision],
        capture_output=True, text=True, check=True)
    return f"{repository}, {revision}: {shown.stdout.strip()}"


def _name(node):
    """Returns the name that an expression of text spells, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "<>" for part in node.values]
        return "".join(parts).removeprefix("<>").strip("/") or None
    return None


def _keys(text):
    """Yields what is written under a name; of f"{prefix}_mean" the part that is fixed."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            yield from map(_name, filter(None, node.keys))
        elif isinstance(node, ast.Subscript):
            is_metric = re.search(r"metrics|tensors|log_dict|info|rollout_data", ast.unparse(node.value))
            if isinstance(node.ctx, ast.Store) or is_metric:
                yield _name(node.slice)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("metrics_append", "to_dict", "get"):
                yield from map(_name, node.args)
        elif isinstance(node, ast.List):
            yield from map(_name, node.elts)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            yield from map(_name, node.value.elts)


def _is_shown(folder, repository, revision, form):
    if form not in SHOWN_BY:
        return True
    file, shown = SHOWN_BY[form]
    return shown in (_text(folder, repository, revision, file) or "")


def names_of(folder, repository, files, revision):
    found = set()
    for file, forms in files.items():
        text = _text(folder, repository, revision, file) or ""
        shown = [form for form in forms if _is_shown(folder, repository, revision, form)]
        for key in filter(None, _keys(text)):
            for form in shown:
                head, _, rest = key.partition("/")
                if not rest and "{2}" in form:
                    continue
                name = form.format(key, head, rest)
                if NAME.fullmatch(name) and WANTED.search(name) and not NOISE.search(name):
                    found.add(name)
    return sorted(found)


def main(folder, out):
    folder = pathlib.Path(folder)
    made = {
        framework: {
            version: {
                "source": _source(folder, repository, revision),
                "names": names_of(folder, repository, files, revision),
            }
            for version, revision in versions.items()
        }
        for framework, (repository, files, versions) in FRAMEWORKS.items()
    }
    text = json.dumps(made, separators=(",", ":"))
    for key in ("source", "names"):
        text = text.replace(f'"{key}":', f'\n"{key}":')
    pathlib.Path(out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
