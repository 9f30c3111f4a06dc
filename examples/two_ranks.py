"""Any modules through a pipeline: two ranks, two stages each, interleaved 1F1B.

Started by pipeline.sh with torchrun. Every rank makes the whole small model from one seed and
keeps its own stages; a large model would make only those.
"""

import torch
from torch import nn

import fullbore

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
rank = torch.distributed.get_rank()

schedule = fullbore.schedules.interleaved(ranks=2, microbatches=4, virtual_stages=2)
layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(schedule.stages)]
mine = {stage: layers[stage] for stage in schedule.placement.stages_of(rank)}
optimizer = torch.optim.SGD([p for module in mine.values() for p in module.parameters()], lr=0.5)

inputs, targets = torch.randn(16, 32), torch.randn(16, 32).tanh()
pipe = fullbore.Pipeline(stages=mine, schedule=schedule, loss_fn=nn.functional.mse_loss)
for step in range(5):
    optimizer.zero_grad()
    result = pipe.step(inputs, targets)
    optimizer.step()
    if rank == 0:
        print(f"step {step}: loss {result.loss:.3f}", flush=True)
pipe.close()
torch.distributed.destroy_process_group()
