#!/bin/bash
# Mixtral 8x7B on 64 GPUs. `fullbore explain --megatron mixtral-8x7b.sh --cluster h100:8x8` reads it.
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=8

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --swiglu
    --normalization RMSNorm
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope
    --rotary-base 1000000
    --seq-length 4096
    --max-position-embeddings 32768
    --vocab-size 32000
    --hidden-dropout 0.0
    --attention-dropout 0.0
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1e-4
    --bf16
)
torchrun --nproc_per_node 8 --nnodes ${NNODES} pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${MOE_ARGS[@]} ${PARALLEL_ARGS[@]} ${TRAINING_ARGS[@]}
