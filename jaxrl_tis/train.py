"""The run: `run(config, workdir)` at the end of this file is the whole loop."""

import contextlib
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import ml_collections

from jaxrl_tis import evaluate, rollouts, validate
from jaxrl_tis.build import Setup, build
from jaxrl_tis.data import pipeline, tasks
from jaxrl_tis.data.pipeline import Batches
from jaxrl_tis.data.rewards import SCORE, RewardWorker, worker
from jaxrl_tis.gate import probe
from jaxrl_tis.gate.report import MismatchError, require
from jaxrl_tis.learner import arriving, optimizer
from jaxrl_tis.learner.state import abstract_state, initial_params, initial_state
from jaxrl_tis.learner.trainer import Trainer, sample_metrics
from jaxrl_tis.learner.warmup import examples, warm_up
from jaxrl_tis.record import changes, failures, goodput, samples, sinks
from jaxrl_tis.record.changes import Changes
from jaxrl_tis.record.checkpoint import Checkpoints, Misfit
from jaxrl_tis.record.failures import Failures
from jaxrl_tis.record.metrics import LineFile, MetricsWriter, NoRecord, Timer, read
from jaxrl_tis.record.progress import Progress
from jaxrl_tis.record.provenance import date, facts, saved, saved_config, write_run_files
from jaxrl_tis.rollouts.prompts import Checked
from jaxrl_tis.runtime import hub, lock, processes, storage
from jaxrl_tis.runtime.cli import Interrupted
from jaxrl_tis.runtime.interrupt import Interrupt
from jaxrl_tis.runtime.watchdog import Watchdog

OF_EXAMPLES = ("examples", "length")  # parts of a position's fingerprint that no field of the config says


def check_finite(step: int, values: dict[str, float], saved: int | None) -> None:
    """Raises FloatingPointError naming the step and the terms that are not finite."""
    bad = {name: float(v) for name, v in values.items() if not math.isfinite(v)}
    # An unclamped divergence may overflow by itself; only what moves the weights stops the run.
    terms = {n: v for n, v in bad.items() if n.endswith(("_loss", "grad_norm", "reward/mean"))}
    if terms:
        named = ", ".join(f"{n} is {v}" for n, v in terms.items())
        rest = f" and the checkpoint of step {saved} is intact" if saved is not None else ""
        raise FloatingPointError(f"step {step}: {named}; the run stops here{rest}")


def check_rewards(
    step: int, drawn: list[rollouts.Sample], last_error: str, is_first: bool
) -> None:
    """Raises ValueError where no answer of the first batch has a reward; says so of later ones."""
    if not all(sample.is_failed for sample in drawn):
        return
    found = f"step {step}: all {len(drawn)} rewards failed. The last error: {last_error}"
    if is_first:
        raise ValueError(
            f"{found}. Mend the function that reward.name names; WORKDIR/{failures.FILE_NAME} has the "
            "errors by kind, with the last texts of each"
        )
    processes.say(found, sys.stderr)


class Run:
    """The moving parts of a run: state, source of rollouts, record and checkpoints.

    Attributes:
      state: None until there is one.
      done: the last step that is complete; saved: the last that is saved, if there is one.
      version: of the policy in `state`: how many steps have updated it.
    """

    def __init__(
        self, setup: Setup, mirror: storage.Mirror, checkpoints: Checkpoints, rewards: RewardWorker,
        watchdog: Watchdog, interrupt: Interrupt, profile_steps: Collection[int] = (),
        pins: Mapping[str, str] = {}, changed: Changes = Changes(),
    ):
        config = setup.config
        self.setup, self.rewards, self._checkpoints = setup, rewards, checkpoints
        self._mirror, self._workdir = mirror, mirror.folder
        self._watchdog, self._interrupt = watchdog, interrupt
        self._timer = Timer(goodput.compile_seconds)
        self._prompter = rollouts.Prompter(setup.tokenizer, config.task)
        self._evaluator = evaluate.Evaluator(config, self._prompter, watchdog.beat)
        is_new = checkpoints.latest() is None
        self._taught = examples(setup, self._prompter, watchdog.beat) if is_new else None
        self.trainer = Trainer(setup)
        self._old = self.trainer.old_policies()
        self.source = self._make_source()
        self._accumulates = setup.mode.on_arrival and arriving.accumulation_blocker(setup) is None
        self.state, self.done, self.saved, self.version = None, 0, None, 0
        self.writer: MetricsWriter | NoRecord = NoRecord()
        self._samples: LineFile | None = None
        self._profile_steps, self._pins, self._changed = profile_steps, pins, changed
        self.last_eval: dict[str, float] = {}
        self._is_rewarded = False  # a batch of this run was

    def _make_source(self) -> rollouts.RolloutSource:
        setup, config = self.setup, self.setup.config
        self._batches = batches = Batches(
            config.task.name, config.task.params, batch_size=config.rollout.prompts,
            seed=config.seed, **processes.shard(), check=self._check,
        )
        self._data = batches.source
        groups = rollouts.Groups(
            config, self._prompter, self.rewards, "greedy_rewards" in setup.correction.needs
        )
        starts = [functools.partial(setup.scheduler, engine) for engine in setup.engines]
        made = dict(load=setup.serving_params, start=starts[0], pulse=self.pulse)
        if setup.mode.is_sync and not config.rollout.replay:
            return rollouts.Collector(config, groups, batches, self._timer, **made)
        ahead = config, setup.mode, groups, batches, self._timer
        if config.rollout.driver == "threads":
            return rollouts.Threads(
                *ahead, load=setup.served_params, starts=starts, slots=setup.engine.slots,
                pulse=self.pulse,
            )
        if config.rollout.driver == "processes":
            return rollouts.Remote(
                *ahead, load=setup.serving_params, engine=setup.engine, facts=setup.facts,
                pulse=self.pulse,
            )
        return rollouts.Asynchronous(
            *ahead, slots=setup.engine.slots, arrived=self._old.arrived, **made
        )

    def _check(self, source: tasks.Source) -> Checked:
        reject = rollouts.lacks_answer(self.setup.config.reward.name)
        return self._prompter.checked(source, "training data", reject, pulse=self._watchdog.beat)

    def begin(self) -> None:
        """Makes the state at step 0, or reads that of the newest checkpoint, and evaluates it where
        that is due and was not done."""
        self._timer.add("init", goodput.seconds_since_start())
        if not processes.is_alone():
            agreed = facts(self.setup.config.to_dict()) | self.source.facts()
            agreed |= {"--change": self._changed.named, "held-out examples": self._evaluator.digest}
            if difference := processes.difference(agreed):
                raise ValueError(difference)
        if self._checkpoints.latest() is None:
            self._start()
        else:
            self._continue()
        self.stop_if_asked()
        if self._is_due(self.done) and not processes.first(self._has_evaluation):
            self.evaluate()
        if self.saved is None:
            self.save()

    def _start(self) -> None:
        # From here on nothing is refused for its config.
        processes.first(lambda: self._describe(self._changed.fields))
        self._open_record()
        with self._phase("warm-up"):
            params = warm_up(
                self.setup, initial_params(self.setup), self.writer, self.pulse, self._prompter,
                self._taught,
            )
        self.state = initial_state(self.setup, params)
        if self.setup.config.gate.required:
            require(self.setup, self.state["policy"].params)

    def _continue(self) -> None:
        with self._phase("restore"):
            try:
                self.state, meta = self._checkpoints.restore(self._abstract_state)
            except Misfit as error:
                if not (named := self._changed.named_fields()):
                    raise
                raise ValueError(
                    f"a run cannot go on with this change ({named}), as its checkpoints do not have the "
                    "parameters that it needs: use the old values, or a new workdir"
                ) from error
        needed = "step", "version", "source", "held_out", "old_policies"
        if missing := [name for name in needed if name not in meta]:
            raise ValueError(
                f"the checkpoints in {self._mirror.workdir} say nothing of {' and '.join(missing)}: they "
                "are of another version of jaxrl_tis; use that one, or a new workdir"
            )
        fields = dict(self._changed.fields) | self._of_other_data(meta)
        self.source.set_state(meta["source"])
        self._old.restore(self.state.pop("old", {}), meta["old_policies"])
        self.done = self.saved = meta["step"]
        self.version = meta["version"]
        self._is_rewarded = self.done > 0
        rates = processes.first(self._rates)
        processes.first(lambda: self._describe(fields))
        self._open_record(self.done)
        processes.say(f"continuing {self._mirror.workdir} after step {self.done}")
        for line in changes.told(fields, self.setup.config.model.numerics) + rates:
            processes.say(line)

    def _of_other_data(self, meta: dict) -> dict[str, list]:
        """Moves the position that `meta` holds to other data, where --change names them, and returns
        what is other about the data, as `Changes.fields` has it.

        Raises ValueError for held-out examples that changed in their place and are not named; the
        source does so for those of training.
        """
        fields, state = {}, meta["source"]["batches"]
        differing = self._batches.differing(state)
        if differing and all(self._changed.names(pipeline.FIELDS[name]) for name in differing):
            meta["source"]["batches"] = self._batches.moved(state)
            fields |= {f"data.{name}": pair for name, pair in differing.items() if name in OF_EXAMPLES}
        held_out, mine = meta["held_out"], self._evaluator.digest
        is_meant = any(map(self._changed.names, ("eval.params", "task.params")))
        is_meant |= any(changes.is_within(field, ("eval.params",)) for field in self._changed.fields)
        if held_out != mine and not is_meant:
            raise ValueError(
                f"the held-out examples are others than those that the run in {self._mirror.workdir} was "
                "measured on. Use those, a new workdir, or --change=eval.params to go on with these"
            )
        return fields | ({"data.held_out": [held_out, mine]} if held_out != mine else {})

    def _rates(self) -> list[str]:
        """Says which learning rates the next update has, where the configuration before this start
        gives another."""
        new, old, lines = self.setup.config, ml_collections.ConfigDict(saved_config(self._workdir)), []
        for section, network in (("optimizer", "policy"), ("critic", "critic")):
            if network in self.state:
                count = optimizer.num_updates(self.state[network].opt_state)
                before, now = (float(optimizer.rate_at(c, section, count)) for c in (old, new))
                if before != now:
                    lines.append(f"the learning rate of the {network} is {now:.4g} now, and was {before:.4g}")
        return lines

    def _abstract_state(self, meta: dict) -> dict:
        """Returns the shapes of what a checkpoint with this meta holds."""
        abstract = abstract_state(self.setup)
        if "old_policies" not in meta:
            return abstract
        old = self._old.abstract(meta["old_policies"], abstract["policy"].params)
        return abstract | ({"old": old} if old else {})

    def _describe(self, fields: Mapping[str, list]) -> None:
        before = saved(self._workdir, "changes") or []
        write_run_files(
            self._workdir, self.setup.config.to_dict(), self._pins,
            changes.record(before, self.done, fields),
        )

    def _open_record(self, resume_step: int | None = None) -> None:
        if not processes.is_first():
            return
        config = self.setup.config
        # TensorBoard and the sinks are told of every attempt, the record of the last one's steps.
        about = str(self._workdir), saved(self._workdir, "run_id"), config.to_dict()
        made = [sinks.make(name, *about) for name in config.metrics.sinks]
        is_compact = config.metrics.record == "compact"
        self.writer = MetricsWriter(self._workdir, resume_step, made, is_compact)
        self._samples = samples.open_file(self._workdir, resume_step)
        if self.writer.lost_seconds:
            self._timer.add("lost", self.writer.lost_seconds)

    def close(self) -> None:
        """Ends what works in the background, and closes what is written to."""
        self.source.close(is_over=self.done == self.setup.config.steps)
        self.writer.close()
        if self._samples is not None:
            self._samples.close()

    def pulse(self) -> None:
        """Says that the run came on; Interrupted where the step is to be given up. All processes
        call it at the same places."""
        self._watchdog.beat()
        self._interrupt.check()

    def stop_if_asked(self) -> None:
        """Raises Interrupted between steps, if the run was asked to stop."""
        if self._interrupt.is_agreed():
            raise Interrupted

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._named(name), self._timer(name):
            yield

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """Names a phase to the watchdog, and to the profiler where that is on."""
        self._watchdog.beat(f"step {self.done + 1}, {name}")
        with jax.profiler.TraceAnnotation(name):
            yield

    def _profiled(self, step: int) -> contextlib.AbstractContextManager:
        if step not in self._profile_steps:
            return contextlib.nullcontext()
        return jax.profiler.trace(str(self._workdir / "profile" / f"step{step}"))

    def take(self, step: int) -> dict[str, float]:
        """Takes a step, with the evaluation and the checkpoint that are due after it, and returns
        its metrics."""
        config, start = self.setup.config, time.monotonic()
        with self._profiled(step), jax.profiler.StepTraceAnnotation("step", step_num=step):
            with self._phase("sync"):
                params = self.state["policy"].params
                if self.source.publish(params, self.version):
                    self._old.put(self.version, params)
            if self._accumulates:
                drawn, values, rows, measured = self._accumulate(step)
            else:
                drawn, values, rows, measured = self._draw_and_update(step)
            self.version += 1

        probed, too_far = self._probe(step, rows)
        values |= probed
        values |= measured | sample_metrics(drawn, rows, config)
        values["data/bad_records"] = self._data.left_out
        values |= rollouts.unknown_ids([s.trajectory for s in drawn], self.setup.tokenizer)
        check_finite(step, values, self.saved)
        if not rows["mask"].any():
            processes.say(f"step {step}: nothing to train on; the weights stay as they were", sys.stderr)
        self._timer.add("step", time.monotonic() - start)
        times = self._timer.collect() | goodput.memory()
        times["time/rollout_tokens_per_s"] = rows["sampled"].sum() / times["time/rollout_s"]
        self.writer.write(step, "train", values | times)
        if config.metrics.samples_every and step % config.metrics.samples_every == 0:
            self._write_samples(samples.of_step(
                step, drawn, rows, self.trainer.weights, self.setup.tokenizer.decode,
                config.metrics.samples,
            ))
        self.done = step

        if too_far:
            self.save()
            raise MismatchError(too_far)
        self.stop_if_asked()
        if self._is_due(step):
            self.evaluate()
        if step % config.checkpoint.every == 0 or step == config.steps:
            self.save()
        return values

    def _probe(self, step: int, rows: dict) -> tuple[dict[str, float], str | None]:
        """Measures the parts of a batch's gap where that is due, and does what is to be done above
        the budget. `rows` have the log-probs of before the update. Returns metrics, and why the run
        is to stop, if it is."""
        every, action = self.setup.config.rollout.probe_every, self.setup.config.rollout.on_budget
        if not every or step % every:
            return {}, None
        parts = probe.split(self.setup, rows, self.state["policy"].params)
        found, too_far = probe.verdict(parts, probe.exceeded(self.setup, parts)), None
        if found:
            done = f"; {self.source.tighten()}" if action == "sync" else ""
            processes.say(f"step {step}: {found}{done}", sys.stderr)
            if action == "stop":
                too_far = f"step {step}: {found}; the run stops, as rollout.on_budget says"
        return probe.metrics(parts), too_far

    def _draw_and_update(self, step: int) -> tuple:
        """Draws a batch, scores it and updates the state; returns (samples, metrics of how they came
        about, rows, metrics of the update)."""
        with self._named("rollout"):
            drawn, values = self.source.next(step)
        self._check_rewards(step, drawn)
        with self._phase("score"):
            known = self._old.taken([s.trajectory for s in drawn])
            rows = self.trainer.score(self.state, drawn, self._old, known)
        self._compare(step, rows)
        with self._phase("update"):
            self.state, rows, measured = self.trainer.update(self.state, rows, step, self.version)
        return drawn, values, rows, measured

    def _accumulate(self, step: int) -> tuple:
        """As `_draw_and_update`, of a batch whose gradient is accumulated as its groups come."""
        with self._named("update"):
            self.state, drawn, rows, measured = arriving.update_arriving(
                self.trainer, self.state, self.source.parts(step), self._old, step, self.version
            )
        self._check_rewards(step, drawn)
        self._compare(step, rows)
        return drawn, self.source.metrics(), rows, measured

    def _check_rewards(self, step: int, drawn: list[rollouts.Sample]) -> None:
        check_rewards(step, drawn, self.rewards.last_error, is_first=not self._is_rewarded)
        takes_parts = "reward_components" in self.setup.correction.needs
        if takes_parts and any(SCORE in s.components for s in drawn):
            raise ValueError(
                f"the reward returned a {SCORE!r} beside its parts, and this advantage takes the "
                "parts alone: return them without it"
            )
        if not self._is_rewarded and (unused := self.rewards.unused_weights()):
            processes.say(
                f"warning: reward.weights names {', '.join(unused)}, which no result has had so far",
                sys.stderr,
            )
        self._is_rewarded = True

    def _write_samples(self, lines: list[dict]) -> None:
        for line in lines if self._samples is not None else ():
            self._samples.write(json.dumps(line))

    def _compare(self, step: int, rows: dict) -> None:
        """Raises RuntimeError where the processes do not hold the same batch."""
        if step % self.setup.config.processes.check_every:
            return
        batch = {f"batch.{name}": x for name, x in rows.items()}
        if difference := processes.difference(self.source.facts() | batch):
            raise RuntimeError(f"step {step}: {difference}; the run stops, as it would diverge")

    def _has_evaluation(self) -> bool:
        """Whether the last step's is on record: a run that was interrupted leaves it out."""
        return any((r["step"], r["phase"]) == (self.done, "eval") for r in read(self._workdir))

    def _is_due(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        return step % self.setup.config.eval.every == 0 or step == self.setup.config.steps

    def evaluate(self) -> None:
        """Measures the held-out reward and accuracy of the learner itself: of its weights and
        numerics, not the sampler's."""
        start, compiled, step = time.monotonic(), goodput.compile_seconds(), self.done
        self._watchdog.beat(f"evaluation at step {step}")
        engine = self.setup.learner_engine
        self.source.rest()  # there is room for one cache
        params = engine.load(self.state["policy"].params)
        scheduler = self.setup.scheduler(engine, params, self.version)
        total = 2 * self.setup.config.eval.prompts
        title = f"evaluation at step {step}"
        with Progress(total, title, is_shown=processes.is_first()) as progress:
            values = self._evaluator.run(scheduler, self.rewards, step, progress, self.pulse)
        compiled = goodput.compile_seconds() - compiled
        self._timer.add("compile", compiled)
        seconds = time.monotonic() - start - compiled
        values["eval/bad_records"] = self._evaluator.left_out
        self.writer.write(step, "eval", values | {"time/eval_s": seconds})
        self._write_samples(samples.of_evaluation(
            step, self._evaluator.greedy, self.setup.tokenizer.decode,
            self.setup.config.metrics.samples,
        ))
        self.last_eval = values
        shown = lambda name: f"{values[name]:.3f}" if name in values else "unknown"
        accuracy, reward = (
            f"{shown(f'eval/greedy_{of}')} greedy, {shown(f'eval/sampled_{of}')} sampled"
            for of in ("accuracy", "reward")
        )
        processes.say(f"step {step}: held-out accuracy {accuracy}; reward {reward}")

    def save(self) -> None:
        """Saves in the background; the time of the blocking part counts to the next step."""
        with self._phase("checkpoint"):
            source = self.source.get_state(self.version)
            old, of_old = self._old.state()
            meta = {
                "step": self.done, "version": self.version, "held_out": self._evaluator.digest,
                "source": source, "old_policies": of_old,
            }
            self._checkpoints.save(self.done, self.state | ({"old": old} if old else {}), meta)
        self.saved = self.done

    def stop(self) -> Interrupted:
        """Saves what is not saved, after an interruption, and returns what to raise."""
        if self.state is None:
            return Interrupted("stopped before there was anything to save")
        if self.saved != self.done:
            self.save()
        return Interrupted(f"stopped after step {self.done}; the same command continues")


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
      MismatchError: with config.gate.required, learner and sampler are too far apart
        before the first step.
      Interrupted: by a signal; saved, and the same call continues.
    """
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt(config.checkpoint.grace))
        pins = processes.first(
            lambda: hub.pins(config.to_dict(), saved(workdir, "pins") or {})
        )
        values = hub.replaced(config.to_dict(), pins)
        # Every process, and every start of this run, renders prompts of one date.
        values["task"]["date"] = processes.first(lambda: date(values, workdir))
        config = ml_collections.ConfigDict(values)
        setup = build(config)
        for doubt in validate.doubts(config, setup.correction):
            processes.say(f"warning: {doubt}", sys.stderr)
        if setup.why_scored:
            processes.say(f"score and update are two programs: {setup.why_scored}")
        mirror = storage.Mirror(workdir)
        folder = mirror.folder
        processes.first(lambda: stack.enter_context(lock.locked(folder)))
        _check_shared(workdir, folder)
        fields = processes.first(lambda: changes.find(workdir, config.to_dict(), change))
        processes.first(lambda: stack.enter_context(mirror).fetch())
        watchdog = stack.enter_context(Watchdog(folder, config.watchdog.timeout))
        checkpoints = stack.enter_context(
            Checkpoints(workdir, config.checkpoint.keep, before_commit=mirror.upload)
        )
        rewards = stack.enter_context(worker(
            config.reward, share=processes.share, pulse=watchdog.beat,
            failures=Failures(
                folder / failures.FILE_NAME if processes.is_first() else None,
                lambda text: processes.say(text, sys.stderr),
            ),
        ))
        changed = Changes(tuple(change), fields)
        r = Run(setup, mirror, checkpoints, rewards, watchdog, interrupt, profile_steps, pins, changed)
        if setup.mode.on_arrival and (why := arriving.accumulation_blocker(setup)):
            processes.say(f"the learner waits for whole batches: {why}")
        try:
            r.begin()
            _train(r)
        except Interrupted:
            interrupt.obeyed()
            raise r.stop() from None
        finally:
            r.close()
        if processes.is_first():
            from jaxrl_tis.report import page  # matplotlib, which no step waits for

            watchdog.beat("report")
            page.write([folder], folder / "report.html")
        processes.say(f"report: {mirror.workdir / 'report.html'}")
    return r.last_eval


def _check_shared(workdir: str, folder: pathlib.Path) -> None:
    """Raises ValueError where the processes do not work in one folder; `folder` holds the lock."""
    if difference := processes.difference({"workdir": workdir}):
        raise ValueError(difference)
    if processes.is_alone() or storage.is_remote(workdir):
        return
    owner = processes.first((folder / "lock").read_text)
    path = folder / "lock"
    if processes.any_of(not path.exists() or path.read_text() != owner):
        raise ValueError(
            f"--workdir={workdir} is not one folder for all processes: give one on a disk that all of "
            "them see, or gs://BUCKET/FOLDER"
        )


def _train(r: Run) -> None:
    total = r.setup.config.steps
    with Progress(total - r.done, "training", is_shown=processes.is_first()) as progress:
        for step in range(r.done + 1, total + 1):
            values = r.take(step)
            reward = values["reward/mean"] if "reward/mean" in values else math.nan
            progress.update(
                1, reward=reward, dp_max=values["training/rollout_probs_diff_max"]
            )
