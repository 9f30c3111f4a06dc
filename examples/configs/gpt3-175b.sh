#!/bin/bash
# GPT-3 175B as Megatron-LM's flags. `fullbore model --megatron gpt3-175b.sh` reads them.
TENSOR=8
PIPELINE=8
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --tokenizer-type GPT2BPETokenizer
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --bf16
    --use-distributed-optimizer
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TENSOR
    --pipeline-model-parallel-size ${PIPELINE}
    --sequence-parallel
)
torchrun --nproc_per_node 8 --nnodes $((TENSOR * PIPELINE / 8)) pretrain_gpt.py \
    "${GPT_MODEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}"
