"""Runs of TRL, verl and ms-swift in the forms that public ones have: of GRPO, and of their other trainers.

Each is the name of a file, its text, and what the refusal says, or None if it is a run of GRPO or GSPO.
"""

from __future__ import annotations

Case = tuple[str, str, str | None]

_HF = """\
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: org/data
learning_rate: 2.0e-5
num_train_epochs: 1
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
gradient_checkpointing: true
bf16: true
logging_steps: 5
lr_scheduler_type: cosine
warmup_ratio: 0.1
report_to: [wandb]
"""
_OPTIONS = "--model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name org/data --learning_rate 1e-6 --bf16"
_SWIFT = "--model Qwen/Qwen2.5-7B-Instruct --dataset org/data --torch_dtype bfloat16 --learning_rate 1e-5"
_MEGATRON = "--model Qwen/Qwen3-8B --dataset org/data --micro_batch_size 1 --global_batch_size 16 --lr 1e-5"
_SWIFT_YAML = """\
model: Qwen/Qwen2.5-7B-Instruct
dataset: [org/data]
torch_dtype: bfloat16
learning_rate: 1.0e-5
num_train_epochs: 1
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
"""
_VERL = "data.train_files=$HOME/d/train.parquet data.val_files=$HOME/d/test.parquet data.train_batch_size=64"
_ACTOR = (
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8"
)
_PPO = f"python3 -m verl.trainer.main_ppo {_VERL} {_ACTOR}"

# The converters were changed by these.
TUNED: dict[str, list[Case]] = {
    "TRL": [
        ("sft.yaml", f"{_HF}max_length: 4096\npacking: true\n", "packing belong to TRL's SFT"),
        ("config.yaml", f"{_HF}max_seq_length: 4096\n", "max_seq_length belongs to TRL's SFT"),
        ("config.yaml", f"{_HF}eos_token: <|im_end|>\nuse_liger_kernel: true\n",
         "belongs to TRL's SFT or reward"),
        ("dpo.yaml", f"{_HF}beta: 0.1\nmax_prompt_length: 512\n", "its file dpo.yaml names TRL's DPO"),
        ("config.yaml", f"{_HF}beta: 0.1\nmax_prompt_length: 512\n", "max_prompt_length can be DPO's or KTO's, too"),
        ("config.yaml", f"{_HF}beta: 0.1\nmax_length: 1024\noutput_dir: runs/zephyr-dpo\n", "belongs to TRL's DPO"),
        ("config.yaml", f"{_HF}loss_type: apo_zero\n", "loss_type=apo_zero belongs to TRL's DPO"),
        ("kto.yaml", f"{_HF}desirable_weight: 1.0\nundesirable_weight: 1.3\n",
         "undesirable_weight belong to TRL's KTO"),
        ("rloo.yaml", f"{_HF}num_generations: 4\nreward_funcs: [accuracy]\n", "its file rloo.yaml names TRL's RLOO"),
        ("run.yaml", f"{_HF}num_generations: 4\nnormalize_advantages: true\n", "belongs to TRL's RLOO"),
        ("run.yaml", f"# RLOO trainer config\n{_HF}num_generations: 4\n", "a comment in it names TRL's RLOO"),
        ("run.yaml", f"{_HF}rloo_k: 2\ntotal_episodes: 10000\n", "rloo_k, total_episodes belong to TRL's RLOO"),
        ("reward.yaml", f"{_HF}center_rewards_coefficient: 0.01\n", "belongs to TRL's reward"),
        ("run.yaml", _HF, "all trainers of TRL have those that it has"),
        ("run.yaml", f"{_HF}use_vllm: true\nmax_completion_length: 256\n", "use_vllm can be RLOO's, online DPO's"),
        ("zero3.yaml", "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {}\n", "accelerate's config"),
        ("run.sh", f"trl sft {_OPTIONS} --packing", "trl sft is another trainer of TRL"),
        ("run.sh", f"accelerate launch --num_processes 8 examples/scripts/dpo.py {_OPTIONS} --beta 0.1", "dpo.py"),
        ("run.sh", f"accelerate launch train.py {_OPTIONS} --max_prompt_length 512 --beta 0.1",
         "can be DPO's or KTO's"),
        ("grpo.yaml", f"{_HF}num_generations: 8\nreward_funcs: [accuracy]\n", None),
        ("run.yaml", f"{_HF}num_generations: 8\nscale_rewards: false\nmax_seq_length: 1024\n", None),
        ("run.sh", f"accelerate launch train_grpo.py {_OPTIONS} --num_generations 8", None),
    ],
    "verl": [
        ("sft.sh", f"torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer {_VERL} model.partial_pretrain=m",
         "verl.trainer.fsdp_sft_trainer does no reinforcement learning"),
        ("sft.sh", f"torchrun -m verl.trainer.sft_trainer {_VERL} model.path=m optim.lr=1e-5", "no reinforcement"),
        ("ppo.sh", f"{_PPO} algorithm.adv_estimator=gae critic.model.path=Qwen/Qwen2.5-7B", "needs no critic"),
        ("ppo.sh", f"{_PPO} critic.optim.lr=1e-5", "algorithm.adv_estimator is not given (its default is gae)"),
        ("rloo.sh", f"{_PPO} algorithm.adv_estimator=rloo", "algorithm.adv_estimator=rloo"),
        ("rf.sh", f"{_PPO} algorithm.adv_estimator=reinforce_plus_plus", "algorithm.adv_estimator=reinforce_plus_plus"),
        ("sft.yaml", "data: {train_batch_size: 256}\nmodel: {partial_pretrain: m}\noptim: {lr: 1e-5}\ntrainer: {}\n",
         "this is a config of verl's supervised trainer"),
        ("data.yaml", "train_files: a\nval_files: b\nmax_prompt_length: 512\nmax_response_length: 512\nshuffle: true\n",
         "these arguments do not show whose they are"),
        ("async.sh", f"python3 -m verl.experimental.fully_async_policy.fully_async_main {_ACTOR}", "at the same time"),
        ("grpo.sh", f"{_PPO} algorithm.adv_estimator=grpo", None),
        ("gspo.sh", f"{_PPO} algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo", None),
    ],
    "ms-swift": [
        ("sft.sh", f"CUDA_VISIBLE_DEVICES=0 swift sft {_SWIFT} --tuner_type lora", "swift sft is no reinforcement"),
        ("sft.sh", f"torchrun --nproc_per_node 8 /opt/swift/cli/sft.py {_SWIFT}", "cli/sft.py is no reinforcement"),
        ("pt.sh", f"megatron pt {_MEGATRON}", "megatron pt is no reinforcement learning"),
        ("dpo.sh", f"swift rlhf --rlhf_type dpo {_SWIFT}", "--rlhf_type dpo: only --rlhf_type grpo"),
        ("ppo.sh", f"swift rlhf --rlhf_type ppo {_SWIFT} --reward_model m", "--rlhf_type ppo"),
        ("dpo.sh", f"swift rlhf {_SWIFT}", "--rlhf_type is not given (its default is dpo)"),
        ("mdpo.sh", f"megatron rlhf --rlhf_type dpo {_MEGATRON}", "--rlhf_type dpo"),
        ("sft.yaml", f"{_SWIFT_YAML}tuner_type: lora\nlora_rank: 8\n", "arguments of ms-swift without rlhf_type"),
        ("dpo.yaml", f"rlhf_type: dpo\n{_SWIFT_YAML}", "--rlhf_type dpo"),
        ("grpo.yaml", f"rlhf_type: grpo\n{_SWIFT_YAML}num_generations: 8\n", None),
        ("ray.yaml", "train: {rlhf_type: grpo, gpus: 8, model: m, dataset: d, micro_batch_size: 1, "
         "global_batch_size: 64,"
         " num_generations: 8, lr: 1e-6}\nrollout: {gpus: 8, vllm_tensor_parallel_size: 2}\n", None),
        ("ray.yaml", "train: {rlhf_type: dpo, gpus: 8, model: m, dataset: d, micro_batch_size: 1, lr: 1e-6}\n",
         "--rlhf_type dpo"),
    ],
}  # fmt: skip

# Never run while the converters were being changed.
JUDGED: dict[str, list[Case]] = {
    "TRL": [
        ("qlora.yaml", f"{_HF}load_in_4bit: true\nuse_peft: true\nlora_r: 16\ncompletion_only_loss: true\n",
         "TRL's SFT"),
        ("config_full.yaml", f"{_HF}dataset_num_proc: 12\ndataset_text_field: text\n", "TRL's SFT"),
        ("config.yaml", f"# SFT training arguments\n{_HF}", "a comment in it names TRL's SFT"),
        ("orpo.yaml", f"{_HF}beta: 0.05\nmax_length: 2048\nmax_prompt_length: 1792\n", "belongs to TRL's ORPO"),
        ("cpo.yaml", f"{_HF}loss_type: simpo\ncpo_alpha: 0.5\nsimpo_gamma: 0.5\n", "TRL's CPO"),
        ("align.yaml", f"{_HF}beta: 0.1\nhub_model_id: me/model-kto\n", "hub_model_id me/model-kto names TRL's KTO"),
        ("ppo.yaml", f"{_HF}kl_coef: 0.05\nnum_ppo_epochs: 4\nvf_coef: 0.1\nadap_kl_ctrl: true\n", "TRL's PPO"),
        ("online.yaml", f"{_HF}judge: pair_rm\nmax_new_tokens: 64\nuse_vllm: true\n", "TRL's online DPO"),
        ("gkd.yaml", f"{_HF}teacher_model_name_or_path: m\nlmbda: 0.5\nmax_new_tokens: 64\n", "TRL's GKD"),
        ("sdpo.yaml", f"{_HF}num_generations: 8\ndistillation_alpha: 0.5\n", "TRL's self-distillation"),
        ("async.yaml", f"{_HF}num_generations: 8\nmax_staleness: 4\nweight_sync_steps: 1\n", "asynchronous GRPO"),
        ("prm.yaml", f"{_HF}step_separator: x\n", "TRL's PRM"),
        ("run.sh", f"trl kto {_OPTIONS}", "trl kto is another trainer"),
        ("run.sh", f"python -m trl.scripts.rloo {_OPTIONS} --num_generations 4", "trl.scripts.rloo is another trainer"),
        ("run.sh", f"accelerate launch --config_file z.yaml finetune.py {_OPTIONS} --max_seq_length 2048", "TRL's SFT"),
        ("run.sh", f"torchrun --nproc_per_node 8 main.py {_OPTIONS} --rloo_k 4 --num_generations 4", "TRL's RLOO"),
        ("run.py", "from trl import KTOConfig, KTOTrainer\nKTOTrainer(args=KTOConfig(beta=0.1)).train()\n",
         "KTOTrainer is"),
        ("run.sh", f"{_OPTIONS} --packing --per_device_train_batch_size 4", "packing belongs to TRL's SFT"),
        ("config_demo.yaml", f"{_HF}output_dir: data/Qwen-GRPO\nnum_generations: 16\nmax_completion_length: 512\n",
         None),
        ("math.yaml", f"{_HF}loss_type: luspo\nnum_generations: 8\n", "loss_type luspo is another objective"),
        ("distill.yaml", f"{_HF}output_dir: DeepSeek-R1-Distill-Qwen-1.5B-math\nnum_generations: 8\n", None),
        ("from_sft.yaml", f"{_HF}reward_funcs: [accuracy, format]\nnum_generations: 8\n", None),
        ("run.sh", f"accelerate launch src/open_r1/grpo.py {_OPTIONS} --use_vllm --num_generations 8", None),
    ],
    "verl": [
        ("run.sh", f"deepspeed --module verl.trainer.fsdp_sft_trainer {_VERL} optim.lr=1e-4", "no reinforcement"),
        ("run_megatron.sh", f"{_PPO} --config-name=ppo_megatron_trainer algorithm.adv_estimator=gae",
         "needs no critic"),
        ("remax.sh", f"{_PPO} algorithm.adv_estimator=remax", "algorithm.adv_estimator=remax"),
        ("opo.sh", f"{_PPO} algorithm.adv_estimator=opo", "algorithm.adv_estimator=opo"),
        ("prime.sh", f"python3 -m recipe.prime.main_prime {_VERL} {_ACTOR}",
         "recipe.prime.main_prime is another trainer"),
        ("gen.sh", "python3 -m verl.trainer.main_generation trainer.nnodes=1 data.path=x", "no reinforcement learning"),
        ("eval.sh", "python3 -m verl.trainer.main_eval data.path=x", "no reinforcement learning"),
        ("ppo.yaml", "algorithm: {adv_estimator: gae}\nactor_rollout_ref: {model: {path: m}}\ncritic: {}\n",
         "no critic"),
        ("sft_trainer.yaml", "data: {train_files: a}\nmodel: {path: m}\noptim: {lr: 1e-5}\ntrainer: {nnodes: 1}\n",
         "verl's supervised trainer"),
        ("dapo.sh", f"python3 -m recipe.dapo.main_dapo {_VERL} {_ACTOR} algorithm.adv_estimator=grpo", None),
        ("grpo.yaml", "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 8}}\n",
         None),
    ],
    "ms-swift": [
        ("a.sh", f"NPROC_PER_NODE=8 swift pt {_SWIFT} --tuner_type full", "swift pt is no reinforcement learning"),
        ("b.sh", f"megatron sft {_MEGATRON} --packing true", "megatron sft is no reinforcement learning"),
        ("c.sh", f"swift rlhf --rlhf_type kto {_SWIFT} --desirable_weight 1.0", "--rlhf_type kto"),
        ("d.sh", f"swift rlhf --rlhf_type gkd {_SWIFT} --teacher_model m --lmbda 0.5", "--rlhf_type gkd"),
        ("e.sh", f"swift rlhf --rlhf_type orpo {_SWIFT}", "--rlhf_type orpo"),
        ("f.sh", f"swift rlhf --rlhf_type rm {_SWIFT}", "--rlhf_type rm"),
        ("g.sh", f"megatron rlhf --rlhf_type kto {_MEGATRON}", "--rlhf_type kto"),
        ("h.sh", f"megatron rlhf --rlhf_type gkd {_MEGATRON} --teacher_model m", "--rlhf_type gkd"),
        ("i.sh", f"torchrun --nproc_per_node 8 swift/cli/pt.py {_SWIFT}", "swift/cli/pt.py is no reinforcement"),
        ("j.yaml", f"{_SWIFT_YAML}train_type: full\ndeepspeed: zero2\nmax_length: 4096\n", "without rlhf_type"),
        ("k.yaml", "train: {rlhf_type: gkd, gpus: 4, model: m, dataset: d, lr: 1e-6}\nteacher: {gpus: 4}\n",
         "rlhf_type gkd"),
        ("l.sh", f"swift rlhf --rlhf_type grpo {_SWIFT} --num_generations 8 --advantage_estimator gae",
         "--advantage_estimator gae: must be one of grpo, rloo"),
        ("m.sh", f"swift rlhf --rlhf_type grpo {_SWIFT} --num_generations 8 --tuner_type full", None),
        ("n.yaml", "train:\n  rlhf_type: grpo\n  model: m\n  dataset: d\n  gpus: 4\n  num_generations: 8\n"
         "  importance_sampling_level: sequence\n  micro_batch_size: 1\n  global_batch_size: 32\n", None),
    ],
}  # fmt: skip
