"""The run: `run` at the end of this file is the whole loop, read from top to bottom."""

import contextlib
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_collections

from jaxrl_tis import evaluate, resume, validate
from jaxrl_tis.build import Setup, build
from jaxrl_tis.data import tasks
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import SCORE, RewardWorker, worker
from jaxrl_tis.gate import canary, probe
from jaxrl_tis.gate.report import require
from jaxrl_tis.learner import arriving
from jaxrl_tis.learner.batch_layout import Rows
from jaxrl_tis.learner.distill import Distiller
from jaxrl_tis.learner.state import (
    initial_params, initial_state, keep_base, policy, starting_factors,
)
from jaxrl_tis.learner.trainer import Trainer, both_logps, sample_metrics
from jaxrl_tis.learner.warmup import examples, warm_up
from jaxrl_tis.record import changes, failures, goodput, probabilities, samples, sinks
from jaxrl_tis.record.changes import Changes
from jaxrl_tis.record.checkpoint import Checkpoints
from jaxrl_tis.record.failures import Failures
from jaxrl_tis.record.metrics import LineFile, MetricsWriter, NoRecord, Timer, read
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.record.provenance import date, identity, saved, write_run_files
from jaxrl_tis.rollouts import live
from jaxrl_tis.rollouts.groups import Groups, Sample, unknown_ids
from jaxrl_tis.rollouts.prompts import Checked, lacks_answer
from jaxrl_tis.rollouts.source import RolloutSource, SourceParts, next_batch
from jaxrl_tis.runtime import hub, lock, processes, storage
from jaxrl_tis.runtime.cli import Interrupted, MismatchError, SamplerLost
from jaxrl_tis.runtime.interrupt import Interrupt
from jaxrl_tis.runtime.watchdog import Watchdog


def check_finite(
    step: int, values: dict[str, float], saved: int | None, cause: Callable[[], str] = str
) -> None:
    """Raises FloatingPointError naming the step and the terms that are not finite. `cause` returns
    which log-probs are not finite and why, "" if all are."""
    bad = {name: float(v) for name, v in values.items() if not math.isfinite(v)}
    # An unclamped divergence may overflow by itself; only what moves the weights stops the run.
    is_term = lambda n: n.endswith(("_loss", "grad_norm", "reward/mean")) and not n.startswith("drafter/")
    terms = {n: v for n, v in bad.items() if is_term(n)}
    if terms:
        named = ", ".join(f"{n} is {v}" for n, v in terms.items())
        why = cause()
        raise FloatingPointError(_stopped(step, f"{named}. {why}" if why else named, saved))


def check_scores(step: int, why: str, saved: int | None) -> None:
    """Raises FloatingPointError before the update if log-probs are not finite, see
    `Trainer.non_finite`."""
    if why:
        raise FloatingPointError(_stopped(step, why, saved))


def _stopped(step: int, why: str, saved: int | None) -> str:
    rest = f" and the checkpoint of step {saved} is intact" if saved is not None else ""
    return f"step {step}: {why}; the run stops here{rest}"


def check_rewards(
    step: int, drawn: list[Sample], last_error: str, is_first: bool, field: str
) -> None:
    """Raises ValueError if no response of the first batch has a reward. For later batches it
    prints a warning. `field` of the config names what gives the rewards."""
    if not all(sample.is_failed for sample in drawn):
        return
    problem = f"step {step}: all {len(drawn)} rewards failed. The last error: {last_error}"
    if is_first:
        raise ValueError(
            f"{problem}. Fix what {field} names; WORKDIR/{failures.FILE_NAME} has the errors by "
            "kind, with the last texts of each"
        )
    processes.report(problem, sys.stderr)


def check_components(samples: list[Sample]) -> None:
    """Raises ValueError for a component that stands for the reward, where components alone count."""
    if any(SCORE in s.components for s in samples):
        raise ValueError(
            f"the reward returned a {SCORE!r} among its components, and this advantage uses "
            f"components alone; return them without {SCORE!r}"
        )


class Run:
    """The parts of a run: state, source of rollouts, trainer, record and checkpoints.

    Attributes:
      folder: of the run, on this machine.
      state: what is trained, see `learner.state`; None until there is one.
      done: the last step that is complete; saved: the last one that is saved, None before.
      version: of the policy in `state`: the number of steps that have updated it.
      snapshots: the weights that tokens of the next batches were sampled with.
      accumulates: whether gradients are accumulated as the groups of a batch arrive.
    """

    def __init__(
        self, setup: Setup, mirror: storage.Mirror, checkpoints: Checkpoints, rewards: RewardWorker,
        watchdog: Watchdog, interrupt: Interrupt, pins: Mapping[str, str] = {},
        changed: Changes | None = None,
    ):
        config = setup.config
        self.setup, self.rewards, self._checkpoints = setup, rewards, checkpoints
        self._mirror, self.folder = mirror, mirror.folder
        self._watchdog, self._interrupt = watchdog, interrupt
        self._timer = Timer(goodput.compile_seconds)
        self._prompter = setup.prompter()
        self._evaluator = evaluate.Evaluator(config, self._prompter, watchdog.heartbeat)
        is_new, training = checkpoints.latest() is None, setup.training
        self._taught = examples(training, self._prompter, watchdog.heartbeat) if is_new else None
        self._factors = starting_factors(training) if is_new else None
        self.trainer = Trainer(training)
        self._distiller = Distiller(training) if training.drafter is not None else None
        self._drafted: int | None = None  # version at which the samplers got the drafter
        self.snapshots = self.trainer.weight_snapshots()
        self.source = self._make_source()
        self.accumulates = setup.schedule.on_arrival and arriving.accumulation_blocker(training) is None
        self.state: Any = None
        self.saved: int | None = None
        self.done = self.version = 0
        self.writer: MetricsWriter | NoRecord = NoRecord()
        self._samples: LineFile | None = None
        self._probabilities: LineFile | None = None
        self._pins, self._changed = pins, changed or Changes()
        self.last_eval: dict[str, float] = {}
        self._is_rewarded = False  # a batch of this run was

    def _make_source(self) -> RolloutSource:
        setup, config, needs = self.setup, self.setup.config, self.setup.training.correction.needs
        # On Ray, process 0 commands the workers alone.
        is_shared = config.rollout.driver != "ray"
        self._batches = batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts,
            seed=config.seed, **(processes.shard() if is_shared else {}), check=self._check,
        )
        groups = Groups(config, self._prompter, self.rewards, "greedy_rewards" in needs)
        served = setup.served_params if config.rollout.driver == "threads" else setup.serving_params
        parts = SourceParts(
            config, setup.schedule, setup.replay, groups, batches, self._timer, self._checked(served),
            self.heartbeat,
        )
        return setup.source(parts, self.snapshots.add_logps)

    def _checked(self, serving_params: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
        """Returns `serving_params` with the check of rollout.canary. Engines of others are always
        checked."""
        is_external = self.setup.config.rollout.driver == "external"
        if not is_external and not canary.is_on(self.setup):
            return serving_params
        source = self._batches.source
        prompts = [self._prompter.ids(source[i]) for i in range(min(canary.PROMPTS, len(source)))]
        if is_external:
            fleet, is_sync = self.setup.fleet, self.setup.schedule.is_sync
            fleet.watch(prompts)
            one = fleet.serving_params
            return one if is_sync and self.setup.replay is None else lambda *args: [one(*args)]
        return canary.Canary(self.setup, prompts).checked(serving_params)

    def _check(self, source: tasks.Source) -> Checked:
        reject = lacks_answer(self.setup.config)
        self._data = self._prompter.checked(
            source, "training data", reject, heartbeat=self._watchdog.heartbeat
        )
        return self._data

    @property
    def policy(self) -> Any:
        """The policy's parameters."""
        return policy(self.setup.training, self.state)

    def begin(self) -> None:
        """Makes the state at step 0, or reads the newest checkpoint. Runs the evaluation of that
        step if it is due and missing."""
        self._timer.add("init", goodput.seconds_since_start())
        if not processes.is_alone():
            agreed = identity(self.setup.config.to_dict()) | self.source.sync_digest()
            agreed |= {"--change": self._changed.named, "held-out examples": self._evaluator.digest}
            if difference := processes.difference(agreed):
                raise ValueError(
                    f"{difference}; give all processes the same command and the same data"
                )
        if self._checkpoints.latest() is None:
            self._start()
        else:
            self._continue()
        self.stop_if_asked()
        if self.is_due(self.done) and not processes.first(self._has_evaluation):
            self.evaluate()
        if self.saved is None:
            self.save()

    def _start(self) -> None:
        training = self.setup.training
        # From here on nothing is refused for its config.
        processes.first(lambda: self._describe(self._changed.fields))
        self._open_record()
        with self.phase("warm-up"):
            params = warm_up(
                training, initial_params(training), self.writer, self.heartbeat, self._prompter,
                self._taught,
            )
        state = initial_state(training, params, self._factors)
        self._factors = None
        keep_base(training, state, self._mirror.workdir)
        if training.config.gate.required:
            require(self.setup, policy(training, state), self.heartbeat)
        self.state = state  # only now a stop request finds something to save

    def _continue(self) -> None:
        workdir, training, changed = self._mirror.workdir, self.setup.training, self._changed
        with self.phase("restore"):
            self.state, meta = resume.restore(
                self._checkpoints, training, self.snapshots, changed, workdir
            )
        held_out = self._evaluator.digest
        of_data = resume.move_to_other_data(meta, self._batches, held_out, changed, workdir)
        fields = dict(changed.fields) | of_data
        self.source.set_state(meta["source"])
        self.done = self.saved = meta["step"]
        self.version = meta["version"]
        self._is_rewarded = self.done > 0
        of_rates = lambda: resume.changed_rates(self.folder, training.config, self.state)
        rates = processes.first(of_rates)
        processes.first(lambda: self._describe(fields))
        self._open_record(self.done)
        processes.report(f"continuing {workdir} after step {self.done}")
        for line in changes.messages(fields, self.setup.engine.config.numerics) + rates:
            processes.report(line)

    def _describe(self, fields: Mapping[str, list]) -> None:
        before = saved(self.folder, "changes") or []
        write_run_files(
            self.folder, self.setup.config.to_dict(), self._pins,
            changes.record(before, self.done, fields),
        )

    def _open_record(self, resume_step: int | None = None) -> None:
        if not processes.is_first():
            return
        config = self.setup.config
        # TensorBoard and the sinks are told of every attempt, the record of the last one's steps.
        about = str(self.folder), saved(self.folder, "run_id"), config.to_dict()
        made = [sinks.make(name, *about) for name in config.metrics.sinks]
        is_compact = config.metrics.record == "compact"
        self.writer = MetricsWriter(self.folder, resume_step, made, is_compact)
        self._samples = samples.open_file(self.folder, resume_step)
        self._probabilities = probabilities.open_file(self.folder, resume_step)
        if self.writer.lost_seconds:
            self._timer.add("lost", self.writer.lost_seconds)

    def close(self) -> None:
        """Ends background work and closes the run's files."""
        self.source.close(is_over=self.done == self.setup.config.steps)
        if self.setup.config.rollout.driver == "external":
            self.setup.fleet.close()
        self._prompter.close()
        self.writer.close()
        for file in (self._samples, self._probabilities):
            if file is not None:
                file.close()

    def heartbeat(self) -> None:
        """Reports progress to the watchdog. Raises Interrupted if the step must be given up. All
        processes call it at the same places."""
        self._watchdog.heartbeat()
        self._interrupt.check()

    def alive(self) -> None:
        """Reports progress where a step cannot be given up: its update is made and not yet on
        record."""
        self._watchdog.heartbeat()

    def stop_if_asked(self) -> None:
        """Raises Interrupted between steps, if the run was asked to stop."""
        if self._interrupt.is_agreed():
            raise Interrupted

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step, and names it as `named` does."""
        with self.named(name), self._timer(name):
            yield

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Names a phase to the watchdog, and to the profiler where that is on."""
        self._watchdog.heartbeat(f"step {self.done + 1}, {name}")
        with jax.profiler.TraceAnnotation(name):
            yield

    def check_rewards(self, step: int, samples: list[Sample]) -> None:
        """Raises ValueError for rewards that cannot be trained on."""
        config, field = self.setup.config, "reward.name"
        if config.task.environment or config.rollout.harness:
            field = "task.environment" if config.task.environment else "rollout.harness"
        check_rewards(step, samples, self.rewards.last_error, not self._is_rewarded, field)
        if "reward_components" in self.setup.training.correction.needs:
            check_components(samples)
        if not self._is_rewarded and (unused := self.rewards.unused_weights()):
            processes.report(
                f"warning: reward.weights names {', '.join(unused)}, which no result has had so far",
                sys.stderr,
            )
        self._is_rewarded = True

    def distill(self, step: int, rows: Rows) -> dict[str, float]:
        """Trains the drafter on the samples of a step, where that is due, and returns metrics."""
        if self._distiller is None:
            return {}
        with self.phase("distill"):
            drafter, values = self._distiller.update(self.state["drafter"], rows, step, self.version)
            self.state = self.state | {"drafter": drafter}
        return values

    def sync_drafter(self) -> None:
        """Gives the samplers the trained drafter, where the policy's next version may sync."""
        if self._distiller is None:
            return
        if self._drafted is None or self.version - self._drafted >= self.setup.schedule.sync_every:
            drafter, self._drafted = self.state["drafter"], self.version
            self.setup.sync_drafter(drafter.network.params, int(drafter.version))

    def compare(self, step: int, rows: Rows) -> None:
        """Raises RuntimeError where the processes do not hold the same batch."""
        if step % self.setup.config.processes.consistency_every:
            return
        batch = {f"batch.{name}": x for name, x in rows.items()}
        if difference := processes.difference(self.source.sync_digest() | batch):
            raise RuntimeError(
                f"step {step}: {difference}; the run stops, because the processes would diverge. "
                "The same command on all hosts continues from the last checkpoint"
            )

    def data_metrics(self, drawn: list[Sample]) -> dict[str, float]:
        """Counts the examples that are left out, and tokens that the tokenizer does not know."""
        trajectories = [s.trajectory for s in drawn]
        return {
            "data/bad_examples": self._data.left_out,
            **unknown_ids(trajectories, self.setup.tokenizer),
        }

    def record(
        self, step: int, values: dict[str, float], drawn: list[Sample], rows: Rows, start: float
    ) -> None:
        """Writes the metrics of a step that began at `start`, and its samples where these are
        due."""
        config = self.setup.config.metrics
        self._timer.add("step", time.monotonic() - start)
        times = self._timer.collect() | goodput.memory()
        if seconds := times.get("time/rollout_s"):  # a batch may have been complete before its step
            times["time/rollout_tokens_per_s"] = rows["sampled"].sum() / seconds
        self.writer.write(step, "train", values | times)
        if config.samples_every and step % config.samples_every == 0:
            self._write_samples(samples.of_step(
                step, drawn, rows, self.trainer.weights, self.setup.tokenizer.decode,
                config.samples, self.setup.tokenizer.backend.id_to_token,
            ))
            if self._probabilities is not None:
                self._probabilities.write(json.dumps(probabilities.counted(step, *both_logps(rows))))
        self.done = step

    def _write_samples(self, lines: list[dict]) -> None:
        for line in lines:
            if self._samples is not None:
                self._samples.write(json.dumps(line))

    def _has_evaluation(self) -> bool:
        """Whether the last step's is on record: a run that was interrupted leaves it out."""
        return any((r["step"], r["phase"]) == (self.done, "eval") for r in read(self.folder))

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return step % self.setup.config.eval.every == 0 or step == self.setup.config.steps

    def evaluate(self) -> None:
        """Measures the held-out reward and accuracy of the learner itself: of its weights and
        numerics, not the sampler's. Where engines of others sample, it is theirs with its weights."""
        start, compiled, step = time.monotonic(), goodput.compile_seconds(), self.done
        self._watchdog.heartbeat(f"evaluation at step {step}")
        self.source.release_cache()  # there is room for one cache
        scheduler = self.setup.evaluating(self.policy, self.version, self.heartbeat)
        total, title = 2 * self.setup.config.eval.prompts, f"evaluation at step {step}"
        shown = Progress(total, title, is_shown=processes.is_first())
        with contextlib.closing(scheduler), shown as progress:
            values = self._evaluator.run(scheduler, self.rewards, step, progress, self.heartbeat)
        compiled = goodput.compile_seconds() - compiled
        self._timer.add("compile", compiled)
        seconds = time.monotonic() - start - compiled
        values["eval/bad_examples"] = self._evaluator.left_out
        self.writer.write(step, "eval", values | {"time/eval_s": seconds})
        self._write_samples(samples.of_evaluation(
            step, self._evaluator.greedy, self.setup.tokenizer.decode,
            self.setup.config.metrics.samples, self.setup.tokenizer.backend.id_to_token,
        ))
        self.last_eval = values
        processes.report(f"step {step}: {evaluate.summary(values)}")

    def save(self) -> None:
        """Saves in the background; the time of the blocking part counts to the next step."""
        with self.phase("checkpoint"), self._interrupt.saving():
            resume.save(
                self._checkpoints, self.done, self.version, self.state, self.snapshots,
                self.source.get_state(self.version), self._evaluator.digest,
            )
        self.saved = self.done

    def keep(self) -> None:
        """Saves the steps since the last checkpoint, where there are any."""
        if self.state is not None and self.saved != self.done:
            self.save()

    def stop(self) -> Interrupted:
        """Saves a checkpoint after an interruption, and returns the exception to raise."""
        if self.state is None:
            return Interrupted("stopped before there was anything to save")
        self.keep()
        return Interrupted(f"stopped after step {self.done}; the same command continues")


@contextlib.contextmanager
def profiled(folder: pathlib.Path, step: int, profile_steps: Collection[int]) -> Iterator[None]:
    """Traces a step where it is one of `profile_steps`."""
    target, is_traced = str(folder / "profile" / f"step{step}"), step in profile_steps
    traced = jax.profiler.trace(target) if is_traced else contextlib.nullcontext()
    with traced, jax.profiler.StepTraceAnnotation("step", step_num=step):
        yield


@contextlib.contextmanager
def opened(
    config: ml_collections.ConfigDict, workdir: str, change: Sequence[str]
) -> Iterator[Run]:
    """Sets a run up and closes it: saves where it is interrupted, and writes the report in the end.
    See `run`."""
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(config.checkpoint.grace))
        pins, config = _pinned(config, workdir)
        setup = build(config)
        chosen = setup.training.correction, setup.schedule, setup.replay
        for doubt in validate.doubts(config, *chosen):
            processes.report(f"warning: {doubt}", sys.stderr)
        processes.first(lambda: sinks.check(config.metrics.sinks))
        if config.task.environment and (rewrites := setup.suffixes.rewrites):
            processes.report(
                f"warning: the chat template changes earlier turns ({', '.join(rewrites)}); the ids of "
                "an episode stay as they were sampled, and episodes/template_realigns and "
                "episodes/template_forks count the turns where a render would differ", sys.stderr,
            )
        if config.rollout.harness:
            live.check_files(live.at_once(config, setup.schedule))
            setup.sessions.enter()
            stack.callback(setup.sessions.leave)
        if setup.training.recompute_reason:
            processes.report(f"score and update are two programs: {setup.training.recompute_reason}")
        mirror = storage.Mirror(workdir)
        folder = mirror.folder
        processes.first(lambda: stack.enter_context(lock.locked(folder)))
        lock.check_shared(workdir, folder)
        fields = processes.first(lambda: changes.find(workdir, config.to_dict(), change))
        processes.first(lambda: stack.enter_context(mirror).fetch())
        watchdog = stack.enter_context(Watchdog(folder, config.watchdog.timeout))
        checkpoints = stack.enter_context(
            Checkpoints(workdir, config.checkpoint.keep, before_commit=mirror.upload)
        )
        rewards = stack.enter_context(worker(
            config.reward, heartbeat=watchdog.heartbeat,
            **({"share": processes.share} if config.rollout.driver != "ray" else {}),
            failures=Failures(
                folder / failures.FILE_NAME if processes.is_first() else None,
                lambda text: processes.report(text, sys.stderr),
            ),
        ))
        changed = Changes(tuple(change), fields)
        r = Run(setup, mirror, checkpoints, rewards, watchdog, interrupt, pins, changed)
        if setup.schedule.on_arrival and (why := arriving.accumulation_blocker(setup.training)):
            processes.report(f"the learner waits for whole batches: {why}")
        try:
            yield r
            interrupt.acknowledge()  # what is left is done however long it takes
        except Interrupted:
            interrupt.acknowledge()
            raise r.stop() from None
        except (SamplerLost, MismatchError):
            with contextlib.suppress(SamplerLost, MismatchError):
                r.keep()
            raise
        finally:
            r.close()
        if processes.is_first():
            from jaxrl_tis.report import page  # matplotlib, which no step waits for

            watchdog.heartbeat("report")
            page.write([folder], folder / "report.html")
        processes.report(f"report: {mirror.workdir / 'report.html'}")


def _pinned(
    config: ml_collections.ConfigDict, workdir: str
) -> tuple[dict[str, str], ml_collections.ConfigDict]:
    """Returns (revisions of what comes from the hub, the config with these and with a date). Every
    process, and every start of this run, renders its prompts with the same date."""
    pins = processes.first(lambda: hub.pins(config.to_dict(), saved(workdir, "pins") or {}))
    values = hub.replaced(config.to_dict(), pins)
    values["task"]["date"] = processes.first(lambda: date(values, workdir))
    return pins, ml_collections.ConfigDict(values)


def run(
    config: ml_collections.ConfigDict, workdir: str, profile_steps: Collection[int] = (),
    change: Sequence[str] = (),
) -> dict[str, float]:
    """Trains to config.steps, or continues the run that `workdir` holds; returns the last eval.

    `profile_steps` are traced, each into WORKDIR/profile/step<N>, with its phases by name. `change`
    names fields, and groups of them, that may differ from those that the run had before.

    Raises:
      ValueError, FileNotFoundError: the config, data or model cannot be used, or another process
        runs in the folder; before any step.
      FloatingPointError: a loss or gradient is not finite; the last checkpoint is intact.
      MismatchError, SamplerLost: learner and sampler are too far apart, or no engine answers; the
        steps before are saved.
      Interrupted: by a signal; saved, and the same call continues.
    """
    # Set up: config, programs, folder, data, source of rollouts.
    with opened(config, workdir, change) as r:
        config, trainer, source, snapshots = r.setup.config, r.trainer, r.source, r.snapshots

        # Begin: at step 0, or where the newest checkpoint ends.
        r.begin()
        steps = range(r.done + 1, config.steps + 1)
        with Progress(len(steps), "training", is_shown=processes.is_first()) as progress:
            for step in steps:
                start = time.monotonic()
                with profiled(r.folder, step, profile_steps):
                    # Sync weights
                    with r.phase("sync"):
                        params = r.policy
                        r.sync_drafter()
                        if source.publish(params, r.version):
                            snapshots.publish(params, r.version)

                    if r.accumulates:
                        # Rollout and update: the gradient of each group as it arrives
                        with r.named("update"):
                            r.state, drawn, rows, measured = arriving.update_arriving(
                                trainer, r.state, source.parts(step), snapshots, step, r.version,
                                r.phase,
                            )
                        values = source.metrics()
                        r.check_rewards(step, drawn)
                        r.compare(step, rows)
                    else:
                        # Rollout
                        with r.named("rollout"):
                            drawn, values = next_batch(source, step)
                        r.check_rewards(step, drawn)

                        # Score
                        with r.phase("score"):
                            known_logps = snapshots.pop_logps([s.trajectory for s in drawn])
                            rows = trainer.score(r.state, drawn, snapshots, known_logps)
                            check_scores(step, trainer.non_finite(r.state, rows), r.saved)
                        r.compare(step, rows)

                        # Update
                        with r.phase("update"):
                            r.state, rows, measured = trainer.update(r.state, rows, step, r.version)
                    r.version += 1
                    values |= r.distill(step, rows)

                # Measure
                probed, too_far = probe.of_step(
                    r.setup, step, rows, r.policy, source.reduce_staleness, source.release_cache,
                    r.alive,
                )
                values |= probed | measured | sample_metrics(drawn, rows, config)
                source.observe(values)
                values |= r.data_metrics(drawn)
                check_finite(
                    step, values, r.saved, functools.partial(trainer.non_finite, r.state, rows)
                )
                if not rows["mask"].any():
                    idle = f"step {step}: nothing to train on; the weights stay as they were"
                    processes.report(idle, sys.stderr)

                # Record
                r.record(step, values, drawn, rows, start)
                if too_far:
                    r.save()
                    raise MismatchError(too_far)
                r.stop_if_asked()

                # Evaluate
                if r.is_due(step):
                    r.evaluate()

                # Save
                if step % config.checkpoint.every == 0 or step == config.steps:
                    r.save()
                reward = values.get("reward/mean", math.nan)
                progress.update(1, reward=reward, dp_max=values["training/rollout_probs_diff_max"])
    return r.last_eval
