#!/usr/bin/env bash
# Writes the example manifests of this folder: launch/gke/manifests.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
jobset() { python3 launch/gke/jobset.py manifest --image=REGISTRY/jaxrl_tis "$@"; }

jobset --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=gs://BUCKET/gsm8k --spot >launch/gke/v5e-8.yaml
dapo() {
  jobset --config=configs/dapo_qwen25_32b.py --config.model.path=hf://Qwen/Qwen2.5-32B \
    --config.task.params.path=gs://BUCKET/dapo/train.jsonl \
    --config.eval.params.path=gs://BUCKET/dapo/aime2024.jsonl "$@"
}
dapo --workdir=gs://BUCKET/runs/dapo >launch/gke/v5p-128.yaml
dapo --workdir=gs://BUCKET/runs/dapo-two --name=dapo-two-slices --num_slices=2 \
  "--config.mesh.train=(2,64,1)" --config.train.microbatch_rows=128 >launch/gke/two-slices.yaml
python3 launch/gke/raycluster.py manifest --image=REGISTRY/jaxrl_tis \
  --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=gs://BUCKET/ahead --name=gsm8k-ahead \
  --worker_accelerator=v5litepod-4 --num_workers=2 --spot "--config.rollout.schedule=areal(staleness=2)" \
  --config.correction.preset=async >launch/gke/raycluster.yaml
