#!/usr/bin/env bash
# From a fresh machine to an attention-free model: makes .venv, installs, distils the small teacher that lies in scripts/quickstart with
# both recipes, scores every model, exports the best student and lets it write.  Some minutes on two cores.
#
# bash scripts/quickstart.sh [FOLDER]      all that it makes goes below FOLDER, by default runs/quickstart of this repository
#
# STAGE1_TOKENS=120K STAGE2_TOKENS=300K    what each run is trained on; other values want another FOLDER
# PYTHON=python3                           interpreter of a new .venv
# OMP_NUM_THREADS                          threads of each process; by default all processes together have one for each core
#
# A second start does not repeat what is done, goes on with a run that was broken off, and makes again what comes from something that has
# been made anew since.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh

out=${1:-runs/quickstart}
[[ -z ${1:-} || $1 = /* ]] || out=$caller/$1
teacher=scripts/quickstart/teacher
data=$out/data/small
stage1_tokens=${STAGE1_TOKENS:-120K}
stage2_tokens=${STAGE2_TOKENS:-300K}

main() {
    case ${1:-} in
        -h | --help) usage; exit 0 ;;
        -*) fail "there is no option $1; see bash scripts/quickstart.sh --help" ;;
    esac
    [ $# -le 1 ] || fail "one FOLDER at most, not $*"
    check_count STAGE1_TOKENS "$stage1_tokens"
    check_count STAGE2_TOKENS "$stage2_tokens"
    setup_venv cpu
    export PATH=$PWD/.venv/bin:$PATH
    choose_processes
    prepare_data
    distil
    score_all
    export_best
    show_results
}

usage() {
    sed -n '2,/^set /s/^# \{0,1\}//p' scripts/quickstart.sh
}

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

check_count() {
    [[ $2 =~ ^[0-9][0-9_]*(\.[0-9]+)?(e[0-9]+)?[kKmMbB]?$ ]] || fail "$1=$2 is not a count; write it like 300K or 1.5M"
}

# fresh FILE SOURCE...: whether FILE is there and no SOURCE is newer.
fresh() {
    local file=$1 source
    [ -f "$file" ] || return 1
    shift
    for source in "$@"; do
        if [ "$source" -nt "$file" ]; then return 1; fi
    done
}

# One process per GPU, else per core, as long as their number divides the eight sequences of a step.
choose_processes() {
    local available cores
    cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')
    available=$(python -c 'import torch; print(torch.cuda.device_count())')
    [ "$available" -gt 0 ] || available=$cores
    processes=1
    while [ $((processes * 2)) -le "$available" ] && [ $processes -lt 8 ]; do processes=$((processes * 2)); done
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
}

prepare_data() {
    fresh "$data.meta.json" scripts/quickstart/text.jsonl.gz $teacher/tokenizer.json && return
    run python tools/preprocess_owt.py --input scripts/quickstart/text.jsonl.gz --output_prefix "$data" \
        --tokenizer $teacher --val_fraction 0.02 --workers "$processes" --overwrite
}

# Learning rates are for this teacher; the paper's are for one of a billion parameters.  At 2e-3 the recipe `paper` loses here what stage 1
# has learnt: some 6 % of the normalisers of features that are rotated after the map are negative, and gradients reach 1e6.
distil() {
    local recipe
    for recipe in paper tuned; do
        train "stage1-$recipe" stage1 $teacher --recipe $recipe --train_tokens "$stage1_tokens"
    done
    train hedgehog stage2 "$out/stage1-paper" --recipe paper --decay none --conv_kernel 0 --no_gate \
        --train_tokens "$stage2_tokens" --lr 5e-4
    train hedgemamba-paper stage2 "$out/stage1-paper" --recipe paper --train_tokens "$stage2_tokens" --lr 5e-4
    train hedgemamba-tuned stage2 "$out/stage1-tuned" --recipe tuned --train_tokens "$stage2_tokens" --lr 2e-3 --lr_new 1e-2
}

# train NAME STAGE START OPTIONS...: the run $out/NAME, which starts from the teacher or from a run of stage 1.
train() {
    local folder=$out/$1 stage=$2 source=$3 start resume=()
    shift 3
    claim "$folder" "$stage from $source with $*"
    if [ -f "$folder/run.json" ] && ! fresh "$folder/run.json" "$data.meta.json" "$(end_of "$source")"; then
        printf '\n%s is made again: what it comes from is newer\n' "$folder"
        rm -r "$folder"
    fi
    if [ -f "$folder/summary.json" ]; then return; fi
    if [ -f "$folder/run.json" ]; then resume=(--resume); fi
    if [ "$stage" = stage1 ]; then start=(--teacher "$source"); else start=(--init_from "$source"); fi
    run deepspeed --num_accelerators "$processes" --master_port "$(free_port)" "scripts/$stage.py" --ds_config ds_configs/zero1.json \
        --data_path "$data" --output_dir "$folder" --dtype fp32 --seq_len 256 --global_batch_size 8 --eval_tokens 20K \
        --save_interval 50 "${start[@]}" "$@" "${resume[@]}"
}

# claim FOLDER OPTIONS: note what a run is made with, and refuse one that was made with something else.
claim() {
    local options=${2//"$out"/FOLDER} before
    if [ -f "$1/run.json" ]; then
        before=$(cat "$1.options" 2>/dev/null) || fail "$1 holds a run with options that are not known, as $1.options is missing; remove it"
        [ "$before" = "$options" ] || fail "$1 was made by $before; now it would be $options: use these again, or another FOLDER"
    fi
    printf '%s\n' "$options" >"$1.options"
}

# The file that is written last in the folder of the teacher or of a run.
end_of() {
    if [ "$1" = "$teacher" ]; then echo "$1/model.safetensors"; else echo "$1/summary.json"; fi
}

free_port() {
    python -c 'import socket; probe = socket.socket(); probe.bind(("", 0)); print(probe.getsockname()[1])'
}

score_all() {
    score teacher $teacher
    local name
    for name in stage1-paper stage1-tuned hedgehog hedgemamba-paper hedgemamba-tuned; do score $name "$out/$name"; done
}

score() {
    local result=$out/results/$1.json
    fresh "$result" "$(end_of "$2")" "$data.meta.json" && return
    mkdir -p "$out/results"
    run python scripts/evaluate.py --model "$2" --data_path "$data" --seq_len 256 --eval_tokens 60K --output "$result"
}

export_best() {
    fresh "$out/hedgemamba-hf/config.json" "$out/hedgemamba-tuned/summary.json" && return
    run python tools/convert_to_hf.py "$out/hedgemamba-tuned" "$out/hedgemamba-hf" --overwrite
}

show_results() {
    run python scripts/generate.py --model "$out/hedgemamba-hf" --prompt "The harbour was" --max_new_tokens 60
    run python scripts/compare_results.py \
        --results "$out"/results/{teacher,stage1-paper,stage1-tuned,hedgehog,hedgemamba-paper,hedgemamba-tuned}.json
    cat <<END

hedgehog is the recipe paper without decay, convolution and gate.  These are short runs of one seed; features that are rotated after the
map, as in paper, have normalisers of either sign and train unsteadily on this teacher.

The attention-free model is in $out/hedgemamba-hf; transformers loads it:
    AutoModelForCausalLM.from_pretrained("$out/hedgemamba-hf", trust_remote_code=True)

The same for Pythia-160M on a GPU (source .venv/bin/activate first):
    python tools/preprocess_owt.py --output_prefix data/openwebtext --tokenizer EleutherAI/pythia-160m --workers 16
    deepspeed scripts/stage1.py --ds_config ds_configs/zero2.json --teacher EleutherAI/pythia-160m --recipe tuned --output_dir runs/stage1
    deepspeed scripts/stage2.py --ds_config ds_configs/zero2.json --init_from runs/stage1 --recipe tuned --output_dir runs/stage2
    python scripts/evaluate.py --model runs/stage2 --data_path data/openwebtext
    python tools/convert_to_hf.py runs/stage2 pythia-160m-hedgemamba
END
}

run() {
    printf '\n$'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

main "$@"
