"""Every contradiction of a config is named, and all of them at once."""

import itertools
import pathlib
import re
from unittest import mock

import jax
import pytest
from ml_collections import ConfigDict

from configs import default
from jaxrl_tis import build
from jaxrl_tis.data import child
from jaxrl_tis.engine import injection
from jaxrl_tis.kernels import tiles
from jaxrl_tis.learner import correction
from jaxrl_tis.learner.trainer import Trainer
from jaxrl_tis.rollouts import replay, schedules
from jaxrl_tis.validate import doubts, validate
from tests import tiny

EXPERTS = dict(model__num_experts=4, model__router="sigmoid")
DENSE = "is for models with experts; set model.num_experts, or "


def problems(**changes):
    with pytest.raises(ValueError) as error:
        validate(tiny.config(**changes))
    return [line for line in str(error.value).splitlines() if line.startswith("- ")]


def test_a_reward_may_not_take_longer_than_the_watchdog_waits():
    [problem] = problems(reward__timeout=60.0, watchdog__timeout=60.0)
    assert "reward.timeout is 60.0 and watchdog.timeout is 60.0" in problem
    validate(tiny.config(reward__timeout=60.0, watchdog__timeout=0.0))


def test_the_tiny_config_is_sound():
    validate(tiny.config())


@pytest.mark.parametrize("name", [
    "correction.preset", "correction.centre", "correction.aggregation", "correction.kl_placement",
    "engine.quantization", "engine.dtype", "engine.cache_dtype", "model.dtype",
    "model.quantization",
    "model.param_dtype", "model.remat", "optimizer.schedule", "critic.schedule", "task.name",
    "reward.name", "reward.signature", "train.grad_reduce_dtype", "task.on_bad_example",
    "correction.routing", "correction.routing_missing", "model.router", "correction.turn_credit",
])
def test_an_unknown_name_is_refused_with_the_choices(name):
    changes = EXPERTS | {name.replace(".", "__"): "sequence"}
    [problem] = problems(**changes)
    assert problem.startswith(f"- {name} is 'sequence'; choose one of ")
    assert len(problem.split("choose one of ")[1].split(", ")) >= 2


@pytest.mark.parametrize("field", ["template", "system"])
def test_text_of_a_prompt_is_text(field):
    changes = {f"task__{field}": "{prompt} \ud800"}
    with pytest.raises(ValueError, match=rf"task.{field} is .*\\ud800', which holds a lone surrogate"):
        validate(tiny.config(**changes))


def test_variables_and_date_of_a_chat_template():
    validate(tiny.config(task__template_kwargs={"tools": [{"a": 1}]}, task__date="2026-01-31T10:00:00"))
    [problem] = problems(task__template_kwargs={"messages": []})
    assert "task.template_kwargs sets messages" in problem
    [problem] = problems(task__template_kwargs={"x": b""})
    assert "must hold JSON values only" in problem
    [problem] = problems(task__date="31 Jan")
    assert "task.date is '31 Jan'" in problem


def test_a_reward_of_ones_own_needs_a_module():
    validate(tiny.config(reward__name="my.module:function"))
    validate(tiny.config(reward__name="my.module:function, exact"))
    [problem] = problems(reward__name="my.module:function,exactly")
    assert "choose one of exact, judge, last_number, math, parts" in problem


@pytest.mark.parametrize("text", ["drop", "0", "-1.5"])
def test_what_a_failed_reward_is_worth(text):
    validate(tiny.config(reward__on_error=text))


@pytest.mark.parametrize("text", ["", "dropped", "nan", "inf", "1e39", "0,5"])
def test_what_a_failed_reward_cannot_be_worth(text):
    assert problems(reward__on_error=text) == [
        f"- reward.on_error is {text!r}; it must be 'drop' or a number of float32"
    ]


@pytest.mark.parametrize("weight", ["0.1", None, True])
def test_weights_of_components_are_numbers(weight):
    config = tiny.config()
    config.reward.weights = {"format": weight}
    with pytest.raises(ValueError, match="reward.weights.format is .*; it must be a number"):
        validate(config)


COUNTS = [
    "steps", "rollout.prompts", "rollout.group_size", "rollout.max_new_tokens", "engine.slots",
    "engine.steps_per_call", "engine.prefill_batch", "train.minibatches", "train.epochs",
    "train.microbatch_rows", "train.logprob_chunk", "eval.every", "eval.prompts",
    "checkpoint.every", "checkpoint.keep", "warmup.rows", "task.max_prompt_tokens",
    "rollout.max_rounds", "metrics.diagnostics_every", "engine.noise_stages", "reward.workers",
    "model.experts_per_token", "model.expert_dim", "task.max_turns", "task.environment_workers",
    "processes.consistency_every", "model.num_layers", "model.num_kv_heads",
]


def test_counts_are_positive():
    for name, value in itertools.product(COUNTS, (0, -3)):
        found = problems(**{name.replace(".", "__"): value})
        assert f"- {name} is {value}; it must be above 0" in found


@pytest.mark.parametrize("name", [
    "reward.timeout", "task.turn_timeout", "rollout.harness_timeout", "rollout.temperature",
    "engine.noise_end", "model.uaq_scale", "warmup.lr",
    "optimizer.router_bias_rate", "optimizer.eps", "critic.eps",
])
def test_measures_are_positive(name):
    assert problems(**{name.replace(".", "__"): 0.0}) == [f"- {name} is 0.0; it must be above 0"]


@pytest.mark.parametrize("name", ["optimizer.b1", "optimizer.b2", "critic.b1", "critic.b2"])
@pytest.mark.parametrize("value", [1.0, 1.5, -0.1])
def test_decays_are_below_one(name, value):
    expected = f"- {name} is {value}; it must be at least 0 and below 1"
    assert problems(**{name.replace(".", "__"): value}) == [expected]


@pytest.mark.parametrize("name, value", [
    ("watchdog.timeout", -1.0), ("checkpoint.grace", -1.0), ("metrics.samples", -1),
    ("metrics.samples_every", -1), ("critic.value_clip", -0.5),
])
def test_what_is_not_negative(name, value):
    expected = f"- {name} is {value}; it must not be below 0"
    assert problems(**{name.replace(".", "__"): value}) == [expected]


@pytest.mark.parametrize("field", ["mesh.train", "mesh.serve"])
def test_an_axis_of_a_mesh_has_devices(field):
    found = problems(**{field.replace(".", "__"): (1, 1, 1, 0)})
    assert found == [f"- {field} is (1, 1, 1, 0); an axis without a cut is 1"]


@pytest.mark.parametrize("name", ["optimizer.lr", "critic.lr"])
def test_a_run_may_measure_and_not_train(name):
    validate(tiny.config(**{name.replace(".", "__"): 0.0}))
    assert problems(**{name.replace(".", "__"): -0.1}) == [f"- {name} is -0.1; it must not be below 0"]


@pytest.mark.parametrize("changes, words", [
    # 4 prompts * 4 samples = 16 rows
    (dict(train__minibatches=3), ["= 16 rows", "train.minibatches = 3", "microbatch_rows = 4"]),
    (dict(train__microbatch_rows=6), ["= 16 rows", "microbatch_rows = 6"]),
    (dict(mesh__train=(1, 1, 1, 3)), ["rows of 8 tokens", "3 context shards", "pack_length"]),
    (dict(mesh__train=(2, 4, 1)), ["train.microbatch_rows = 4", "8 data shards"]),
    (dict(model__num_heads=3, model__num_kv_heads=2), ["num_heads = 3", "num_kv_heads = 2"]),
    (dict(rollout__overlong_buffer=4), ["overlong_buffer = 4", "max_new_tokens = 3"]),
    (dict(rollout__group_size=1, train__minibatches=1),
     ["group_size is 1", "'grpo'", "at least 2"]),
    (dict(correction__centre="behav"), ["the ratio of objective", "'token_tis'", "factor engine", "twice", "'none'"]),
    (dict(correction__weight="token_tis(cap=0.5)"), ["cap is 0.5 in 'token_tis'"]),
    (dict(correction__weight="seq_tis(cap=0.99)"), ["cap is 0.99 in 'seq_tis'"]),
    (dict(correction__staleness_weight="token_tis(cap=0.9)", correction__centre="prox"), ["cap is 0.9"]),
    (dict(correction__objective="r2vpo(form=survey, r2vpo_lambda=1.0)"),
     ["objective 'r2vpo'", "all samples of a prompt"]),
    (dict(correction__objective="kl_cov(form=code)"), ["Unknown form 'code'; choose paper or"]),
    (dict(correction__weight="token_mis(lower=1.5)"), ["[1.5, 2.0]", "'token_mis'", "ratio 1"]),
    (dict(correction__weight="token_mis(upper=0.9)"), ["[0.0, 0.9]"]),
    (dict(correction__masks="seq_mean_k1(upper=0.9)"), ["0.9]", "'seq_mean_k1'"]),
    (dict(correction__objective="dual_clip(dual_clip=1.0)"), ["dual_clip is 1.0"]),
    (dict(correction__objective="qurl_acr"), ["'qurl_acr'", "'token_tis'", "twice", "'none'"]),
    (dict(correction__objective="a3po", correction__weight="none"),
     ["'a3po'", "distinguishes weight versions"]),
    (dict(correction__objective="fusion_cap", correction__weight="none"), ["'fusion_cap'", "teacher"]),
    # Each factor of the ratio once.
    (dict(correction__staleness_weight="token_vanilla", rollout__schedule="areal"),
     ["the ratio of objective", "staleness weight 'token_vanilla'", "factor staleness", "centre to 'prox'"]),
    (dict(correction__staleness_weight="folded", rollout__schedule="areal"), ["'token_tis'", "factor staleness"]),
    (dict(correction__staleness_weight="folded", correction__weight="none", correction__centre="prox"),
     ["'folded'", "a part of correction.weight"]),
    (dict(correction__staleness_weight="token_tis", correction__centre="behav", correction__weight="none"),
     ["'behav'", "factor staleness", "'token_tis'", "twice"]),
    (dict(correction__centre="prox", rollout__schedule="areal"),
     ["'areal'", "factor staleness", "correction.staleness_weight", "'folded'"]),
    *((dict(correction__objective=objective, rollout__schedule=schedule), [schedule, "factor staleness"])
      for objective in ("reinforce", "gpg") for schedule in ("areal", "one_step", "in_flight")),
    (dict(correction__centre="prox", correction__staleness_weight="token_vanilla", rollout__schedule="areal",
          rollout__old_logp_source="ewma"),
     ["staleness weight 'token_vanilla'", "'ewma'", "not known apart from engine", "'folded'"]),
    (dict(correction__weight="seq_tis(cap=2.0)", correction__masks="token_k2(upper=1.0)"),
     ["'seq_tis'", "whole responses", "'token_k2'"]),
    (dict(correction__masks="token_dp(upper=0.5, of=staleness)"), ["'token_dp'", "remove of=staleness"]),
    (dict(correction__masks="veto & staleness(staleness_max=2)"),
     ["'staleness'", "distinguishes weight versions"]),
    (dict(rollout__old_logp_source="replica"), ["rollout.old_logp_source = 'replica'", "'sync'", "'ring'"]),
    (dict(rollout__snapshots=3), ["rollout.snapshots = 3", "'sync'", "set it to 0"]),
    (dict(rollout__schedule="areal", rollout__snapshots=1), ["snapshots = 1", "4 versions old"]),
    (dict(rollout__schedule="areal(staleness=inf)", rollout__queue=8),
     ["rollout.snapshots = 0", "inf versions old"]),
    (dict(rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica",
          rollout__dynamic_sampling=True), ["'replica'", "rollout.dynamic_sampling", "to ring"]),
    (dict(rollout__schedule="one_step", rollout__old_logp_source="replica"), ["'replica'", "finish later with the old weights"]),
    (dict(rollout__schedule="areal(staleness=4)", rollout__snapshots=4), ["snapshots = 4", "up to 4 versions old"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="none", correction__objective="reinforce"),
     ["weight 'token_tis'", "rollout.old_logp_source is 'none'"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="none", correction__weight="none",
          correction__masks="veto", correction__objective="a3po"), ["mask 'veto'"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="none", correction__weight="none"),
     ["objective 'ppo'", "rollout.old_logp_source is 'none'"]),
    (dict(rollout__replay="newest", rollout__schedule="areal", rollout__old_logp_source="replica"),
     ["'replica'", "rollout.replay = 'newest'", "rollout.old_logp_source to ring"]),
    (dict(rollout__replay="fresh_by_ess", rollout__old_logp_source="ewma", rollout__snapshots=0),
     ["what age does to the ratio", "set it to ring"]),
    (dict(rollout__replay="newest", rollout__snapshots=4), ["snapshots = 4", "up to 4 versions old"]),
    (dict(rollout__replay="newest", correction__objective="reinforce"), ["'newest'", "factor staleness", "correction.staleness_weight"]),
    (dict(rollout__replay="newest", correction__centre="behav", correction__objective="gpg",
          correction__weight="none"), ["factor staleness", "set correction.weight"]),
    (dict(correction__objective="topr"), ["'topr'", "'token_tis'", "correction.weight to 'none'"]),
    (dict(correction__objective="topr_geo"), ["'topr_geo'", "'token_tis'", "correction.weight to 'none'"]),
    (dict(correction__objective="seq_ppo"), ["'seq_ppo'", "'token-mean'", "'seq-mean-token-mean'"]),
    (dict(correction__objective="qurl_acr", correction__centre="behav", correction__weight="none"),
     ["'qurl_acr'", "'behav' makes them one"]),
    (dict(rollout__schedule="areal", correction__centering="top(8)", train__minibatches=1, train__epochs=1),
     ["correction.centering", "'areal'", "'folded'", "'behav'"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="ewma", correction__advantage="otb"),
     ["'otb'", "'ewma'", "average", "ring"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="ewma", correction__controllers="ess_scale"),
     ["'ess_scale'", "'ewma'", "average", "ring"]),
    (dict(rollout__schedule="areal", rollout__old_logp_source="none", correction__weight="none",
          correction__objective="a3po", correction__kl="is_k3", correction__kl_coeff=0.1), ["the kl 'is_k3'"]),
    (dict(correction__kl="k1", correction__kl_coeff=0.1),
     ["'k1' in the loss", "gradient is 0", "k2", "'reward'"]),
    (dict(correction__controllers="ess_scale & ess_scale"), ["names one twice"]),
    (dict(correction__controllers="adaptive_kl"), ["'adaptive_kl'", "correction.kl_coeff above 0"]),
    (dict(correction__controllers="r2vpo_dual(r2vpo_bound=0.1, r2vpo_step=1.0)"),
     ["'r2vpo_dual'", "objective 'r2vpo', and the objective is 'ppo'"]),
    (dict(engine__dtype="float16", engine__cache_dtype="int8"), "has scales whose products"),
    (dict(model__dtype="float16", correction__objective="st_ppo"), "can underflow"),
    (dict(engine__injected="weights"), "engine.injected: "),
    (dict(correction__controllers="gradient_alignment(gac_low=0.9, gac_high=0.1)"),
     ["gac_low is 0.9 and gac_high 0.1"]),
    (dict(correction__controllers="ess_scale(vcpo_ess_target=0.0)"), ["vcpo_ess_target is 0.0"]),
    (dict(correction__controllers="length_surge(surge_floor=0.1)"),
     ["no published value for surge_cooldown"]),
    (dict(correction__centre="behav", correction__objective="reinforce",
          correction__batch_normalize=True), ["batch_normalize", "whole batch", "microbatch_rows"]),
    (dict(correction__advantage="gdpo", correction__turn_credit="rest"),
     ["'gdpo' has inputs of whole sequences", "turn_credit = 'rest'", "'episode'"]),
    (dict(correction__advantage="opob", correction__turn_credit="turn"), ["'opob'", "'turn'"]),
    (dict(correction__advantage="tir_otb", correction__turn_credit="turn"),
     ["'tir_otb' gives a token the rewards from it on", "set it to 'rest'"]),
    (dict(correction__advantage="gdpo", correction__kl_coeff=0.1,
          correction__kl_placement="reward"), ["'gdpo'", "KL penalty", "kl_placement"]),
    (dict(correction__advantage="oapl(oapl_beta_value=0.0)"), ["oapl_beta_value"]),
    (dict(correction__controllers="ess_scale(vcpo_rule='cube')"), ["vcpo_rule 'cube'"]),
    (dict(correction__weight="token_tis(cap='a')"), ["'token_tis' takes a number as cap, not 'a'"]),
    (dict(correction__weight="sequence"), ["weight 'sequence' is unknown"]),
    (dict(correction__masks="seq_mean_k3 & veto"), ["no published value for upper"]),
    (dict(correction__objective="ppoo"), ["did you mean 'ppo'?"]),
    (dict(correction__advantage="grpp"), ["did you mean 'grpo'?"]),
    (dict(correction__kl="k4", correction__kl_coeff=0.1), ["kl 'k4' is unknown"]),
    (dict(rollout__top_k=5), ["top_k, top_p or min_p", "allow_filter_bias=True"]),
    (dict(rollout__top_p=0.9), ["allow_filter_bias=True"]),
    (dict(rollout__min_p=0.1), ["rollout.sampling_mask_size", "allow_filter_bias=True"]),
    (dict(rollout__sampling_mask_size=8), ["rollout.sampling_mask_size = 8", "none of them is set"]),
    (dict(rollout__sampling_mask_size=4, rollout__top_k=5), ["sampling_mask_size = 4 is below rollout.top_k", "top_k = 5"]),
    (dict(rollout__sampling_mask_size=8, rollout__top_k=5, correction__weight="none",
          correction__masks="trm(trm_delta=0.1)"), ["full distribution", "rollout.sampling_mask_size to 0"]),
    (dict(reward__name="judge", reward__network=True), ["reward.judge ''", "needs the address"]),
    (dict(reward__name="judge", reward__judge="http://localhost:1"), ["reward.network is False", "set it to True"]),
    (dict(engine__retention=(1, 2), model__numerics="invariant", engine__numerics="fast",
          engine__page_size=tiles.PAGE), ["'invariant'", "engine.retention is (1, 2); set it to (0, 0)"]),
    (dict(engine__noise_start=0.1, model__numerics="invariant", engine__quantization="none",
          engine__page_size=tiles.PAGE),
     ["'invariant'", "engine.noise_start = 0.1", "norms", "set it to 0"]),
    (dict(train__grad_reduce_dtype="bfloat16", model__numerics="invariant", engine__quantization="none",
          engine__page_size=tiles.PAGE), ["'invariant'", "float32", "train.grad_reduce_dtype",
          "'bfloat16'"]),
    (dict(engine__numerics="invariant", engine__page_size=8), ["engine.numerics is 'invariant'", "engine.page_size is 8"]),
    (dict(engine__numerics="invariant", engine__page_size=tiles.PAGE, engine__cache_dtype="int8"),
     ["engine.cache_dtype = int8", "engine.dtype = float32"]),
    (dict(engine__numerics="invariant", engine__page_size=tiles.PAGE, engine__dtype="float16"),
     ["engine.dtype is 'float16'", "bfloat16"]),
    (dict(model__numerics="invariant", engine__page_size=tiles.PAGE),
     ["engine.quantization is 'w8a8' and model.quantization is 'none'", "both alike"]),
    (dict(engine__max_draft=5), ["engine.max_draft is 5", "0, 1, 3, 7"]),
    (dict(correction__masks="token_dp(upper=1.5)"), ["upper is 1.5 in 'token_dp'"]),
    (dict(correction__objective="dis(clip_low=1.5)"), ["clip_low is 1.5 in 'dis'"]),
    (dict(correction__objective="dis(clip_high=-0.5)"), ["clip_high is -0.5 in 'dis'"]),
    (dict(correction__masks="seq_mean_binary_kl(upper=-0.1)"),
     ["upper is -0.1 in 'seq_mean_binary_kl'", "at least 0"]),
    (dict(correction__masks="token_kpop(upper=-0.1)"), ["upper is -0.1 in 'token_kpop'"]),
    (dict(correction__masks="seq_logprob_error(upper=0.9)"), ["upper is 0.9 in 'seq_logprob_error'"]),
    (dict(correction__masks="veto(veto_upper=0.5)"), ["'veto' keeps ratios from 0.0001 to 0.5"]),
    (dict(correction__sampler_kl_coeff=-0.1), ["correction.sampler_kl_coeff is -0.1"]),
    (dict(correction__sampler_kl_coeff=0.1, correction__masks="token_ratio(lower=0.5, upper=2.0)"),
     ["correction.sampler_kl_coeff = 0.1", "'token_ratio'", "correction.rejected_in_denominator to True"]),
    (dict(correction__objective="gmpo", correction__masks="token_k1(upper=1.3)", correction__centre="behav",
          correction__weight="none"),
     ["'gmpo'", "'token_k1'", "remove the mask"]),
    (dict(correction__objective="gmpo", correction__masks="token_k1(upper=1.3)",
          correction__rejected_in_denominator=True), ["'gmpo'", "'token_k1'", "rejected_in_denominator to False"]),
    (dict(correction__objective="luspo", correction__centre="behav", correction__weight="none"),
     ["objective 'luspo'", "correction.aggregation = 'token-mean'", "'seq-mean-token-mean'"]),
    (dict(correction__environment_ce_coeff=-0.1), ["correction.environment_ce_coeff is -0.1"]),
    (dict(correction__environment_ce_coeff=0.1),
     ["environment_ce_coeff = 0.1", "single answers", "task.environment or rollout.harness"]),
    (tiny.EPISODES | dict(correction__environment_ce_coeff=0.1, task__max_turns=1),
     ["environment_ce_coeff = 0.1", "task.max_turns = 1 has one answer"]),
    (dict(correction__centering="all"), ["correction.centering 'all'", "'kept' and 'top(n)'"]),
    (dict(correction__preset="centered", correction__centering="kept"),
     ["no sampling mask is recorded", "rollout.sampling_mask_size", "'top(32)'"]),
    (dict(correction__preset="centered", correction__weight="seq_tis"),
     ["correction.centering", "the weight 'seq_tis'", "token_tis"]),
    (dict(correction__centering="top(8)"), ["several updates", "'behav'", "'reinforce'"]),
    (dict(correction__preset="centered", correction__batch_normalize=True,
          train__minibatches=1, train__microbatch_rows=16), ["correction.batch_normalize", "False"]),
    (dict(correction__centering="top(8)", train__minibatches=1, train__epochs=1,
          correction__masks="token_dp(upper=0.2)"), ["correction.rejected_in_denominator", "True"]),
    (dict(task__tokenizer=""), ["task.tokenizer and model.path are empty", "model.path"]),
    (dict(correction__routing="r2"),
     ["correction.routing = 'r2'", DENSE + "correction.routing to 'none'"]),
    (dict(engine__record_routes=True), ["engine.record_routes = True", DENSE]),
    (dict(correction__load_balance_coeff=0.1), ["correction.load_balance_coeff = 0.1", DENSE]),
    (dict(correction__router_z_coeff=0.1), ["correction.router_z_coeff = 0.1", DENSE]),
    (dict(optimizer__freeze_router_bias=False), ["optimizer.freeze_router_bias = False", DENSE]),
    (EXPERTS | dict(correction__routing="r2", correction__preset="bypass_ppo_clip"),
     ["'r2'", "'behav' does not use", "'r3'"]),
    (EXPERTS | dict(correction__routing="r3"),
     ["'r3' replays the routes of the sampler, which records none", "engine.record_routes to True"]),
    (EXPERTS | dict(correction__routing="keep"), ["'keep'", "engine.record_routes to True"]),
    (EXPERTS | dict(correction__routing="keep", correction__routing_missing="mask",
                    engine__record_routes=True),
     ["correction.routing_missing = 'mask'", "correction.routing is 'keep'", "'stop'"]),
    (EXPERTS | dict(correction__routing="r2", correction__routing_missing="mask"),
     ["correction.routing_missing = 'mask'", "correction.routing is 'r2'"]),
    (EXPERTS | dict(model__router="softmax", optimizer__freeze_router_bias=False),
     ["optimizer.freeze_router_bias = False", "model.router is 'softmax'"]),
    (dict(task__max_context_tokens=9), ["task.max_context_tokens = 9", "environment is empty"]),
    (tiny.HARNESS | dict(rollout__harness="agent"),
     ["rollout.harness is 'agent'", "'module:function' or 'verifiers:TASKSET'"]),
    (tiny.HARNESS | dict(task__environment="a:B"), ["both make the turns", "set one of them to ''"]),
    (tiny.HARNESS | dict(reward__name="math"), ["is not read with rollout.harness = "]),
    (tiny.HARNESS | dict(rollout__overlong_buffer=2), ["rollout.harness = ", "to 0"]),
    (tiny.HARNESS | dict(engine__retention=(1, 1)), ["rollout.harness = ", "to (0, 0)"]),
    (tiny.HARNESS | dict(rollout__schedule="one_step", rollout__driver="ray"),
     ["needs samplers in the run's process"]),
    (tiny.HARNESS | dict(
        rollout__schedule="in_flight(staleness=2)", rollout__old_logp_source="replica"),
     ["rollout.harness = ", "set it to ring"]),
    (tiny.HARNESS | dict(watchdog__timeout=600.0),
     ["rollout.harness_timeout is 600.0", "below watchdog.timeout"]),
    (tiny.HARNESS | dict(rollout__on_fork="train"), ["rollout.on_fork is 'train'", "rows, longest, refuse"]),
    (tiny.HARNESS | dict(correction__advantage="reinforce_plus_plus"),
     ["advantage 'reinforce_plus_plus' has one of each token", "rollout.on_fork to 'longest'"]),
    (tiny.HARNESS | dict(correction__turn_credit="rest"), ["turn_credit = 'rest' has one of each turn"]),
    (tiny.HARNESS | dict(correction__kl_coeff=0.1, correction__kl_placement="reward"),
     ["kl_placement = 'reward' has one of each token"]),
    (tiny.HARNESS | dict(correction__preset="bypass_pg_is", correction__batch_normalize=True,
                         train__minibatches=1, train__microbatch_rows=16),
     ["around the sampler needs all rows in a micro-batch"]),
    (tiny.HARNESS | dict(rollout__fork_rows=3), ["rollout.fork_rows = 3", "make it a multiple of"]),
    (tiny.HARNESS | dict(rollout__fork_rows=-1), ["rollout.fork_rows is -1"]),
    (tiny.EPISODES | dict(task__environment="sums"), ["task.environment is 'sums'", "'module:Class'"]),
    (tiny.EPISODES | dict(task__max_context_tokens=5),
     ["task.max_context_tokens = 5", "task.max_prompt_tokens = 5"]),
    (tiny.EPISODES | dict(engine__retention=(1, 1)),
     ["task.environment = 'tests.tiny_environment:Sums'", "engine.retention to (0, 0)"]),
    (tiny.EPISODES | dict(reward__name="math"), ["reward.name = 'math' is not read", "'exact'"]),
    (tiny.EPISODES | dict(rollout__overlong_buffer=2), ["rollout.overlong_buffer = 2", "to 0"]),
    (tiny.EPISODES | dict(watchdog__timeout=10.0),
     ["task.turn_timeout is 10.0", "watchdog.timeout is 10.0"]),
    (tiny.EPISODES | dict(task__environment_params=ConfigDict({"of": object()})),
     ["task.environment_params must hold JSON values only"]),
])
def test_each_contradiction(changes, words):
    assert_refused(changes, words)


HEAVY = dict(engine__retention=(1, 2), engine__heavy_pages=2)


def test_contradictions_of_sparse_contexts():
    for changes, words in [
        (dict(engine__retention=(1, 0)), ["engine.retention is (1, 0)", "at least one last page"]),
        (dict(engine__retention=(-1, 2)), ["engine.retention is (-1, 2)"]),
        (dict(correction__dense_kl_coeff=0.1), ["correction.dense_kl_coeff = 0.1",
         "engine.retention = (0, 0) keeps all; set engine.retention to (1, 8)"]),
        (dict(correction__dense_kl_coeff=-0.1, engine__retention=(1, 2)), ["correction.dense_kl_coeff is -0.1"]),
        (dict(engine__heavy_pages=-1), ["engine.heavy_pages is -1"]),
        (dict(engine__heavy_pages=2), ["engine.heavy_pages = 2 keeps pages between", "engine.retention to (1, 4)"]),
        (dict(engine__heavy_groups=2), ["engine.heavy_groups = 2", "engine.heavy_pages is 0; set it to 4"]),
        (HEAVY | dict(engine__heavy_groups=0), ["engine.heavy_groups is 0"]),
        (HEAVY | dict(engine__unroll=False), ["engine.heavy_pages = 2 needs", "set engine.unroll to True"]),
        (HEAVY | dict(rollout__teacher="models/mine"),
         ["engine.heavy_pages = 2 needs the attention of one model", "rollout.teacher = 'models/mine'"]),
    ]:
        assert_refused(changes, words)
    validate(tiny.config(**HEAVY, correction__dense_kl_coeff=0.1))


def assert_refused(changes, words):
    [problem] = problems(**changes)
    for word in words:
        assert word in problem


def test_several_processes_play_no_episodes_themselves(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    [problem] = problems(**tiny.EPISODES)
    assert problem == (
        "- task.environment = 'tests.tiny_environment:Sums' needs a run of one process, or "
        "rollout.driver = 'ray'"
    )


@pytest.mark.parametrize("changes", [
    dict(rollout__group_size=1, correction__advantage="gae", train__minibatches=1),
    dict(rollout__group_size=1, correction__advantage="batch_mean", train__minibatches=1,
         correction__preset="flash_reinforce", correction__aggregation="seq-mean-token-mean"),
    dict(correction__centre="behav", correction__weight="none"),
    dict(correction__centre="behav", correction__weight="none", correction__advantage="gae",
         correction__objective="dis(clip_low=0.8, clip_high=3.0)", train__minibatches=1,
         rollout__group_size=1),
    dict(rollout__top_k=5, rollout__allow_filter_bias=True),
    dict(rollout__top_k=5, rollout__sampling_mask_size=5),
    dict(rollout__top_k=5, rollout__sampling_mask_size=5, correction__preset="centered",
         correction__centering="kept"),
    dict(correction__centering="top(8)", train__minibatches=1, train__epochs=1),
    dict(rollout__top_k=5, rollout__top_p=0.9, rollout__sampling_mask_size=4),
    dict(correction__centre="behav", correction__objective="reinforce"),  # no ratio but the weight
    dict(correction__centre="behav", correction__objective="reinforce", train__minibatches=1,
         correction__batch_normalize=True, train__microbatch_rows=16),  # the whole batch at once
    dict(correction__advantage="gdpo", correction__kl_coeff=0.1),  # the penalty is in the loss
    dict(correction__masks="seq_sum_k2(upper=0.5) & token_k3(upper=0.01)"),  # bounds on a distance
    dict(correction__masks="token_binary_kl(upper=0.01) & seq_mean_binary_kl"),  # likewise
    dict(task__tokenizer="", model__path="some/folder"),
    dict(mesh__train=(1, -1, 1)),
    dict(correction__objective="topr", correction__weight="none"),
    dict(correction__kl="k1", correction__kl_coeff=0.1, correction__kl_placement="reward"),
    dict(correction__kl="k1", correction__kl_coeff=0.0),
    dict(rollout__replay="uniform(uses=1)", correction__objective="reinforce"),  # none is replayed
    EXPERTS | dict(correction__routing="r2"),  # needs no record of the sampler
    EXPERTS | dict(correction__routing="r3", engine__record_routes=True,
                   correction__routing_missing="mask", correction__preset="bypass_ppo_clip"),
    EXPERTS | dict(correction__routing="keep", engine__record_routes=True),
    EXPERTS | dict(optimizer__freeze_router_bias=False, correction__load_balance_coeff=0.01),
    EXPERTS | dict(correction__preset="moe", train__minibatches=2),
    EXPERTS | dict(correction__preset="async_moe", rollout__schedule="areal", train__minibatches=1),
    *(dict(correction__preset=preset, rollout__schedule=schedule) for schedule in ("sync", "areal")
      for preset in ("async", "decoupled", "factored", "capped_ratio", "seq_capped_ratio", "mis_ppo")),
    dict(correction__preset="async", rollout__schedule="areal", rollout__old_logp_source="none"),
    dict(correction__objective="reinforce", correction__staleness_weight="token_vanilla",
         rollout__schedule="areal"),
    dict(correction__preset="factored", correction__masks="seq_sum_ratio(upper=2.0, of=staleness)",
         rollout__schedule="areal"),
    dict(model__path="some/folder", correction__routing="r3", engine__record_routes=True),
])
def test_what_is_no_contradiction(changes):
    validate(tiny.config(**changes))


ONE = dict(train__minibatches=1, train__epochs=1)


@pytest.mark.parametrize("changes, words", [
    (dict(correction__kl="k3", correction__kl_placement="reward"), ["'k3'", "in the reward", "k1"]),
    (ONE | dict(correction__kl="k3", train__epochs=3), ["'k3'", "3 updates", "clipped_is_k2"]),
    (ONE | dict(correction__kl="k3", train__minibatches=2), ["'k3'", "2 updates", "or k2"]),
    (ONE | dict(correction__kl="k3", rollout__schedule="areal"), ["'k3'", "tokens of older weights"]),
    (ONE | dict(correction__kl="k3"), []),
    (dict(correction__kl="k2", train__epochs=3), []),
    (dict(correction__weight="none", correction__kl_coeff=0.0), ["factor engine", "token_tis"]),
    (dict(correction__weight="none", correction__kl_coeff=0.0, model__numerics="invariant",
          engine__quantization="none"), []),
    (ONE | dict(correction__centre="behav", correction__weight="none", correction__objective="reinforce",
                correction__kl_coeff=0.0, rollout__schedule="areal"), ["factor engine and staleness"]),
    (dict(correction__objective="reinforce", correction__kl_coeff=0.0), ["'reinforce' has no ratio", "updates"]),
    (dict(correction__centre="prox", correction__staleness_weight="token_tis", correction__kl_coeff=0.0),
     ["staleness_weight is 'token_tis'", "it is 1"]),
    (dict(correction__kl="is_k3", train__epochs=3), []),
    (dict(correction__kl="k1", correction__kl_placement="reward"), []),
    (dict(correction__kl="k3", correction__kl_placement="reward", correction__kl_coeff=0.0), []),
])
def test_what_is_likely_not_meant_is_said_in_a_line(changes, words):
    config = tiny.config(**{"correction__kl_coeff": 0.1} | changes)
    chosen = validate(config)
    found = doubts(config, chosen.correction, chosen.schedule, chosen.replay)
    assert len(found) == bool(words) and not any("\n" in line for line in found)
    for word in words:
        assert word in found[0]


def test_a_system_that_cannot_cut_the_network_off_says_so():
    config, other = tiny.config(), tiny.config(reward__network=True)
    choices = validate(config)
    chosen = choices.correction, choices.schedule, choices.replay
    with mock.patch.object(child, "namespaces", lambda: ("unshare",)):
        assert doubts(config, *chosen) == []
    with mock.patch.object(child, "namespaces", lambda: ()):
        [line] = doubts(config, *chosen)
        assert "Python's sockets are closed to rewards without reward.network" in line
        assert doubts(other, *chosen) == []


@pytest.mark.parametrize("changes, word", [
    (dict(optimizer__clip_norm=0.0), "optimizer.clip_norm"),  # every update would be zero
    (dict(optimizer__lr=-1e-4), "optimizer.lr"),
    (dict(correction__objective="ppo(clip_low=1.5)"), "clip_low is 1.5"),
    (dict(correction__objective="gspo(clip_high=-0.1)"), "clip_high is -0.1"),
    (dict(mesh__train=(1, 1)), "mesh.train"),
    (dict(rollout__top_p=0.0, rollout__allow_filter_bias=True), "rollout.top_p"),
    (dict(warmup__steps=-1), "warmup.steps"),
    (dict(model__num_experts=-1), "model.num_experts is -1; it must not be below 0"),
    (EXPERTS | dict(model__shared_expert_dim=-4), "model.shared_expert_dim is -4"),
    (dict(model__num_experts=4, model__expert_dim=16, model__shared_expert_dim=16),
     "model.shared_expert_dim is 16 and model.router is 'softmax'"),
    (EXPERTS | dict(model__expert_dim=16, model__shared_expert_dim=24),
     "model.shared_expert_dim is 24 and model.expert_dim is 16"),
    (EXPERTS | dict(correction__load_balance_coeff=-0.1), "correction.load_balance_coeff is -0.1"),
    (EXPERTS | dict(correction__router_z_coeff=-0.1), "correction.router_z_coeff is -0.1"),
    (dict(model__num_experts=4, model__experts_per_token=5),
     "model.experts_per_token is 5 and model.num_experts is 4"),
    (dict(model__num_experts=2**16 + 1), "model.num_experts is 65537; it must be at most 65536"),
    (dict(engine__noise_start=-0.1), "engine.noise_start"),
    (dict(engine__unquantized=("q", "head")), "engine.unquantized names 'head'"),
    (dict(model__unquantized=("norm",)), "model.unquantized names 'norm'"),
])
def test_values_that_no_run_can_mean(changes, word):
    [problem] = problems(**changes)
    assert word in problem


FINITE = [
    "rollout.temperature", "model.uaq_scale", "engine.noise_start", "optimizer.lr",
    "correction.entropy_coeff", "warmup.params.scale", "optimizer.router_bias_rate",
]


def test_numbers_are_finite():
    for name, value in itertools.product(FINITE, (float("nan"), float("inf"))):
        changes = {name.replace(".", "__"): value, "warmup__steps": 0}
        assert problems(**changes) == [f"- {name} is {value}; it must be a finite number"]


@pytest.mark.parametrize("name", ["d_mean", "d_p99", "d_max", "dp_max", "k3"])
def test_a_bound_of_the_gate_may_be_infinite_but_is_a_number(name):
    validate(tiny.config(**{f"gate__max_{name}": float("inf")}))
    assert problems(**{f"gate__max_{name}": float("nan")}) == [
        f"- gate.max_{name} is nan; it must be a finite number or inf"
    ]


def test_all_problems_at_once():
    found = problems(
        steps=0, train__minibatches=3, correction__aggregation="mean", correction__centre="bypas",
        model__dtype="float64", rollout__top_p=0.5,
    )
    assert len(found) == 6, found


def test_every_field_is_explained_or_plain():
    """configs/default.py is the page that users read: each field stands on a line of its own."""
    text = pathlib.Path(default.__file__).read_text()
    for name, value in default.get_config().items():
        fields = value.keys() if hasattr(value, "keys") else [None]
        for field in fields:
            full = name if field is None else f"{name}.{field}"
            assert name == "critic" or name == "optimizer" or re.search(
                rf"^    c\.{re.escape(full)} = ", text, re.M), full


@pytest.mark.parametrize("module", [correction, schedules, replay, injection])
def test_a_config_is_parsed_once(module):
    parse, seen = module.parse, []
    with mock.patch.object(module, "parse", lambda *a: seen.append(a) or parse(*a)):
        setup = build.build(tiny.config())
        doubts(setup.config, setup.training.correction, setup.schedule, setup.replay)
        Trainer(setup.training)
    assert len(seen) == 1
