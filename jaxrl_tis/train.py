"""The run: `run(config, workdir)` at the end of this file is the whole loop."""

import functools
import math
import pathlib
import signal
import sys
import time

import ml_collections

from jaxrl_tis import evaluate, rollouts, validate
from jaxrl_tis.build import Setup, build
from jaxrl_tis.checkpoint import Checkpoints
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import RewardWorker
from jaxrl_tis.gate.report import require
from jaxrl_tis.metrics import MetricsWriter, Timer
from jaxrl_tis.progress import Progress
from jaxrl_tis.provenance import check_same_config, write_run_files
from jaxrl_tis.report import page
from jaxrl_tis.state import abstract_state, initial_params, initial_state
from jaxrl_tis.trainer import Trainer, sample_metrics
from jaxrl_tis.warmup import warm_up


def check_finite(step: int, values: dict[str, float], saved: int | None) -> None:
    """Raises FloatingPointError naming the step and the terms that are not finite."""
    bad = {name: float(v) for name, v in values.items() if not math.isfinite(v)}
    # An unclamped divergence may overflow by itself; only what moves the weights stops the run.
    terms = {n: v for n, v in bad.items() if n.endswith(("_loss", "grad_norm", "reward/mean"))}
    if terms:
        named = ", ".join(f"{n} is {v}" for n, v in terms.items())
        rest = f" and the checkpoint of step {saved} is intact" if saved is not None else ""
        raise FloatingPointError(f"step {step}: {named}; the run stops here{rest}")


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the step."""

    def __enter__(self) -> "Interrupt":
        self.is_set = False
        self._old = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _request(self, number, frame) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        print("\nstopping after this step; press again to stop at once", flush=True)


class Run:
    """The moving parts of a run: state, source of rollouts, record and checkpoints.

    Attributes:
      version: of the policy in `state`: how many steps have updated it.
    """

    def __init__(self, setup: Setup, workdir: pathlib.Path, checkpoints, rewards: RewardWorker):
        config = setup.config
        self.setup, self.rewards, self._checkpoints = setup, rewards, checkpoints
        self.timer = Timer()
        self.trainer = Trainer(setup)
        prompter = rollouts.Prompter(setup.tokenizer, config.task)
        self._evaluator = evaluate.Evaluator(config, prompter)
        batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts,
            seed=config.seed,
        )
        prompter.check(batches.source)
        self.source: rollouts.RolloutSource = rollouts.Collector(
            config, prompter, batches, rewards, self.timer, load=setup.serving_params,
            start=functools.partial(setup.scheduler, setup.engine),
            with_greedy="greedy_rewards" in setup.correction.needs,
        )
        self.last_eval: dict[str, float] = {}
        if checkpoints.latest() is None:
            self._start(workdir)
        else:
            self._continue(workdir)

    def _start(self, workdir: pathlib.Path) -> None:
        self.done = self.version = 0
        # From here on nothing is refused for its config.
        write_run_files(workdir, self.setup.config.to_dict())
        self.writer = MetricsWriter(workdir)
        params = warm_up(self.setup, initial_params(self.setup), self.writer)
        self.state = initial_state(self.setup, params)
        if self.setup.config.gate.required:
            require(self.setup, self.state["policy"].params)
        self.evaluate(0)
        self.save(0)

    def _continue(self, workdir: pathlib.Path) -> None:
        self.state, meta = self._checkpoints.restore(abstract_state(self.setup))
        if missing := [name for name in ("step", "version", "source") if name not in meta]:
            raise ValueError(
                f"the checkpoints in {workdir} say nothing of {' and '.join(missing)}: they are of "
                "another version of jaxrl_tis; use that one, or a new workdir"
            )
        write_run_files(workdir, self.setup.config.to_dict())
        self.done = self.saved = meta["step"]
        self.version = meta["version"]
        self.source.set_state(meta["source"])
        self.writer = MetricsWriter(workdir, self.done)
        print(f"continuing {workdir} after step {self.done}", flush=True)

    def evaluate(self, step: int) -> None:
        """Measures the held-out accuracy of the learner itself: of its weights and numerics, not
        the sampler's."""
        start = time.monotonic()
        engine = self.setup.learner_engine
        self.source.rest()  # there is room for one cache
        params = engine.load(self.state["policy"].params)
        scheduler = self.setup.scheduler(engine, params, self.version)
        total = 2 * self.setup.config.eval.prompts
        with Progress(total, f"evaluation at step {step}") as progress:
            values = self._evaluator.run(scheduler, self.rewards, step, progress)
        self.writer.write(step, "eval", values | {"time/eval_s": time.monotonic() - start})
        self.last_eval = values
        print(
            f"step {step}: held-out accuracy {values['eval/greedy_accuracy']:.3f} greedy, "
            f"{values['eval/sampled_accuracy']:.3f} sampled", flush=True,
        )

    def save(self, step: int) -> None:
        """Saves in the background; the time of the blocking part counts to the next step."""
        with self.timer("checkpoint"):
            meta = {"step": step, "version": self.version, "source": self.source.get_state()}
            self._checkpoints.save(step, self.state, meta)
        self.saved = step


def run(config: ml_collections.ConfigDict, workdir: str) -> dict[str, float]:
    """Trains to config.steps, or continues the run that `workdir` holds; returns the last eval.

    Raises:
      ValueError, FileNotFoundError: the config, data or model cannot be used; before any step.
      FloatingPointError: a loss or gradient is not finite; the last checkpoint is intact.
      MismatchError: with config.gate.required, learner and sampler are too far apart
        before the first step.
    """
    workdir = pathlib.Path(workdir)
    setup = build(config)
    for doubt in validate.doubts(config, setup.correction):
        print(f"warning: {doubt}", file=sys.stderr, flush=True)
    check_same_config(workdir, config.to_dict(), ignore=("steps",))
    with (
        Checkpoints(workdir, config.checkpoint.keep) as checkpoints,
        RewardWorker(
            config.reward.name, timeout=config.reward.timeout, on_error=config.reward.on_error
        ) as rewards,
        Interrupt() as interrupt,
    ):
        r = Run(setup, workdir, checkpoints, rewards)
        with r.writer, Progress(config.steps - r.done, "training") as progress:
            for step in range(r.done + 1, config.steps + 1):
                if interrupt.is_set:
                    print(f"stopped after step {step - 1}; the same command continues", flush=True)
                    break
                with r.timer("step"):
                    with r.timer("sync"):
                        r.source.publish(r.state["policy"].params, r.version)
                    samples, values = r.source.next(step)
                    with r.timer("score"):
                        sampled_by = {r.version: r.state["policy"].params}
                        rows = r.trainer.score(r.state, samples, sampled_by)
                    with r.timer("update"):
                        r.state, measured = r.trainer.update(r.state, rows, step, r.version)
                        r.version += 1

                limits = config.task.max_prompt_tokens, config.rollout.max_new_tokens
                values |= measured | sample_metrics(samples, rows, limits)
                check_finite(step, values, r.saved)
                times = r.timer.collect()
                times["time/rollout_tokens_per_s"] = rows["mask"].sum() / times["time/rollout_s"]
                r.writer.write(step, "train", values | times)
                progress.update(
                    1, reward=values["reward/mean"],
                    dp_max=values["training/rollout_probs_diff_max"],
                )

                is_last = step == config.steps or interrupt.is_set
                if step % config.eval.every == 0 or step == config.steps:
                    r.evaluate(step)
                if step % config.checkpoint.every == 0 or is_last:
                    r.save(step)
    page.write([workdir], workdir / "report.html")
    print(f"report: {workdir / 'report.html'}", flush=True)
    return r.last_eval
