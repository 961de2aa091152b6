set -euo pipefail
# v5litepod-8: 8 chips, 1 host
# 1. ask for the machines, and wait until they are there
gcloud compute tpus queued-resources create gsm8k-qwen25-0p5b-grpo \
  --node-id=gsm8k-qwen25-0p5b-grpo --accelerator-type=v5litepod-8 \
  --runtime-version=v2-alpha-tpuv5-lite
until [ "$(gcloud compute tpus queued-resources describe gsm8k-qwen25-0p5b-grpo \
  '--format=value(state.state)')" = ACTIVE ]; do sleep 30; done
ssh me@10.0.0.7 'mkdir -p gsm8k-qwen25-0p5b-grpo/launch'
scp CLONE/launch/venv.sh CLONE/launch/vllm.sh CLONE/launch/on_engines.sh \
  me@10.0.0.7:gsm8k-qwen25-0p5b-grpo/launch/
ssh me@10.0.0.7 \
  'WEIGHTS_FOLDER=/mnt/weights/gsm8k-qwen25-0p5b-grpo bash gsm8k-qwen25-0p5b-grpo/launch/on_engines.sh start 10.0.0.7 sglang /opt/sglang /mnt/weights/base --tp-size 2'
ssh 10.0.0.8 'mkdir -p gsm8k-qwen25-0p5b-grpo/launch'
scp CLONE/launch/venv.sh CLONE/launch/vllm.sh CLONE/launch/on_engines.sh \
  10.0.0.8:gsm8k-qwen25-0p5b-grpo/launch/
ssh 10.0.0.8 \
  'WEIGHTS_FOLDER=/mnt/weights/gsm8k-qwen25-0p5b-grpo bash gsm8k-qwen25-0p5b-grpo/launch/on_engines.sh start 10.0.0.8 sglang /opt/sglang /mnt/weights/base --tp-size 2'
# the engines and their folder, for every host
ENGINES=10.0.0.7,10.0.0.8
WEIGHTS_FOLDER=/mnt/weights/gsm8k-qwen25-0p5b-grpo
WEIGHTS_MOUNT=10.0.0.2:/weights
# 2. this commit and its environment on every host
folder=$(mktemp -d)
git -C CLONE archive --format=tar.gz -o "$folder/code.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" \
  gsm8k-qwen25-0p5b-grpo:gsm8k-qwen25-0p5b-grpo.tar.gz --worker=all
gcloud compute tpus tpu-vm ssh gsm8k-qwen25-0p5b-grpo --worker=all \
  '--command=mkdir -p gsm8k-qwen25-0p5b-grpo && tar -xzf gsm8k-qwen25-0p5b-grpo.tar.gz -C gsm8k-qwen25-0p5b-grpo'
umask 077
printf '%s=%q\n' HF_TOKEN "$HF_TOKEN" ENGINES "$ENGINES" WEIGHTS_FOLDER "$WEIGHTS_FOLDER" WEIGHTS_MOUNT "$WEIGHTS_MOUNT" >"$folder/environment"
gcloud compute tpus tpu-vm scp "$folder/environment" gsm8k-qwen25-0p5b-grpo:.jaxrl_tis_env \
  --worker=all
rm -r "$folder"
gcloud compute tpus tpu-vm ssh gsm8k-qwen25-0p5b-grpo --worker=all \
  '--command=bash gsm8k-qwen25-0p5b-grpo/launch/on_vm.sh setup'
# 3. the run on every host under launch/supervise.py, and the log of host 0
gcloud compute tpus tpu-vm ssh gsm8k-qwen25-0p5b-grpo --worker=all \
  '--command=bash gsm8k-qwen25-0p5b-grpo/launch/on_vm.sh start v5e --config=configs/gsm8k_qwen25_0p5b.py:grpo --workdir=gs://b/x --config.engine.quantization=none --config.rollout.driver=external --config.rollout.engine_kind=sglang --config.rollout.weights_folder=/mnt/weights/gsm8k-qwen25-0p5b-grpo --config.rollout.engines=http://10.0.0.7:8000,http://10.0.0.8:8000 --config.model.path=/mnt/weights/base'
gcloud compute tpus tpu-vm ssh gsm8k-qwen25-0p5b-grpo --worker=0 \
  '--command=bash gsm8k-qwen25-0p5b-grpo/launch/on_vm.sh follow'
# then: whenever the state is one of SUSPENDING, SUSPENDED, FAILED, PREEMPTED, delete --force and again from 1; the run continues from its workdir
