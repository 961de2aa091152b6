set -euo pipefail
# v5litepod-8: 8 chips, 1 host; engines on 2 x v6e-4: 8 chips
# 1. ask for the machines, and wait until they are there
gcloud compute tpus queued-resources create gsm8k-qwen3-8b-lora \
  --node-id=gsm8k-qwen3-8b-lora --accelerator-type=v5litepod-8 \
  --runtime-version=v2-alpha-tpuv5-lite
gcloud compute tpus queued-resources create gsm8k-qwen3-8b-lora-worker-0 \
  --node-id=gsm8k-qwen3-8b-lora-worker-0 --accelerator-type=v6e-4 \
  --runtime-version=v2-alpha-tpuv6e
gcloud compute tpus queued-resources create gsm8k-qwen3-8b-lora-worker-1 \
  --node-id=gsm8k-qwen3-8b-lora-worker-1 --accelerator-type=v6e-4 \
  --runtime-version=v2-alpha-tpuv6e
until [ "$(gcloud compute tpus queued-resources describe gsm8k-qwen3-8b-lora '--format=value(state.state)')" = ACTIVE ]; do sleep 30; done
# the engines and their folder, for every host
ENGINES=gsm8k-qwen3-8b-lora-worker-0,gsm8k-qwen3-8b-lora-worker-1
WEIGHTS_FOLDER=/mnt/weights/gsm8k-qwen3-8b-lora
WEIGHTS_MOUNT=10.0.0.2:/weights
# 2. this commit and its environment on every host
folder=$(mktemp -d)
git -C CLONE archive --format=tar.gz -o "$folder/code.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" \
  gsm8k-qwen3-8b-lora:gsm8k-qwen3-8b-lora.tar.gz --worker=all
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora --worker=all \
  '--command=mkdir -p gsm8k-qwen3-8b-lora && tar -xzf gsm8k-qwen3-8b-lora.tar.gz -C gsm8k-qwen3-8b-lora'
umask 077
printf '%s=%q\n' HF_TOKEN "$HF_TOKEN" ENGINES "$ENGINES" WEIGHTS_FOLDER "$WEIGHTS_FOLDER" WEIGHTS_MOUNT "$WEIGHTS_MOUNT" >"$folder/environment"
gcloud compute tpus tpu-vm scp "$folder/environment" gsm8k-qwen3-8b-lora:.jaxrl_tis_env \
  --worker=all
rm -r "$folder"
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora/launch/on_vm.sh setup'
# 3. the run on every host under launch/supervise.py, and the log of host 0
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora/launch/on_vm.sh start v5e --config=configs/gsm8k_qwen3_8b_lora.py --workdir=gs://b/x --config.engine.quantization=none --config.rollout.driver=external --config.rollout.engine_kind=vllm --config.rollout.weights_folder=/mnt/weights/gsm8k-qwen3-8b-lora --config.rollout.engines=http://gsm8k-qwen3-8b-lora-worker-0:8000,http://gsm8k-qwen3-8b-lora-worker-1:8000 --config.model.path=hf://Qwen/Qwen3-8B'
# beside the log: the engine on each worker machine, as soon as it is there
until [ "$(gcloud compute tpus queued-resources describe gsm8k-qwen3-8b-lora-worker-0 \
  '--format=value(state.state)')" = ACTIVE ]; do sleep 30; done
folder=$(mktemp -d)
git -C CLONE archive --format=tar.gz -o "$folder/code.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" \
  gsm8k-qwen3-8b-lora-worker-0:gsm8k-qwen3-8b-lora-worker-0.tar.gz --worker=all
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-0 --worker=all \
  '--command=mkdir -p gsm8k-qwen3-8b-lora-worker-0 && tar -xzf gsm8k-qwen3-8b-lora-worker-0.tar.gz -C gsm8k-qwen3-8b-lora-worker-0'
umask 077
printf '%s=%q\n' HF_TOKEN "$HF_TOKEN" ENGINES "$ENGINES" WEIGHTS_FOLDER "$WEIGHTS_FOLDER" WEIGHTS_MOUNT "$WEIGHTS_MOUNT" >"$folder/environment"
gcloud compute tpus tpu-vm scp "$folder/environment" \
  gsm8k-qwen3-8b-lora-worker-0:.jaxrl_tis_env --worker=all
rm -r "$folder"
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-0 --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora-worker-0/launch/on_vm.sh setup'
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-0 --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora-worker-0/launch/on_vm.sh engine gsm8k-qwen3-8b-lora-worker-0 Qwen/Qwen3-8B --tensor-parallel-size 4 --enable-lora --max-lora-rank 32 --max-loras 2 --max-model-len 2048 --dtype bfloat16'
until [ "$(gcloud compute tpus queued-resources describe gsm8k-qwen3-8b-lora-worker-1 \
  '--format=value(state.state)')" = ACTIVE ]; do sleep 30; done
folder=$(mktemp -d)
git -C CLONE archive --format=tar.gz -o "$folder/code.tar.gz" HEAD
gcloud compute tpus tpu-vm scp "$folder/code.tar.gz" \
  gsm8k-qwen3-8b-lora-worker-1:gsm8k-qwen3-8b-lora-worker-1.tar.gz --worker=all
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-1 --worker=all \
  '--command=mkdir -p gsm8k-qwen3-8b-lora-worker-1 && tar -xzf gsm8k-qwen3-8b-lora-worker-1.tar.gz -C gsm8k-qwen3-8b-lora-worker-1'
umask 077
printf '%s=%q\n' HF_TOKEN "$HF_TOKEN" ENGINES "$ENGINES" WEIGHTS_FOLDER "$WEIGHTS_FOLDER" WEIGHTS_MOUNT "$WEIGHTS_MOUNT" >"$folder/environment"
gcloud compute tpus tpu-vm scp "$folder/environment" \
  gsm8k-qwen3-8b-lora-worker-1:.jaxrl_tis_env --worker=all
rm -r "$folder"
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-1 --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora-worker-1/launch/on_vm.sh setup'
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora-worker-1 --worker=all \
  '--command=bash gsm8k-qwen3-8b-lora-worker-1/launch/on_vm.sh engine gsm8k-qwen3-8b-lora-worker-1 Qwen/Qwen3-8B --tensor-parallel-size 4 --enable-lora --max-lora-rank 32 --max-loras 2 --max-model-len 2048 --dtype bfloat16'
gcloud compute tpus tpu-vm ssh gsm8k-qwen3-8b-lora --worker=0 \
  '--command=bash gsm8k-qwen3-8b-lora/launch/on_vm.sh follow'
# then: whenever the state is one of SUSPENDING, SUSPENDED, FAILED, PREEMPTED, delete --force and again from 1; the run continues from its workdir
