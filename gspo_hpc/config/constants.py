"""Facts that more than one room counts with: sizes in bytes, some of them by platform, thresholds, phases of a step."""

from __future__ import annotations

# Logits that are in memory at once, in fp32 (ops/logprobs.py); on the CPU: what a shared cache holds.
LOGITS_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
# Tokens whose logits these are, at most.
LOGITS_BLOCK_TOKENS = {"cpu": 512, "cuda": 4096}
# Weights that a trainer gathers at once (policy/weight_stream.py): more would fall out of a CPU's caches, fewer leave a
# GPU's links idle.
GATHER_BUCKET_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
# Weights that an engine loads at once while the next ones are gathered (engine/transfer.py): every message to it takes
# milliseconds, and there is memory for two.
TRANSFER_BUCKET_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
# Parts of an optimizer's state that are on their way between the ranks that share it (checkpoint/shared_optimizer.py).
SAVE_TRANSIT_BYTES = 256 << 20
# Prompts of the probe, at most (training/probe.py).
PROBE_PROMPTS = 4
# NCCL's buffers, an estimate, since they depend on channels and peers: on a GPU for each group that its rank is in, and
# in /dev/shm for each rank of a node.
NCCL_BYTES = 32 << 20
# Racks that work as one node have 72 GPUs; on CPUs there is at most a rank for each core.
MOST_GPUS_PER_NODE = 256
# GPUs of the usual node, where only the number of all GPUs is known.
USUAL_GPUS_PER_NODE = 8
# Data files up to this size are read whole before a run, to count their rows and to check each; larger ones would take
# too long.
WHOLE_FILE_BYTES = 64 << 20
# Share of clipped ratios from which most of an update is thrown away (the console marks it, diagnose explains it).
OVERCLIPPED = 0.5
# Updates behind the first of their rollouts in which no ratio was clipped, after which the clip range has no effect
# (console): four rollouts of the paper's four updates. Runs that clip anything do so in their first rollouts.
INERT_UPDATES = 12
# Share of groups whose completions all have the same reward: at a half, half of the generation teaches nothing.
ZERO_VARIANCE = 0.5
# Sampling below which the likeliest token is nearly always taken (plan warns, diagnose explains): published recipes
# have a temperature of 0.6 or more, 0.7 of the probability or more, 20 tokens or more.
COLD, NARROW_P, NARROW_K = 0.5, 0.5, 5
# Share of its first entropy below which a policy has collapsed: what a policy gains goes with the entropy that it
# spends (arXiv 2505.22617: 76 % of the gain with 73 % of the entropy), so hardly anything is left to gain.
COLLAPSED = 0.05
# Divergence from the reference model, in nats a token, above which a policy runs away. Published targets are 6 and 10
# nats for 24 tokens (arXiv 1909.08593), so 0.4 a token at most; at 1 the policy's tokens are e times as likely as
# the reference has them, on average.
RUNAWAY_KL = 1.0
# The same from the policy that sampled, within a rollout, above which updates are too large: Spinning Up's PPO stops
# its updates at 0.01 to 0.05, and modular_rl's aims at 0.01.
LARGE_UPDATE = 0.05
# Effective sample size of tokens weighted by the ratio of trainer and engine, as a share, below which the estimate is
# made by few of them: particle filters draw again at a half (Liu and Chen 1995), where the weights' deviation is 1.
FEW_EFFECTIVE = 0.5
# Divergence from a teacher, in nats a token: a policy that is twice as far as at first moves away from it (the console
# says so, diagnose explains it), unless both are as near as this, where the estimate is mostly noise.
LOST_TEACHER, NEAR_TEACHER = 2.0, 0.01
# Parts of a step whose seconds are in its record (seconds/NAME): reward_wait is a part of generate; the last two come
# after the record is made.
STEP_PHASES = ("generate", "reward_wait", "reward_model", "old_logprobs", "reference", "update", "sync")
PHASES = (*STEP_PHASES, "save", "eval")
# Rows of an embedding to which an adapter is added at once, in fp32 (policy/adapters/lora.py).
MERGED_ROWS = 4096
# Tokens of a judge's reply, at most, unless its request says otherwise.
JUDGE_REPLY_TOKENS = 512
# Ranks of adapters that vLLM makes room for, beside an engine's weights.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
