"""Every field of a run, with its default. The other configs start from this one.

Each section ends with the fields that only an expert sets, under "For experts".
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "default"
    c.seed = 0  # of initialisation, data order and sampling
    c.steps = 100  # rollout batches

    c.model = ConfigDict()
    c.model.path = ""  # Hugging Face folder or .gguf file; "" builds the shape below at random
    c.model.num_layers = 4
    c.model.embed_dim = 128
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 32
    c.model.mlp_dim = 384
    c.model.max_position = 1024
    c.model.rope_theta = 10_000.0
    c.model.tie_embeddings = True
    c.model.param_dtype = "float32"  # bfloat16 loses every update below 1/512 of its weight
    c.model.dtype = "float32"  # compute dtype of the learner: float32, bfloat16 or float16
    # Part of the forward pass that is recomputed in the backward pass: none, dots (keeps products),
    # full (keeps the input of each layer) or host (keeps it in host memory; TPU)
    c.model.remat = "none"
    # For experts
    c.model.fp32_head = False  # float32 output head at full precision (matters on TPU)
    # The engine's quantisation, where the learner is to compute the same 8-bit products
    c.model.quantization = "none"
    c.model.unquantized = ()  # with that, the engine's engine.unquantized
    # fast, or invariant: sampler and learner compute the same log-probs, bit by bit, at a cost
    c.model.numerics = "fast"
    # Factor on the size of an update relative to a quantisation step (QuRL: 1.5)
    c.model.uaq_scale = 1.0

    c.task = ConfigDict()
    c.task.name = "arithmetic"  # a name in jaxrl_tis.data.tasks.TASKS
    # Arguments of that task; a command line that names another task gives those of that one.
    c.task.params = ConfigDict({"size": 10_000})
    c.task.params.unlock()
    # "char", a folder or a .gguf file; "" takes model.path, as where a command line names that
    c.task.tokenizer = ""
    c.task.template = "{prompt}"  # the user's text
    c.task.chat = False  # wrap it in the model's chat template
    c.task.system = ""  # system message of the chat, "" for the template's own
    c.task.template_kwargs = ConfigDict()  # variables of the template, as enable_thinking=False
    c.task.template_kwargs.unlock()
    # What strftime_now gives in a template, as 2026-01-31; "" is the start of the run, which
    # config.json then keeps
    c.task.date = ""
    c.task.max_prompt_tokens = 32
    # A record that cannot be used. error: it ends the start, before step 1; skip: it is left out
    # and counted
    c.task.on_bad_record = "error"

    c.reward = ConfigDict()
    # A name in jaxrl_tis.data.graders.REWARDS or "module:function"; several separated by commas
    c.reward.name = "exact"
    c.reward.timeout = 5.0  # seconds per response
    # Of an answer whose function raises, hangs or returns no finite number: "drop" leaves it out of
    # the loss and of its group, a number as text is its score
    c.reward.on_error = "drop"
    c.reward.weights = ConfigDict()  # of components by name: 1, or 0 beside a "score", if not here
    c.reward.weights.unlock()
    c.reward.network = False  # whether the function may use it
    c.reward.workers = 1  # processes that score at once; for an async function, calls at once
    # For experts
    c.reward.signature = "auto"  # one of jaxrl_tis.data.signatures.SIGNATURES; auto: by parameters

    c.warmup = ConfigDict()  # supervised steps before reinforcement learning
    c.warmup.steps = 0
    c.warmup.rows = 64  # examples per step
    c.warmup.lr = 1e-3
    c.warmup.params = ConfigDict({"split": "warmup"})  # replace fields of task.params
    c.warmup.params.unlock()

    c.rollout = ConfigDict()
    c.rollout.prompts = 16  # groups per batch
    c.rollout.group_size = 8  # samples per prompt
    c.rollout.max_new_tokens = 16
    c.rollout.temperature = 1.0
    c.rollout.top_k = 0  # 0 keeps all tokens
    c.rollout.top_p = 1.0
    c.rollout.min_p = 0.0
    c.rollout.dynamic_sampling = False  # replace groups whose rewards are all equal (DAPO)
    c.rollout.overlong_buffer = 0  # soft overlong penalty over the last n tokens (DAPO); 0 is off
    # How far samplers run ahead of the learner, spelled as a method is: sync, periodic, one_step,
    # fully_async(trigger=4, threshold=0.5, partial=True), areal(staleness=4),
    # in_flight(staleness=4), dora(staleness=2), roll_flash(alpha=1, redundant=0) or
    # laminar(staleness=4, repack=0.5); docs/async.md
    c.rollout.schedule = "sync"
    c.rollout.driver = "virtual"  # virtual (in turns), threads or processes; docs/async.md
    c.rollout.workers = 1  # samplers; with driver processes, as many sample as join
    # Where python -m jaxrl_tis.worker joins (processes); port 0 takes a free one. An address that
    # other machines reach needs a secret in JAXRL_TIS_TOKEN.
    c.rollout.listen = "127.0.0.1:0"
    c.rollout.transport = "tcp"  # of weights: tcp, or a folder that all share (gs:// too)
    # Groups that are trained on again: uniform(uses=2, most=4), newest(uses=2, most=4) or
    # fresh(uses=2, most=4, tau=500); prompts / uses of each batch are new. "": none
    c.rollout.replay = ""
    # For experts
    # Most tokens of a recorded support that the learner scores over; 0: off
    c.rollout.sampling_mask_size = 0
    c.rollout.allow_filter_bias = False  # top_k, top_p, min_p bias every ratio; True accepts that
    c.rollout.max_rounds = 4  # rounds of fresh prompts per batch with dynamic sampling
    c.rollout.worker_timeout = 30.0  # seconds of silence after which a worker is gone
    # Most groups begun and not yet trained on; 0: as many as the schedule allows
    c.rollout.queue = 0
    c.rollout.update_turns = 0  # calls that each sampler makes during an update (virtual)
    # Steps between probes of the gap, by engine and by staleness, against c.gate's bounds; 0: none
    c.rollout.gap_probe_every = 0
    # Above a bound: warn, sync (also lower the bound on staleness by one version) or stop
    c.rollout.on_gap_exceeded = "warn"
    # Source of the learner's log-probs under older weights, see jaxrl_tis/learner/snapshots.py:
    # ring (of snapshots), replica (one snapshot, scores on arrival), ewma (an average of the policy
    # takes their place, PPO-EWMA) or none (the policy does: for decoupled, a3po and bypass)
    c.rollout.old_logp_source = "ring"
    c.rollout.snapshots = 0  # of the ring; 0: one more than the schedule's bound on a token's age
    c.rollout.snapshot_gib = 16.0  # most host memory of all snapshots, over all processes
    # Mean age of the average's weights in updates: its decay is 1 - 1 / (centre + 1)
    c.rollout.ewma_centre = 10.0
    # Most versions that a replayed token is old; 0: 4 more than the schedule's
    c.rollout.max_age = 0

    c.engine = ConfigDict()
    c.engine.slots = 128  # sequences decoded together
    c.engine.dtype = "float32"
    c.engine.cache_dtype = "float32"  # or bfloat16, float16, int8, float8_e4m3fn
    c.engine.page_size = 16  # positions of a page of the cache
    c.engine.num_pages = 0  # pages of each data shard; 0: every slot can hold the longest sequence
    # none, int8 (w8a16, w8a8) or float8_e4m3 (fp8_w8a16, fp8_w8a8)
    c.engine.quantization = "w8a8"
    c.engine.max_draft = 0  # tokens of a speculative draft (n-grams), 2^n - 1; 0: no speculation
    c.engine.unroll = True  # unroll the layers (CPU) or scan them (TPU: compiles once per layer)
    # For experts
    # Pages that a sequence keeps besides the one it fills, (first, last); (0, 0): all. The learner
    # then attends to the kept positions alone, too.
    c.engine.retention = (0, 0)
    c.engine.unquantized = ()  # projections left as they are, of q, k, v, o, gate, up and down
    c.engine.noise_start = 0.0  # standard deviation of noise on the norms (QeRL); 0 is off
    c.engine.noise_end = 5e-4
    c.engine.noise_stages = 10  # from start to end, after a first part of the run without noise
    c.engine.injected = ""  # an artificial gap to study gaps with, as in "logits(scale=0.5)"
    c.engine.steps_per_call = 4  # decode steps per call; the scheduler runs between calls
    c.engine.prefill_batch = 16  # prompts per prefill call
    c.engine.prefill_chunk = 512  # most tokens of a prompt per prefill call
    c.engine.prefill_calls = 4  # prefill calls between two calls that decode
    # Dispatch a call before the tokens of the last are read; no drafts
    c.engine.async_scheduling = False
    c.engine.policy = "first_come"  # which sequence runs next: jaxrl_tis/engine/policies.py
    # Admissions after which a waiting sequence goes first; 0: no bound
    c.engine.max_wait_admissions = 0
    # Tokens after which a sequence makes room for a waiting one; 0: never
    c.engine.preempt_after = 0
    c.engine.free_batch_rows = 128  # slots * (draft + 1) that a pass computes at the price of one

    c.correction = ConfigDict()
    # A method is spelled "name" or "name(parameter=value, ...)"; docs/methods.md lists them.
    c.correction.preset = "tis_2"  # a name in jaxrl_tis.estimators.presets.PRESETS, sets the next 5
    c.correction.mode = placeholder(str)  # decoupled (learner recomputes logp_old) or bypass
    c.correction.weight = placeholder(str)  # e.g. "token_tis(cap=2.0)", or "none"
    c.correction.masks = placeholder(str)  # joined by &: "seq_mean_k3(upper=0.01) & veto"; or ""
    c.correction.objective = placeholder(str)  # e.g. "ppo(clip_low=0.2, clip_high=0.28)"
    # Scores are centred over the likeliest tokens, "top(32)", or over the recorded support, "kept"
    c.correction.centering = placeholder(str)  # or "none"
    c.correction.advantage = "grpo"  # a name in jaxrl_tis.estimators.advantages.ADVANTAGES
    c.correction.aggregation = "token-mean"  # one of jaxrl_tis.estimators.reduce.MODES
    c.correction.kl = "k3"  # a name in jaxrl_tis.estimators.kl.KL
    c.correction.kl_coeff = 0.0  # 0 keeps no reference model
    c.correction.kl_placement = "loss"  # loss, or reward: subtracted from each token's reward
    c.correction.entropy_coeff = 0.0
    c.correction.controllers = ""  # joined by &, e.g. "ess_scale & adaptive_kl(kl_target=0.05)"
    # For experts
    c.correction.batch_normalize = False  # divide the weights by their batch mean
    # Rejected tokens stay in the denominators. Tokens that a mask rejects at the update always do:
    # of all masks in bypass mode, and of opsm, trm, trm_k3, m2po and clip_cov, which compare with
    # the policy of the update.
    c.correction.rejected_in_denominator = False
    c.correction.scale = 0.0  # divisor of seq-mean-token-sum-norm; 0 takes the row length
    c.correction.offload_reference = False  # keep the reference in host memory between uses

    # Bounds of jaxrl_tis.gate on the gap of learner and sampler at the same weights; inf: none
    c.gate = ConfigDict()
    c.gate.required = False  # a run measures it before its first step, and stops above a bound
    c.gate.max_d_mean = 0.05  # |logp_old - logp_behav| over tokens, nats
    c.gate.max_d_p99 = 0.3
    c.gate.max_d_max = float("inf")
    c.gate.max_dp_max = 0.25  # largest |p_old - p_behav|
    c.gate.max_k3 = 0.002  # KL of sampler to learner per token, nats

    c.optimizer = _optimizer(1e-4)
    c.critic = _optimizer(1e-4)  # used with advantage "gae"
    c.critic.value_clip = 0.5

    c.train = ConfigDict()
    c.train.minibatches = 1  # updates per epoch over a rollout batch
    c.train.epochs = 1
    c.train.microbatch_rows = 32  # rows per forward and backward pass
    # Leave answers that end at rollout.max_new_tokens out of the loss (DAPO's overlong filtering);
    # their rewards still count in their groups, also for rollout.dynamic_sampling
    c.train.mask_truncated = False
    c.train.pack_length = 0  # tokens of a row shared by several sequences; 0: one sequence a row
    # For experts
    # auto: the update of a batch scores it, where it is the only one and the methods allow that;
    # never: a program of its own scores it before
    c.train.fuse_old_logp = "auto"
    c.train.logprob_chunk = 1024  # positions whose logits are alive at a time
    # Number format of gradients' sums over the devices of mesh.train that cut a matrix: float32 or,
    # at half the bytes, bfloat16
    c.train.grad_reduce_dtype = "float32"

    c.metrics = ConfigDict()
    c.metrics.record = "full"  # or compact: what metrics.jsonl gets; docs/metrics.md marks it
    c.metrics.sinks = ()  # of wandb and trackio, which get all of it, too
    # Answers that samples.jsonl gets of each evaluation and, every so many steps, of training.
    c.metrics.samples = 4
    c.metrics.samples_every = 10  # 0: of evaluations alone
    # For experts
    # Steps between percentiles and profiles by position, which sort the rollout batch, and variance
    # proxies, which take a forward pass over it.
    c.metrics.diagnostics_every = 10

    # (data, fsdp, tensor) and, to cut long rows, context; -1 takes the devices that are left
    c.mesh = ConfigDict()
    c.mesh.train = (1, 1, 1)
    c.mesh.serve = (1, 1, 1)

    c.eval = ConfigDict()
    c.eval.every = 25  # steps; also before the first and after the last
    c.eval.prompts = 512
    c.eval.threshold = 1.0  # reward from which on an answer counts as right in accuracies
    c.eval.params = ConfigDict({"split": "eval"})  # replace fields of task.params, at least one
    c.eval.params.unlock()

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # steps; also after the last
    c.checkpoint.keep = 2
    # For experts
    # Seconds that a step may go on once the run is asked to stop. A run that reaches no place to
    # stop within 20 more ends without a save; GKE kills after the time that the manifest gives.
    c.checkpoint.grace = 10.0

    c.watchdog = ConfigDict()
    # Seconds without progress after which a process writes its stacks down and ends, to be started
    # again; more than the longest compilation. 0: never
    c.watchdog.timeout = 1800.0

    c.processes = ConfigDict()
    c.processes.consistency_every = 10  # steps between comparisons of what several processes hold
    return c


def _optimizer(lr: float) -> ConfigDict:
    c = ConfigDict()
    c.lr = lr  # 0 trains nothing: the run measures a fixed policy
    c.schedule = "constant"  # constant, linear or cosine (to 0 at the last update)
    c.warmup = 0  # updates with a rising rate
    c.weight_decay = 0.0
    c.clip_norm = 1.0
    # For experts
    c.b1 = 0.9
    c.b2 = 0.999
    c.eps = 1e-8
    return c
