#!/usr/bin/env bash
# How the files beside this script were written: by the sources of revision 6da7eea, on a CPU, with torch 2.13.0.
#
#     git worktree add --detach OLD 6da7eea
#     bash write.sh OLD EMPTY_DIRECTORY
set -euo pipefail
old=$(realpath "$1")
export PYTHONPATH="$old:$old/kernels" OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
cd "$2"

tpengine() { python -m tpengine.cli "$@"; }
train() { torchrun --nproc-per-node "$1" -m tpengine.train "${@:2}"; }
small=(--data.path text.tokens --device cpu --model.hidden-size 8 --model.num-layers 2 --model.ffn-size 16
    --train.seq-len 16 --train.micro-batch-size 2 --train.num-micro-batches 2 --optim.warmup-steps 2
    --train.eval-micro-batches 2 --train.eval-every 3 --train.sample-tokens 4 --train.sample-every 3
    --train.keep-checkpoints 1)

# A token file of two documents, and which of them lie in which sample of 16 tokens.
for name in pipeline generation; do
    iconv -c -f utf-8 -t ascii "$old/tpengine/$name/README.md" | head -c 3000 > $name.txt
done
tpengine data --from generation.txt pipeline.txt --end 0 --out text.tokens
tpengine data --fit 16 text.tokens

# A verified plan, and a schedule as a user writes one.
tpengine schedule --schedule zbv --pp 2 --micro-batches 4 --plan-text plan.txt > /dev/null
echo 'rank 0: 0F0 0F1 0B1 0B0' > schedule.txt

# A fast run of one process: it leaps, goes back three times and gives up; goes on with a smaller learning rate, up to
# step 8; and records its last steps.
train 1 "${small[@]}" --parallel.schedule schedule.txt --model.num-heads 2 --model.num-kv-heads 2 --train.steps 8 \
    --train.checkpoint-every 2 --train.spike 'rollback 1 4' --optim.lr 2 --run-dir fast || test $? = 1
train 1 --run-dir fast --resume --train.spike 'skip 8 4' --optim.lr 0.03 --train.profile-steps 5:8

# An exact run of four processes, of 4 steps, whose last one leaps and is skipped.
train 4 "${small[@]}" --parallel.tp 2 --parallel.dp 2 --parallel.zero 1 --train.reduction exact --model.num-heads 4 \
    --model.num-kv-heads 2 --model.tie-embeddings --train.steps 4 --train.spike 'skip 1 4' --optim.lr 1 \
    --train.profile-steps '' --run-dir exact

# What the same sources made of these files: two more steps of each run, in one process, and what commands print.
mkdir said
cp -r fast exact said
for run in fast exact; do
    train 1 --run-dir said/$run --resume --train.steps 10 --parallel.tp 1 --parallel.dp 1 --parallel.zero 0 \
        --train.profile-steps ''
    mv said/$run/metrics.jsonl said/$run.metrics.jsonl
    tpengine generate $run --prompt 'tokens' --max-tokens 12 --temperature 1 --seed 3 > said/$run.generate.txt
    tpengine checkpoint ls $run > said/$run.checkpoints.txt
done
tpengine diagnose fast --json > said/diagnose.json
tpengine schedule --profile fast/profile.json --schedule gpipe --pp 1 --micro-batches 4 > said/schedule.txt

# TensorBoard's events, locks and pictures nobody reads again.
rm -r {generation,pipeline}.txt schedule.txt {fast,exact}/{events*,.lock,*.svg} said/{fast,exact}
