"""Every field of a run, with its default. The other configs start from this one.

Each section ends with the fields that only an expert sets, under "For experts". docs/configs.md is
written from this file: the comment above a field, or behind it, is its description there.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "default"  # name in the record and in the sinks
    c.seed = 0  # seed of the initialisation, the data order and the sampler
    c.steps = 100  # training steps; each trains on one rollout batch

    # The policy. With a path, the checkpoint sets the shape: the fields from num_layers to
    # tie_embeddings are those of a random model.
    c.model = ConfigDict()
    c.model.path = ""  # Hugging Face folder, hf:// name or .gguf file; "": random weights
    c.model.num_layers = 4  # number of layers
    c.model.embed_dim = 128  # width of the model
    c.model.num_heads = 4  # query heads
    c.model.num_kv_heads = 2  # key and value heads
    c.model.head_dim = 32  # width of a head
    c.model.mlp_dim = 384  # hidden width of the MLP
    c.model.num_experts = 0  # experts of a layer; 0: a dense model
    c.model.experts_per_token = 2  # experts that the router chooses for a token
    c.model.expert_dim = 192  # hidden width of one expert
    c.model.shared_expert_dim = 0  # hidden width of experts that every token uses; 0: none
    c.model.router = "softmax"  # scores of experts; sigmoid has a bias that only the choice sees
    c.model.max_position = 1024  # longest sequence in tokens
    c.model.rope_theta = 10_000.0  # base of the rotary frequencies
    c.model.tie_embeddings = True  # use the embedding as the output head
    # Dtype of the learner's weights. bfloat16 loses each update below 1/512 of its weight.
    c.model.param_dtype = "float32"
    c.model.dtype = "float32"  # dtype of the learner's forward and backward pass
    # Activations to recompute in the backward pass. none: nothing; dots: all but the products;
    # full: all but the inputs of layers; host: as full, with these in host memory (TPU).
    c.model.remat = "none"
    # For experts
    c.model.fp32_head = False  # compute the output head in float32 at full precision (for TPU)
    # Quantization of the learner's products; set it to engine.quantization to train as it samples.
    c.model.quantization = "none"
    c.model.unquantized = ()  # as engine.unquantized
    # invariant: sampler and learner compute bit-identical log-probs, more slowly.
    c.model.numerics = "fast"
    # Trained weights. none: all; lora(rank=32, alpha=32, targets='all') or rslora(...): low-rank
    # factors beside a constant base. targets: attention, mlp, all, head or projections, as 'q,v'.
    c.model.lora = "none"
    # PEFT folder or hf:// name of an adapter to start from, of the shape in model.lora. "": a new one.
    c.model.adapter = ""
    # Update-aware quantization (QuRL, which uses 1.5): scale of an update relative to the
    # quantization step. 1: off.
    c.model.uaq_scale = 1.0

    # The prompts.
    c.task = ConfigDict()
    c.task.name = "arithmetic"  # a task of jaxrl_tis/data/tasks.py
    # Arguments of the task. Naming another task on the command line empties them.
    c.task.params = ConfigDict({"size": 10_000})
    c.task.params.unlock()
    c.task.tokenizer = ""  # "char", a folder or a .gguf file; "": the model's
    c.task.template = "{prompt}"  # text of a prompt; {prompt} is the example's prompt
    c.task.chat = False  # apply the model's chat template
    c.task.system = ""  # system message of the chat; "": the chat template's own
    c.task.template_kwargs = ConfigDict()  # template variables, as enable_thinking=False
    c.task.template_kwargs.unlock()
    # Date that a chat template reads, as 2026-01-31. "": the start of the run, kept in config.json.
    c.task.date = ""
    # Encode special tokens, as <|im_end|>, in observations and in messages of users and tools as
    # plain text. False: as control tokens, with a warning.
    c.task.escape_special_tokens = False
    c.task.max_prompt_tokens = 32  # an example with a longer prompt is a bad example
    # Action on a bad example. error: end before the first step; skip: leave it out and count it.
    c.task.on_bad_example = "error"
    # Environment of several turns, as "module:Class" (docs/environments.md). It gives the rewards,
    # and reward.name is not read. "": none.
    c.task.environment = ""
    # Keyword arguments of its class.
    c.task.environment_params = ConfigDict()
    c.task.environment_params.unlock()
    c.task.environment_workers = 4  # processes that play the episodes of a run, or of a worker on Ray
    c.task.max_turns = 8  # most turns of the policy in an episode
    # Longest episode in tokens. 0: max_prompt_tokens + rollout.max_new_tokens.
    c.task.max_context_tokens = 0
    c.task.turn_timeout = 10.0  # seconds for one step of the environment

    # The reward function. It runs in processes of its own.
    c.reward = ConfigDict()
    # A reward of jaxrl_tis/data/graders.py or "module:function". Commas join several, which are
    # summed with reward.weights.
    c.reward.name = "exact"
    c.reward.judge = ""  # server of the reward judge, as "http://host:port MODEL"
    c.reward.timeout = 5.0  # seconds for one response
    # Reward where the function raises, hangs or returns no finite number: a number as text, or
    # drop, which takes the response out of the loss and its group.
    c.reward.on_error = "drop"
    # Weights of reward components by name. Default: 1, or 0 if the function also returns "score".
    c.reward.weights = ConfigDict()
    c.reward.weights.unlock()
    c.reward.network = False  # allow the function to use the network
    c.reward.workers = 1  # processes that compute rewards; for an async function, concurrent calls
    # For experts
    # Calling convention, of jaxrl_tis/data/signatures.py. auto: by the function's parameters.
    c.reward.signature = "auto"

    # Supervised steps before reinforcement learning.
    c.warmup = ConfigDict()
    c.warmup.steps = 0  # number of steps; 0: none
    c.warmup.rows = 64  # examples per step
    c.warmup.lr = 1e-3  # learning rate
    c.warmup.params = ConfigDict({"split": "warmup"})  # overrides of task.params for these examples
    c.warmup.params.unlock()

    # Sampling.
    c.rollout = ConfigDict()
    c.rollout.prompts = 16  # prompts (groups) per batch
    c.rollout.group_size = 8  # samples per prompt
    c.rollout.max_new_tokens = 16  # longest response, or turn of an episode, in tokens
    c.rollout.temperature = 1.0  # the learner scores at the same temperature
    c.rollout.top_k = 0  # sample from the k likeliest tokens; 0: from all
    c.rollout.top_p = 1.0  # sample from the likeliest tokens of this total probability
    c.rollout.min_p = 0.0  # sample from tokens of at least this fraction of the largest probability
    c.rollout.dynamic_sampling = False  # replace groups whose rewards are all equal (DAPO)
    c.rollout.overlong_buffer = 0  # soft overlong penalty over the last n tokens (DAPO); 0: off
    # How far samplers run ahead of the learner (docs/async.md): sync, periodic, one_step,
    # fully_async(trigger=4, threshold=0.5, partial=True), areal(staleness=4),
    # in_flight(staleness=4), dora(staleness=2), roll_flash(alpha=1, redundant=0),
    # laminar(staleness=4, repack=0.5) or oapl(lag=400).
    c.rollout.schedule = "sync"
    # Where samplers run ahead. virtual: in turns with the learner, reproducible; threads: on other
    # devices of this process; ray: in Ray actors; external: in engines of others (docs/engines.md), also
    # where they do not run ahead.
    c.rollout.driver = "virtual"
    c.rollout.workers = 1  # number of samplers
    # Agent that plays the samples through an endpoint of the run, as "module:function" or
    # "verifiers:TASKSET" (docs/harness.md). It gives the rewards. "": none.
    c.rollout.harness = ""
    c.rollout.harness_timeout = 600.0  # seconds of one session, without compilation
    # host:port of a Ray cluster. "": the variable RAY_ADDRESS, else a local Ray.
    c.rollout.ray_address = ""
    c.rollout.cpus_per_worker = 1.0  # CPUs that Ray reserves for each worker
    c.rollout.gpus_per_worker = 0.0  # GPUs of each worker
    c.rollout.tpus_per_worker = 0.0  # TPU chips of each worker
    # Of driver external: "http://host:8000,http://other:8000".
    c.rollout.engines = ""
    c.rollout.engine_kind = "vllm"  # what runs there: vllm (also our own server) or sglang
    # Folder of weight versions, which the learner and the engines see at the same path.
    c.rollout.weights_folder = ""
    c.rollout.engine_token_file = ""  # file with the token of the engines' API
    # Replay of groups: uniform(uses=2, most=4), newest, fresh_by_ess or fresh(uses=2, most=4, tau=500).
    # A batch has prompts / uses new groups. "": none (docs/async.md).
    c.rollout.replay = ""
    # For experts
    # Most tokens of a recorded sampling mask (of top_k, top_p and min_p), over which the learner
    # normalises. 0: off.
    c.rollout.sampling_mask_size = 0
    # Accept the bias of ratios that top_k, top_p and min_p cause without a sampling mask.
    c.rollout.allow_filter_bias = False
    # Python of the harness's process. "": this one.
    c.rollout.harness_python = ""
    # Session whose calls make several rows. rows: train on all; longest: on the one with the most
    # sampled tokens; refuse: it has failed, as has an episode whose earlier turns would change.
    c.rollout.on_fork = "rows"
    # Rows of a batch for forks; the shortest forks beyond them are left out. 0: as many as samples.
    c.rollout.fork_rows = 0
    c.rollout.max_rounds = 4  # most rounds of new prompts with dynamic_sampling
    # With dynamic_sampling, first sample more answers of a prompt whose rewards are all equal, up to this
    # many times group_size; such a group takes the place of several, and is cut where there is no room. 1:
    # never.
    c.rollout.extend_equal = 1
    c.rollout.worker_timeout = 30.0  # seconds without an answer until a worker is restarted
    c.rollout.start_timeout = 1800.0  # seconds to wait for the first worker, driver ray
    # Most groups started and not trained on. 0: as many as the schedule allows.
    c.rollout.queue = 0
    c.rollout.update_turns = 0  # engine calls per sampler during an update, driver virtual
    # Steps between probes of the gap's parts, compared with the bounds of gate. 0: none.
    c.rollout.gap_probe_every = 0
    # Runs that check the sampler's weights by a fixed prompt at every sync: lora (those with
    # model.lora), always or never.
    c.rollout.canary = "lora"
    # Action above a bound. sync: warn and lower the bound on staleness by one version.
    c.rollout.on_gap_exceeded = "warn"
    # Weights that compute logp_old of stale tokens. ring: snapshots of the last versions; replica:
    # one, which scores samples as they finish; ewma: an average of the policy with a mean age of 10
    # updates (PPO-EWMA); none: the policy itself, for centre=prox with a folded weight, a3po, or centre=behav.
    c.rollout.old_logp_source = "ring"
    c.rollout.snapshots = 0  # of ring; 0: one more than the schedule's bound on staleness
    c.rollout.snapshot_gib = 16.0  # most host memory of the snapshots of all processes, GiB
    # Largest staleness of a replayed token in versions. 0: 4 more than the schedule's bound.
    c.rollout.max_age = 0
    # Teacher whose logits are mixed into the sampler's (docs/engine.md#a-teacher): a folder, a .gguf file or
    # hf://OWNER/NAME with the policy's tokenizer. "": none.
    c.rollout.teacher = ""
    # Weight of the teacher's logits: linear or cosine(start=0.5, steps=1000, difficulty=""), 0 after
    # `steps`. difficulty: reward, or a dotted field of the data.
    c.rollout.alpha = "linear"

    # The sampler (docs/engine.md).
    c.engine = ConfigDict()
    c.engine.slots = 128  # sequences decoded together
    c.engine.dtype = "float32"  # dtype of what is not quantized
    c.engine.cache_dtype = "float32"  # dtype of the KV cache
    c.engine.page_size = 16  # tokens per page of the KV cache
    c.engine.num_pages = 0  # of each data shard; 0: enough for the longest sequences
    # Format of the products: int8 (w8a16, w8a8), float8_e4m3 (fp8_w8a16, fp8_w8a8) or, of experts alone, mxfp4.
    c.engine.quantization = "w8a8"
    c.engine.numerics = ""  # as model.numerics, for the sampler alone; "": the learner's
    # Longest draft from n-grams of the response, in tokens: 2^n - 1. 0: no drafts.
    c.engine.max_draft = 0
    # Small model that makes drafts of max_draft tokens: a folder, .gguf file or hf:// path. "": none.
    c.engine.drafter = ""
    c.engine.drafter_every = 0  # steps between trainings of the drafter; 0: never
    c.engine.drafter_lr = 1e-3  # its learning rate
    c.engine.drafter_weighting = "none"  # weight of a sample there
    # auto: a synchronous run on shared devices frees the sampler's weights and KV cache during the
    # update (docs/engine.md#sleep).
    c.engine.sleep = "auto"
    # Unroll the layers (faster on CPU and GPU) or scan over them (TPU: compiles one layer).
    c.engine.unroll = True
    # For experts
    # KV eviction: (first, last) full pages that a sequence keeps, for the learner, too. (0, 0): all.
    c.engine.retention = (0, 0)
    # Pages that a sequence keeps between these, by their attention so far (H2O). 0: none.
    c.engine.heavy_pages = 0
    c.engine.heavy_groups = 1  # groups of consecutive layers, each of which chooses these alone
    c.engine.teacher_quantization = "none"  # as engine.quantization, of rollout.teacher
    c.engine.unquantized = ()  # layers to leave unquantized: q, k, v, o, gate, up, down, expert_*
    c.engine.noise_start = 0.0  # first standard deviation of noise on the norms (QeRL); 0: off
    c.engine.noise_end = 5e-4  # last standard deviation of this noise
    c.engine.noise_stages = 10  # steps of the decay, after a first part of the run without noise
    # Record the experts of every token, for correction.routing and the measures of routing.
    c.engine.record_routes = False
    # Artificial mismatch for experiments, as "logits(scale=0.5)". "": none.
    c.engine.injected = ""
    c.engine.steps_per_call = 4  # decode steps per call; the scheduler runs between calls
    c.engine.prefill_batch = 16  # prompts per prefill call
    c.engine.prefill_chunk = 512  # most tokens of one prompt per prefill call
    # Start a call before the last one's tokens are read. Not with drafts or retention.
    c.engine.async_scheduling = False
    c.engine.policy = "first_come"  # order of waiting sequences, of jaxrl_tis/engine/policies.py
    # A sequence that waited for this many admissions goes first. 0: no bound.
    c.engine.max_wait_admissions = 0
    # Tokens until a sequence gives its slot to a waiting one that comes first. 0: never.
    c.engine.preempt_after = 0
    # Rows, slots * (draft + 1), that one pass computes in the time of one row; sets draft lengths. 0:
    # measured times do.
    c.engine.free_batch_rows = 128

    # The correction of the gap, and the loss. docs/methods.md lists every method. A method is
    # written "name" or "name(parameter=value, ...)".
    c.correction = ConfigDict()
    c.correction.preset = "tis_2"  # sets the next six fields where they are not given
    # Centre of the objective's ratio. old: the learner at the weights that sampled. prox: at the start
    # of the update. behav: the sampler itself (bypass), no weight beside it.
    c.correction.centre = placeholder(str)
    # Importance weight of the factor engine, pi_old / mu, as "token_tis(cap=2.0)"; or "none".
    c.correction.weight = placeholder(str)
    # Importance weight of the factor staleness, pi_prox / pi_old; "none"; or "folded": the weight above
    # is of both, pi_prox / mu.
    c.correction.staleness_weight = placeholder(str)
    # Rejection masks, joined by &, as "seq_mean_k3(upper=0.01) & veto". "": none. A mask judges what the
    # weight sees, or with of=engine, staleness, folded or policy that ratio.
    c.correction.masks = placeholder(str)
    c.correction.objective = placeholder(str)  # surrogate loss, as "ppo(clip_high=0.28)"
    # Centre scores over the n likeliest tokens, "top(32)", or over the recorded sampling mask,
    # "kept"; or "none".
    c.correction.centering = placeholder(str)
    c.correction.advantage = "grpo"  # advantage estimator
    # Rewards that a token's advantage is made from: of the episode, of the rest (the token's turn and
    # later ones) or of the turn.
    c.correction.turn_credit = "episode"
    c.correction.aggregation = "token-mean"  # reduction of the token losses to one number
    c.correction.kl = "k3"  # estimator of the KL to the reference model
    c.correction.kl_coeff = 0.0  # coefficient of the KL; 0: no reference model in memory
    c.correction.kl_placement = "loss"  # add the KL to the loss, or subtract it from token rewards
    # Coefficient of the KL to the sampler, (logp - logp_behav)^2 / 2.
    c.correction.sampler_kl_coeff = 0.0
    # Coefficient of the KL of the policy with all keys to that with engine.retention (Shadow Mask: 0.1).
    c.correction.dense_kl_coeff = 0.0
    c.correction.entropy_coeff = 0.0  # coefficient of the entropy bonus
    # Coefficient of the cross-entropy on tokens of an environment or an agent (ECHO). 0: they are in
    # no loss.
    c.correction.environment_ce_coeff = 0.0
    # Routes that the learner replays in models with experts (docs/moe.md). none: its own. r2: those
    # of its pass before the update. r3: the sampler's. keep: r3, and no token without a route. The
    # presets moe and async_moe set it by train.minibatches.
    c.correction.routing = placeholder(str)
    c.correction.routing_missing = "stop"  # samples without routes in r3: stop, or mask them
    c.correction.load_balance_coeff = 0.0  # coefficient of the load-balancing loss of the router
    c.correction.router_z_coeff = 0.0  # coefficient of the z-loss of the router's logits
    # Controllers, joined by &, as "ess_scale & adaptive_kl(kl_target=0.05)". "": none.
    c.correction.controllers = ""
    # For experts
    c.correction.batch_normalize = False  # divide the weights by their mean over the batch
    # Keep rejected tokens in the denominators of the loss. Masks inside the update always do
    # (docs/methods.md#rejected-and-unscored-responses).
    c.correction.rejected_in_denominator = False
    c.correction.scale = 0.0  # divisor of seq-mean-token-sum-norm; 0: the row length
    c.correction.offload_reference = False  # keep the reference model in host memory between uses

    # Bounds on the gap of learner and sampler at the same weights (docs/gate.md). inf: no bound.
    c.gate = ConfigDict()
    c.gate.required = False  # measure the gap before the first step; stop above a bound
    c.gate.max_d_mean = 0.05  # mean of |logp_old - logp_behav| over tokens, nats
    c.gate.max_d_p99 = 0.3  # 99th percentile of |logp_old - logp_behav|, nats
    c.gate.max_d_max = float("inf")  # maximum of |logp_old - logp_behav|, nats
    c.gate.max_dp_max = 0.25  # maximum of |p_old - p_behav|
    c.gate.max_k3 = 0.002  # KL of sampler to learner per token, estimator k3, nats

    # AdamW of the policy.
    c.optimizer = _optimizer(1e-4)
    # Keep the bias of routers with sigmoid scores. False: move it against the load of each expert.
    c.optimizer.freeze_router_bias = True
    c.optimizer.router_bias_rate = 1e-3  # step of the bias per update, if it moves
    # AdamW of the critic, with advantage "gae".
    c.critic = _optimizer(1e-4)
    c.critic.value_clip = 0.5  # clip of the value loss around the old values

    # The update.
    c.train = ConfigDict()
    c.train.minibatches = 1  # updates per epoch over a rollout batch
    c.train.epochs = 1  # epochs over a rollout batch
    c.train.microbatch_rows = 32  # rows per forward and backward pass
    # Leave responses with a turn that rollout.max_new_tokens cut, and episodes at task.max_turns or
    # task.max_context_tokens, out of the loss (DAPO's overlong filtering). Their rewards still count.
    c.train.mask_truncated = False
    c.train.pack_length = 0  # tokens of a packed row; 0: one sequence a row
    # For experts
    # auto: compute logp_old within the update where the methods allow it; never: before it.
    c.train.fuse_old_logp = "auto"
    c.train.logprob_chunk = 1024  # positions whose logits are in memory at a time
    # Dtype of the gradients' reduce-scatter over devices. bfloat16 sends half the bytes.
    c.train.grad_reduce_dtype = "float32"

    # The record of the run (docs/metrics.md).
    c.metrics = ConfigDict()
    c.metrics.record = "full"  # values in metrics.jsonl
    c.metrics.sinks = ()  # further destinations: of wandb, trackio
    c.metrics.samples = 4  # responses per evaluation and recorded step, in samples.jsonl
    c.metrics.samples_every = 10  # steps between recorded training samples; 0: evaluations alone
    # For experts
    # Steps between expensive diagnostics: percentiles, profiles by position and variance proxies.
    c.metrics.diagnostics_every = 10

    # Device meshes: (data, fsdp, tensor), and a fourth entry context to shard long rows, or the
    # positions of each page of keys. -1: the remaining devices.
    c.mesh = ConfigDict()
    c.mesh.train = (1, 1, 1)  # devices of the learner along (data, fsdp, tensor, context)
    c.mesh.serve = (1, 1, 1)  # devices of the sampler along (data, fsdp, tensor, context)

    # Evaluation on held-out prompts.
    c.eval = ConfigDict()
    c.eval.every = 25  # steps between evaluations; also at the start and the end
    c.eval.prompts = 512  # number of held-out prompts
    c.eval.threshold = 1.0  # least reward of a correct response, for accuracies
    c.eval.params = ConfigDict({"split": "eval"})  # overrides of task.params, at least one
    c.eval.params.unlock()

    # Checkpoints (docs/reliability.md).
    c.checkpoint = ConfigDict()
    c.checkpoint.every = 25  # steps between checkpoints; also after the last step
    c.checkpoint.keep = 2  # number of checkpoints to keep
    # For experts
    # Seconds that a step may go on after a request to stop. A run that needs 20 more seconds ends
    # without a checkpoint.
    c.checkpoint.grace = 10.0

    # Restart of a run that hangs.
    c.watchdog = ConfigDict()
    # Seconds without progress until a process writes its stacks and asks for a restart. Set it above
    # the longest compilation. 0: never.
    c.watchdog.timeout = 1800.0

    # Runs of several processes.
    c.processes = ConfigDict()
    c.processes.consistency_every = 10  # steps between checks that all processes agree
    return c


def _optimizer(lr: float) -> ConfigDict:
    c = ConfigDict()
    c.lr = lr  # learning rate; 0: these weights stay as they are
    c.schedule = "constant"  # learning rate over the run; linear and cosine end at 0
    c.warmup = 0  # updates with a rising learning rate
    c.weight_decay = 0.0  # decoupled weight decay
    c.clip_norm = 1.0  # largest norm of a gradient
    # For experts
    c.offload = False  # keep both moments in host memory between updates
    c.b1 = 0.9  # decay of the first moment
    c.b2 = 0.999  # decay of the second moment
    c.eps = 1e-8  # added to the root of the second moment
    return c
