# Any modules through a pipeline, on two ranks of this machine; see two_ranks.py.
export OMP_NUM_THREADS=1
torchrun --standalone --nproc-per-node 2 two_ranks.py
