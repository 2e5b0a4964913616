#!/usr/bin/env bash
# Measures a program on a GPU beside the version before, in turn, and compares logits with the CPU's:
# the table of xtask/MEASUREMENTS.md. It needs nothing but the programs, so it can be carried to a machine without Rust:
#
#     xtask synth llama3.2-1b --out DIR && PROGRAM pack --model-path DIR --out MODEL
#     xtask/gpu-table.sh MODEL PROGRAM [BEFORE]
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,7s/^# \?//p' "$0" >&2; exit 2; }
model=$1 program=$2 before=${3:-}
dir=$(mktemp -d)
trap 'rm -r "$dir"' EXIT
# What the programs say is shown where one fails.
set -E
exec 3>&2
trap 'cat "$dir/said" >&3' ERR

on_gpu() { # VERSION PROGRAM COMMAND FLAG…
    XDG_CACHE_HOME="$dir/cache-$1" CUDA_CACHE_PATH="$dir/driver-$1" "$2" "$3" -m "$model" -b opencl --gpu-attn "${@:4}"
}

# The first start compiles and tunes the kernels, so it comes before all others.
start() { # VERSION PROGRAM WHAT
    local begin=$(date +%s%N)
    on_gpu "$1" "$2" bench -p 8 -n 1 -r 1 --kv-type f16 >/dev/null 2>"$dir/said"
    echo "$1: a run of one prompt and one token, $3: $((($(date +%s%N) - begin) / 1000000)) ms"
}

# Rows that BEFORE and PROGRAM measure in turn.
rows() {
    if [ -n "$before" ]; then
        echo "before:"
        on_gpu before "$before" bench -r 3 "$@" 2>"$dir/said"
        echo "now:"
    fi
    on_gpu now "$program" bench -r 3 "$@" 2>"$dir/said"
}

for what in "nothing cached" "from the cache"; do
    [ -z "$before" ] || start before "$before" "$what"
    start now "$program" "$what"
done

printf '[%s]' "$(seq -s, 1 7 2100)" >"$dir/ids.json"
for kv in f16 q4; do
    "$program" logits -m "$model" --tokens "$dir/ids.json" --out "$dir/cpu" --kv-type "$kv" -b cpu 2>"$dir/said"
    for chunk in 1 16 256 300; do
        on_gpu now "$program" logits --tokens "$dir/ids.json" --out "$dir/gpu" --kv-type "$kv" \
            --prefill-chunk "$chunk" 2>"$dir/said"
        cmp -s "$dir/cpu" "$dir/gpu" && same="the CPU's bits" || same="NOT the CPU's bits"
        echo "logits of 300 tokens, $kv cache, $chunk at once: $same"
    done
done

for turn in 1 2; do
    for kv in f16 q4; do
        rows --kv-type "$kv" -p 512,2048 -n 128 -d 0,4096
        rows --kv-type "$kv" -p 0 -n 64 --batch 1,2,4,8,16
    done
done
