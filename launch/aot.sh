#!/usr/bin/env bash
# Compiles the TPU configs at full size, without a TPU: ./launch/aot.sh [folder for logs and JSON]
# Writes their tables to docs/tpu_programs.md in about two hours. Two configs compile at a time; JOBS=1 takes one.
#
# Examples:
#   ./launch/aot.sh
#   JOBS=1 ./launch/aot.sh runs/aot-new
set -euo pipefail
# shellcheck source=launch/venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv tpu
out=${1:-runs/aot}
mkdir -p "$out"
rm -f "$out/failed"
version() { "$PY" -c "import importlib.metadata as m; print(m.version('$1'))"; }
compile() {  # $1: name of the log and the JSON; the rest: arguments of jaxrl_tis.aot
  local name=$1
  shift
  while [ "$(jobs -rp | wc -l)" -ge "${JOBS:-2}" ]; do wait -n || true; done
  echo "== $name (log in $out/$name.log)"
  {
    "$PY" -m jaxrl_tis.aot "$@" --json="$out/$name.json" --markdown \
      2>"$out/$name.err" >"$out/$name.log" || { tail "$out/$name.log" "$out/$name.err" >&2; touch "$out/failed"; }
  } &
}
file_of() { local file=configs/${1%%:*}.py; [[ $1 == *:* ]] && file+=:${1#*:}; echo "$file"; }

long=(dapo_qwen3_8b_64k dapo_qwen3_8b_64k:128k)
configs=(gsm8k_qwen25_0p5b:grpo gsm8k_qwen25_0p5b:ppo dapo_qwen25_32b dapo_qwen25_32b:async dapo_qwen3_8b
  dapo_gpt_oss_20b "${long[@]}" dapo_qwen3_30b_a3b dapo_qwen3_30b_a3b_v5e gsm8k_one_chip:qwen25_0p5b gsm8k_one_chip:gemma3_1b
  gsm8k_one_chip:qwen3_1p7b gsm8k_qwen3_8b_lora)
sampled=(gsm8k_qwen25_0p5b:grpo dapo_qwen25_32b)
formats=("none,bfloat16" "w8a16,bfloat16" "w8a8,bfloat16" "w8a8,int8")
for config in "${configs[@]}"; do compile "$config" --config="$(file_of "$config")"; done
for config in "${sampled[@]}"; do
  for format in "${formats[@]}"; do
    compile "$config,$format" --config="$(file_of "$config")" --programs=decode \
      --config.engine.quantization="${format%,*}" --config.engine.cache_dtype="${format#*,}"
  done
done
wait
[ ! -e "$out/failed" ] || exit 1

programs() {  # title and tables of a log; of the table of programs the columns and rows of the page
  awk -F ' [|] ' -v OFS=' | ' '
    NR == 1 { sub(/Mesh [a-z x]*:/, "Mesh"); print }
    !/^\|/ { table = ""; next }
    !table { print ""; table = /^\| program / ? "programs" : "other" }
    table == "other" { print }
    table == "programs" && /^\|---/ { print "|---|---|---|---|---|" }
    table == "programs" && /^\| / && !/insert |quantize |reshard / { sub(" GiB", "", $5); print $1, $5, $7, $8, $11 " |" }' "$1"
}

cat >"$out/page.md" <<PAGE
# Programs of the shipped configs

This page lists the memory and FLOPs of the TPU programs of the shipped configs. \`./launch/aot.sh\` wrote it
with jax $(version jax) and libtpu $(version libtpu), without a TPU. Nothing was timed on a TPU.
[tpu.md](tpu.md#what-the-result-means) explains the columns. Peaks are in GiB, meshes data x fsdp x tensor x context x
expert. Insert, eval_insert, quantize and reshard have no row: other programs use more memory, and these have no FLOPs.
PAGE
for config in "${configs[@]}"; do
  printf "\n## \`%s\`\n\n" "$(file_of "$config")" >>"$out/page.md"
  programs "$out/$config.log" >>"$out/page.md"
done

cat >>"$out/page.md" <<PAGE

## Number formats of the sampler

The decode program with other formats of weights and KV cache (\`engine.quantization\`, \`engine.cache_dtype\`).

| config | weights, cache | peak | HBM use | moves | at best (model) |
|---|---|---|---|---|---|
PAGE
for config in "${sampled[@]}"; do
  for format in "${formats[@]}"; do
    name=${format/none/bfloat16}
    # Columns of the table that jaxrl_tis.aot prints.
    awk -F ' [|] ' -v name="| \`$(basename "$(file_of "$config")")\` | ${name/,/, }" -v OFS=' | ' \
      '/^\| decode/ { gsub(" GiB", ""); print name, $5, $7, $10, $11 " |" }' "$out/$config,$format.log" >>"$out/page.md"
  done
done

cat >>"$out/page.md" <<PAGE

## Collectives of long answers

Collectives of one run of a program on a device, in GiB of whole arrays; those of less than a percent are left out. Over
\`context\` the update gathers keys and sums their gradients, decode sums attention and gathers nothing.

| config | program | collectives |
|---|---|---|
PAGE
for config in "${long[@]}"; do
  "$PY" - "$(basename "$(file_of "$config")")" "$out/$config.json" >>"$out/page.md" <<'CODE'
import collections, json, sys
for name, entry in json.load(open(sys.argv[2]))["programs"].items():
    moved, runs = collections.Counter(), collections.Counter()
    for c in entry["collectives"]:
        key = f"{c['kind']} ({'+'.join(c['axes'])})"
        moved[key] += c["count"] * c["bytes"]
        runs[key] += c["count"]
    large = [k for k, n in moved.most_common() if n > moved.total() / 100]
    if name in ("train", "decode"):
        print(f"| `{sys.argv[1]}` | {name} | " + ", ".join(
            f"{runs[k]:,} {k} {moved[k] / 2**30:,.1f}" for k in large) + " |")
CODE
done
cat >>"$out/page.md" <<PAGE

## Segment kernels

Weights, masks and metrics of a packed batch (\`weigh\`), in our kernels and in the scatters that XLA makes of the same
sums: \`python -m benchmarks.segments\`. Bytes of one device.

PAGE
# shellcheck disable=SC2046  # a word for each config
"$PY" -m benchmarks.segments $(for config in "${configs[@]}"; do file_of "$config"; done) >>"$out/page.md"
mv "$out/page.md" docs/tpu_programs.md
