"""The constants of the time estimate: how fast things go, beside what data sheets say.

docs/estimates.md says which runs they were calibrated on, and holds them against others.
"""

from __future__ import annotations

# Calibrated on the runs that docs/estimates.md calls "calibration"; the other runs there are predictions. What a card
# reaches beside these is in devices.py.
EXPERT_LAUNCH = 73e-6  # of one product of one expert in the trainer, beside its operations: it has few rows
EXPERTS_SECONDS = 100e-6  # of an engine's layer with experts, beside its other seconds: routing, sorting, grouping
SPREAD = 0.9  # of response lengths: standard deviation of their logarithm, before they are cut
SWITCH_SECONDS = 12.0  # of a rollout in which the trainer leaves GPUs for engines, and returns (memory.offload_trainer)
SYNC_SECONDS = (
    3.2  # of a sync on GPUs that both share, beside its bytes: engines wake, take tensor by tensor, start anew
)
OVERHEAD_SECONDS = 0.0  # of a rollout beside all else: packing, logging. The row that has phases leaves nothing for it

# The same runs only bound these: docs/estimates.md has between what, and what other values would change.
EFFICIENCY = 0.62  # of what large products sustain that passes reach
STEP_SECONDS = 1.5e-3  # of one step of an engine, however little it computes: scheduling, sampling, detokenizing
LAYER_SECONDS = 25e-6  # of one layer of it, in CUDA graphs

# Not calibrated: what such hardware and software is known to give.
EAGER_SECONDS = 120e-6  # of one layer in eager mode, besides: about a dozen kernels, each launched by Python
BANDWIDTH = 0.75  # of the memory's data sheet, in long reads
LINK = 0.6  # of a link's data sheet, in collectives
NODE_LATENCY, NETWORK_LATENCY = 15e-6, 60e-6  # seconds of one all-reduce of little data
OVERLAPPED = 0.3  # of the time of summing gradients that is left where it goes on beside the backward pass
SYNC_LINK = 0.6  # of a link, for weights that are gathered
BUCKET_SECONDS = 2e-3  # of a bucket of weights, beside its bytes: from the rank through the engine to its workers
RELOAD_SECONDS = 3e-3  # of a layer that an engine takes new weights into, beside its bytes

# Between these shares of an estimate lie the published runs of docs/estimates.md whose lengths are published, too (a
# test compares); docs/estimates.md counts how many of the others lie there.
RANGE = (0.77, 1.29)
