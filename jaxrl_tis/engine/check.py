"""Checks of the sampler's config fields against each other."""

from collections.abc import Iterator

import ml_collections

from jaxrl_tis.kernels import tiles
from jaxrl_tis.models import quant

EIGHT_BIT = tuple(dtype.name for dtype in quant.BOUND)  # with scales


def engine_problems(config: ml_collections.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each problem of config.engine, and of the filters of config.rollout."""
    yield from _sizes(config)
    yield from _heavy(config)
    yield from _distillation(config)
    yield from _sampling(config)
    yield from _numerics(config)


def is_filtered(rollout: ml_collections.ConfigDict) -> bool:
    """Whether top-k, top-p or min-p is set, so that tokens can have probability 0."""
    return rollout.top_k > 0 or rollout.top_p < 1 or rollout.min_p > 0


def _sizes(config):
    sinks, window = config.engine.retention
    if min(sinks, window) < 0 or sinks and not window:
        yield (
            f"engine.retention is {config.engine.retention}; it needs (first pages, last pages) of "
            "a sequence, at least one last page, or (0, 0) to keep all"
        )
    draft = config.engine.max_draft
    if draft > 0 and draft & (draft + 1):
        yield f"engine.max_draft is {draft}; it must be 0, 1, 3, 7, ... (2^n - 1)"
    if config.engine.drafter and draft < 1:
        yield (
            f"engine.drafter = {config.engine.drafter!r} makes drafts of engine.max_draft tokens, which is "
            f"{draft}; set it to 3"
        )
    if config.engine.drafter and window:
        yield (
            f"engine.drafter = {config.engine.drafter!r} needs the keys of all tokens, and engine.retention "
            f"= {config.engine.retention} evicts some; set it to (0, 0)"
        )


def _heavy(config):
    """Finds settings without the attention to each page by which pages are kept."""
    engine, setting = config.engine, f"engine.heavy_pages = {config.engine.heavy_pages}"
    if engine.heavy_groups > 1 and not engine.heavy_pages:
        yield (
            f"engine.heavy_groups = {engine.heavy_groups} chooses heavy pages in each group of layers, and "
            "engine.heavy_pages is 0; set it to 4, or engine.heavy_groups to 1"
        )
    if engine.heavy_pages <= 0:
        return
    if not any(engine.retention):
        yield (
            f"{setting} keeps pages between the first and last ones, and engine.retention = "
            f"{engine.retention} keeps all; set engine.retention to (1, 4)"
        )
    if not engine.unroll:
        yield (
            f"{setting} needs the attention to each page, which the kernel of scanned layers does not "
            "return; set engine.unroll to True"
        )
    if config.rollout.teacher:
        yield (
            f"{setting} needs the attention of one model, and rollout.teacher = "
            f"{config.rollout.teacher!r} has its own; set rollout.teacher to ''"
        )


def _distillation(config):
    every = config.engine.drafter_every
    if every and not config.engine.drafter:
        yield f"engine.drafter_every = {every} trains engine.drafter, and there is none; name a model"


def _sampling(config):
    rollout = config.rollout
    if config.engine.dtype == "float16" and config.engine.cache_dtype in EIGHT_BIT:
        yield (
            f"engine.cache_dtype = {config.engine.cache_dtype!r} has scales whose products "
            "overflow in engine.dtype = 'float16'; set the cache to float16 or float32"
        )
    if not 0 < rollout.top_p <= 1 or not 0 <= rollout.min_p < 1:
        yield (
            f"rollout.top_p = {rollout.top_p} and rollout.min_p = {rollout.min_p} must be in "
            "(0, 1] and [0, 1)"
        )
    has_filters = is_filtered(rollout)
    if rollout.sampling_mask_size and not has_filters:
        yield (
            f"rollout.sampling_mask_size = {rollout.sampling_mask_size} records the tokens that top_k, top_p and min_p "
            "keep, and none of them is set; set one, or rollout.sampling_mask_size to 0"
        )
    is_top_k_alone = rollout.top_p == 1 and rollout.min_p == 0
    if 0 < rollout.sampling_mask_size < rollout.top_k and is_top_k_alone:
        yield (
            f"rollout.sampling_mask_size = {rollout.sampling_mask_size} is below rollout.top_k = {rollout.top_k}, and "
            "cannot record all kept tokens; set it to rollout.top_k"
        )
    if has_filters and not rollout.sampling_mask_size and not rollout.allow_filter_bias:
        yield (
            "top_k, top_p or min_p filters the sampler's distribution, and the learner scores the "
            "unfiltered one, which biases every ratio; set rollout.sampling_mask_size to score the filtered "
            "distribution, or rollout.allow_filter_bias=True to accept the bias"
        )


def sampler_numerics(config: ml_collections.ConfigDict) -> str:
    """Returns the numerics of the engines that sample."""
    return config.engine.numerics or config.model.numerics


def _numerics(config):
    """Finds settings that invariant numerics lack, in the learner, in the sampler, and where both have
    them to agree bit by bit."""
    is_learner, is_sampler = (
        numerics == "invariant" for numerics in (config.model.numerics, sampler_numerics(config))
    )
    name = "model.numerics" if is_learner else "engine.numerics"
    if (is_learner or is_sampler) and any(config.engine.retention):
        yield (
            f"{name} is 'invariant' and needs all keys, but engine.retention is "
            f"{config.engine.retention}; set it to (0, 0)"
        )
    if (is_learner or is_sampler) and config.engine.page_size != tiles.PAGE:
        yield (
            f"{name} is 'invariant' with pages of {tiles.PAGE} positions, but "
            f"engine.page_size is {config.engine.page_size}; set it to {tiles.PAGE}"
        )
    if is_learner:
        yield from _of_learner(config)
    if is_sampler:
        yield from _of_sampler(config)
    if is_learner and is_sampler:
        yield from _of_both(config)


def _of_learner(config):
    if config.model.dtype == "float16":
        yield (
            "model.numerics is 'invariant' and model.dtype is 'float16'; set model.dtype to "
            "float32 or bfloat16"
        )
    if config.train.grad_reduce_dtype != "float32":
        yield (
            "model.numerics is 'invariant' and sums gradients in float32, but train.grad_reduce_dtype is "
            f"{config.train.grad_reduce_dtype!r}; set it to float32"
        )


def _of_sampler(config):
    dtype, name = config.engine.dtype, "engine.numerics" if config.engine.numerics else "model.numerics"
    if dtype == "float16":
        yield f"{name} is 'invariant' and engine.dtype is 'float16'; set engine.dtype to float32 or bfloat16"
    if config.engine.cache_dtype not in (dtype, "float32"):
        yield (
            f"{name} is 'invariant', but engine.cache_dtype = {config.engine.cache_dtype} "
            f"rounds keys of engine.dtype = {dtype}: set both alike"
        )


def _of_both(config):
    for name in ("dtype", "quantization", "unquantized"):
        sampler, learner = config.engine[name], config.model[name]
        if sampler != learner:
            yield (
                f"model.numerics is 'invariant', but engine.{name} is {sampler!r} and "
                f"model.{name} is {learner!r}: set both alike, or engine.numerics to 'fast'"
            )
    if config.engine.noise_start > 0:
        yield (
            f"model.numerics is 'invariant', but engine.noise_start = {config.engine.noise_start} "
            "adds noise to the sampler's norms only; set it to 0"
        )
    if config.engine.injected:
        yield (
            f"model.numerics is 'invariant', but engine.injected = {config.engine.injected!r} "
            "changes the sampler only; leave it empty"
        )
