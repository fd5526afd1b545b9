#!/usr/bin/env bash
# From a fresh machine to an attention-free model: makes .venv, installs, distils the small teacher that lies in scripts/quickstart with
# both recipes, scores every model, exports the best student and lets it write.  Some minutes on two cores.
#
# bash scripts/quickstart.sh [FOLDER]      all that it makes goes below FOLDER, runs/quickstart by default
#
# A second start does not repeat what is done, and goes on with a run that was broken off.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup_venv.sh

out=${1:-runs/quickstart}
teacher=scripts/quickstart/teacher
data=$out/data/small
stage1_tokens=${STAGE1_TOKENS:-120K}
stage2_tokens=${STAGE2_TOKENS:-300K}

main() {
    case ${1:-} in
        -*) sed -n '2,7s/^# \{0,1\}//p' scripts/quickstart.sh; exit 0 ;;
    esac
    setup_venv cpu
    export PATH=$PWD/.venv/bin:$PATH
    choose_processes
    prepare_data
    distil
    score_all
    export_best
    show_results
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
    [ -f "$data.meta.json" ] && return
    run python tools/preprocess_owt.py --input scripts/quickstart/text.jsonl.gz --output_prefix "$data" \
        --tokenizer $teacher --val_fraction 0.02 --workers "$processes"
}

# Learning rates are for this teacher; the paper's are for one of a billion parameters.  At 2e-3 the recipe `paper` loses here what stage 1
# has learnt: some 6 % of the normalisers of features that are rotated after the map are negative, and gradients reach 1e6.
distil() {
    local recipe
    for recipe in paper tuned; do
        train "stage1-$recipe" stage1 --teacher $teacher --recipe $recipe --train_tokens $stage1_tokens
    done
    train hedgehog stage2 --init_from "$out/stage1-paper" --recipe paper --decay none --conv_kernel 0 --no_gate \
        --train_tokens $stage2_tokens --lr 5e-4
    train hedgemamba-paper stage2 --init_from "$out/stage1-paper" --recipe paper --train_tokens $stage2_tokens --lr 5e-4
    train hedgemamba-tuned stage2 --init_from "$out/stage1-tuned" --recipe tuned --train_tokens $stage2_tokens --lr 2e-3 --lr_new 1e-2
}

# train NAME STAGE OPTIONS...
train() {
    local folder=$out/$1 stage=$2 resume=()
    shift 2
    [ -f "$folder/summary.json" ] && return
    [ -f "$folder/run.json" ] && resume=(--resume)
    run deepspeed --num_accelerators "$processes" --master_port "$(free_port)" "scripts/$stage.py" --ds_config ds_configs/zero1.json \
        --data_path "$data" --output_dir "$folder" --dtype fp32 --seq_len 256 --global_batch_size 8 --eval_tokens 20K \
        --save_interval 50 "$@" "${resume[@]}"
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
    [ -f "$out/results/$1.json" ] && return
    mkdir -p "$out/results"
    run python scripts/evaluate.py --model "$2" --data_path "$data" --seq_len 256 --eval_tokens 60K --output "$out/results/$1.json"
}

export_best() {
    [ -f "$out/hedgemamba-hf/config.json" ] && return
    run python tools/convert_to_hf.py "$out/hedgemamba-tuned" "$out/hedgemamba-hf"
}

show_results() {
    run python scripts/generate.py --model "$out/hedgemamba-hf" --prompt "The harbour was" --max_new_tokens 60
    printf '\n'
    python scripts/compare_results.py --results "$out"/results/{teacher,stage1-paper,stage1-tuned,hedgehog,hedgemamba-paper,hedgemamba-tuned}.json
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
